"""FastAPI with the worker and the relay in its process: one thing to deploy.

    pip install fastapi uvicorn "txbox[postgresql,ui]"
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    txbox init
    psql $TXBOX_DATABASE_URL -c 'CREATE TABLE placed (number int, amount int); CREATE TABLE invoice (number int)'
    DASHBOARD_TOKEN=… uvicorn fastapi_service:api

POST /orders writes an order and stages a message, or neither. The relay hands it to `invoice`, which runs in
this process too: at startup, on requests, and after a crash. /dashboard shows all of it.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import psycopg
from fastapi import FastAPI, HTTPException

from txbox import App, Message
from txbox.integrations.starlette import lifespan, probes, transaction
from txbox.ui import Token
from txbox.worker.health import Health

app = App(os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"))
dashboard = app.asgi(Token(os.environ["DASHBOARD_TOKEN"]))
health = Health()
Tx = Annotated[psycopg.Connection, transaction(app)]


@app.handler("orders", consumer="invoicing")
def invoice(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    tx.execute("INSERT INTO invoice (number) VALUES (%s)", (message.body["number"],))


api = FastAPI(lifespan=lifespan(app, health=health, ends=[dashboard]), routes=probes(app, health))
api.mount("/dashboard", dashboard)


@api.post("/orders/{number}", status_code=201)
def order(number: int, amount: int, tx: Tx) -> dict[str, int]:
    """Committed before the answer is sent, and rolled back by an exception, together with what is staged."""
    tx.execute("INSERT INTO placed (number, amount) VALUES (%s, %s)", (number, amount))
    app.outbox.stage(tx, "orders", {"number": number})
    if amount > 1000:
        raise HTTPException(409, "too much for one order")
    return {"number": number}
