"""The App that `txbox run tests.support.webhook.served:app` serves; the plan comes by the environment.

A message of the type `hold` waits for the file that the plan's `gate` names, after its effect; `bad`
fails for good.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.effect import AT_ONCE, CONSUMER, TOPIC, add_effect
from tests.support.webhook.senders import SECRET, STANDARD_SECRET
from txbox import App, Limits, Message, Reject
from txbox.brokers.file import File
from txbox.brokers.webhook import GitHub, StandardWebhooks, Webhook

plan: dict[str, Any] = json.loads(os.environ["TEST_PLAN"])

app = App(plan["url"], limits=Limits(unavailable_for=timedelta(seconds=0.5)))


def handle(message: Message[Any], tx: Any) -> None:
    add_effect(tx, message.id, str(os.getpid()))
    Path(plan["directory"], f"handling-{message.id}".replace("/", "")).touch()
    if message.type == "bad":
        raise Reject("bad")
    if message.type == "hold":
        while not Path(plan["directory"], "gate").exists():
            time.sleep(0.01)


app.handler(TOPIC, consumer=CONSUMER, retry=AT_ONCE, mode=plan.get("mode", "inline"))(handle)
if plan.get("second_consumer"):
    app.handler(TOPIC, consumer="shipping")(handle)
if plan.get("webhooks", True):
    app.consume(
        Webhook(
            topic=plan.get("topic", TOPIC),
            verify=GitHub(SECRET),
            path=plan.get("path", "/hook"),
            answer_within=timedelta(seconds=plan.get("seconds", 8)),
            **plan.get("options", {}),
        )
    )
    app.consume(Webhook(topic=plan.get("topic", TOPIC), verify=StandardWebhooks(STANDARD_SECRET)))
if plan.get("file"):
    app.consume(File(plan["file"], topic=TOPIC, follow=True))
