"""A webhook endpoint for GitHub.

    pip install 'txbox[http,postgresql]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    psql $TXBOX_DATABASE_URL -c 'CREATE TABLE build (commit_id text)'
    txbox init
    WEBHOOK_SECRET=… txbox run webhook_service:app --http-port 8000

serves it at /webhooks/github, and retries what failed. Any ASGI server serves it, too: `uvicorn webhook_service:hook`,
without the retries. For FastAPI and Starlette see fastapi_webhook.py.
"""

from __future__ import annotations

import os
from typing import Any

import psycopg

from txbox import App, Message
from txbox.brokers.webhook import GitHub, Webhook

app = App(os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"))


@app.handler("github", type="push", consumer="builds")
def build(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    tx.execute("INSERT INTO build (commit_id) VALUES (%s)", (message.body["after"],))


hook = Webhook(topic="github", verify=GitHub(os.environ["WEBHOOK_SECRET"]))
app.consume(hook)
