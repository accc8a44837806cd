"""A webhook endpoint for GitHub: any ASGI server serves it, any ASGI framework takes it in.

    WEBHOOK_SECRET=… uvicorn webhook_service:hook

In FastAPI or Starlette: `api.router.routes.append(Route("/webhooks/github", hook))`; see fastapi_webhook.py.
"""

from __future__ import annotations

import os
import sqlite3
from typing import Any

from txbox import App, Message
from txbox.brokers.webhook import GitHub, Webhook

app = App(os.environ.get("TXBOX_DATABASE_URL", "sqlite:///service.db"))


@app.handler("github", type="push", consumer="builds")
def build(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
    tx.execute("INSERT INTO build (commit_id) VALUES (?)", (message.body["after"],))


hook = Webhook(app.process_async, topic="github", verify=GitHub(os.environ["WEBHOOK_SECRET"]))
