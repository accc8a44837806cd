"""The next release: ten pieces or more cost less."""

from txbox import App, Message
from txbox.brokers.local import Local

app = App("sqlite:///shop.db")
app.publish(Local(), topics=["receipts"])


def price(pieces):
    return pieces * (225 if pieces >= 10 else 250)


@app.handler("orders", consumer="billing", keep_payload="always")
def bill(message: Message[dict], tx):
    cents = price(message.body["pieces"])
    tx.execute("INSERT INTO invoices (customer, cents) VALUES (?, ?)", (message.key, cents))
    app.outbox.stage(tx, "receipts", {"customer": message.key, "cents": cents})


@app.handler("receipts", consumer="post")
def send_receipt(message: Message[dict], tx):
    tx.execute("INSERT INTO letters (text) VALUES (?)", (f"Paid: {message.body['cents']}",))
