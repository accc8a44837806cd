"""The release that runs: `python shop.py` makes its database, and processes 48 orders."""

from txbox import App, Message
from txbox.brokers.local import Local

app = App("sqlite:///shop.db")
app.publish(Local(), topics=["receipts"])


def price(pieces):
    return pieces * 250


@app.handler("orders", consumer="billing", keep_payload="always")
def bill(message: Message[dict], tx):
    cents = price(message.body["pieces"])
    tx.execute("INSERT INTO invoices (customer, cents) VALUES (?, ?)", (message.key, cents))
    app.outbox.stage(tx, "receipts", {"customer": message.key, "cents": cents})


@app.handler("receipts", consumer="post")
def send_receipt(message: Message[dict], tx):
    tx.execute("INSERT INTO letters (text) VALUES (?)", (f"Paid: {message.body['cents']}",))


if __name__ == "__main__":
    app.init()
    with app.transaction() as tx:
        tx.execute(
            "CREATE TABLE invoices (number INTEGER PRIMARY KEY, customer TEXT, cents INTEGER)"
        )
        tx.execute("CREATE TABLE letters (number INTEGER PRIMARY KEY, text TEXT)")
    for number in range(48):
        payload = b'{"pieces": %d}' % (number % 12 + 1)
        app.process(Message(id=f"o-{number}", topic="orders", key="anna", payload=payload))
