"""FastAPI: a route of your own around `process_async`, and GitHub's webhook beside it.

    pip install fastapi uvicorn "txbox[http,postgresql]"
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    txbox init
    psql $TXBOX_DATABASE_URL -c 'CREATE TABLE booking (order_id int, amount int); CREATE TABLE build (commit_id text)'
    WEBHOOK_SECRET=… API_TOKEN=… uvicorn fastapi_webhook:api

A failed message is parked in the table and answered with 200, so the sender does not send it again: the worker that
`lifespan` runs in this process retries it. `webhooks` makes a route of what the App consumes, and no mount: that
answers a URL without a slash at its end with a redirect, which GitHub does not follow.
"""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from typing import Any

import psycopg
from fastapi import FastAPI, Request, Response

from txbox import App, Limits, Message, StoreUnavailable
from txbox.brokers.webhook import GitHub, Webhook
from txbox.integrations.starlette import lifespan, webhooks

TOKEN = os.environ["API_TOKEN"]
LONGEST_BODY = 1 << 20

app = App(
    os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"),
    limits=Limits(unavailable_for=timedelta(seconds=2)),  # a caller does not wait for half a minute
)


@app.handler("orders", type="order.paid", consumer="billing")
def book(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    """Book an order; what is written through `tx` commits together with the inbox row."""
    order = message.body
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (%s, %s)", (order["id"], order["amount"])
    )


@app.handler("github", type="push", consumer="builds")
def build(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    tx.execute("INSERT INTO build (commit_id) VALUES (%s)", (message.body["after"],))


# who sent it is what the signature says; `verify=` knows Stripe and Standard Webhooks too
app.consume(Webhook(topic="github", verify=GitHub(os.environ["WEBHOOK_SECRET"])))
api = FastAPI(lifespan=lifespan(app), routes=webhooks(app))  # all that is consumed until now


@api.post("/orders")
async def orders(request: Request) -> Response:
    """2xx only after the commit: the caller sends again whatever else it gets, or if it gets nothing."""
    given = request.headers.get("authorization", "")
    if not secrets.compare_digest(given.encode(), f"Bearer {TOKEN}".encode()):
        return Response("who are you?", 401)
    if int(request.headers.get("content-length", LONGEST_BODY + 1)) > LONGEST_BODY:
        return Response("too long", 413)
    message = Message[Any](
        id=request.headers.get("x-event-id"),  # the sender's, the same when it sends again
        topic="orders",
        type=request.headers.get("x-event-type"),
        payload=await request.body(),
    )
    try:
        outcome = await app.process_async(message)
    except StoreUnavailable:
        return Response("the database is away", 503, {"Retry-After": "5"})
    return Response(outcome.value, 200 if outcome.settles else 503)
