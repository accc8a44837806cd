"""Handlers whose repository and settings come from a dishka container.

pip install 'txbox[postgresql]' dishka
export TXBOX_DATABASE_URL=postgresql://localhost/shop
python dishka_handlers.py
"""

import os

import psycopg
from dishka import Provider, Scope, from_context, make_container, provide

from txbox import App, Message
from txbox.integrations.dishka import resolver


class Fees:
    percent = 10


class Ledger:
    """Writes in the handler's own transaction."""

    def __init__(self, tx: psycopg.Connection, fees: Fees) -> None:
        self.tx, self.fees = tx, fees

    def book(self, amount: int) -> None:
        fee = amount * self.fees.percent // 100
        self.tx.execute("INSERT INTO ledger VALUES (%s)", (amount + fee,))


class Shop(Provider):
    tx = from_context(psycopg.Connection, scope=Scope.REQUEST)
    ledger = provide(Ledger, scope=Scope.REQUEST)
    fees = provide(Fees, scope=Scope.APP)


container = make_container(Shop())
app = App(
    os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"),
    resolver=resolver(container),
)


@app.handler("orders", consumer="billing")
def bill(message: Message[int], tx: psycopg.Connection, ledger: Ledger) -> None:
    ledger.book(message.body)


if __name__ == "__main__":
    app.init()
    with app.transaction() as tx:
        tx.execute("CREATE TABLE IF NOT EXISTS ledger (amount INTEGER)")
    for _ in range(2):
        print(app.process(Message(id="o-1", topic="orders", payload=b"50")))
    with app.transaction() as tx:
        print(tx.execute("SELECT amount FROM ledger").fetchall())
    container.close()
