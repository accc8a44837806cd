"""Flask: an order and its message in one transaction, and a webhook.

pip install 'txbox[flask,http,postgresql]'
export TXBOX_DATABASE_URL=postgresql://localhost/shop
txbox init
psql $TXBOX_DATABASE_URL -c 'CREATE TABLE orders (number int); CREATE TABLE invoices (number int);
                             CREATE TABLE builds (commit_id text)'
flask --app flask_shop run
"""

import os

import psycopg
from flask import Flask, abort

from txbox import App, Message
from txbox.brokers.webhook import GitHub, Webhook
from txbox.integrations.flask import transaction, webhooks

app = App(os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"))
app.consume(Webhook(topic="github", verify=GitHub(os.environ.get("SHOP_SECRET", "the secret"))))


@app.handler("invoices", consumer="invoicing")
def invoice(message: Message[dict], tx: psycopg.Connection) -> None:
    tx.execute("INSERT INTO invoices VALUES (%s)", (message.body["order"],))


@app.handler("github", type="push", consumer="builds")
def build(message: Message[dict], tx: psycopg.Connection) -> None:
    tx.execute("INSERT INTO builds VALUES (%s)", (message.body["after"],))


api = Flask(__name__)
api.register_blueprint(webhooks(app))


@api.post("/orders/<int:number>")
@transaction(app)
def order(tx: psycopg.Connection, number: int):
    tx.execute("INSERT INTO orders VALUES (%s)", (number,))
    app.outbox.stage(tx, "invoices", {"order": number})  # sent if, and only if, the order is kept
    if number > 1000:
        abort(409)  # neither is
    return {"order": number}, 201
