"""The command line shows what the rules of the App leave."""

from __future__ import annotations

import json

from tests.support.command import Command


def test_the_command_line_shows_what_the_rules_leave(sqlite_shop: Command) -> None:
    sqlite_shop.file(
        "shop.py",
        """
import os
from txbox import App, Message, Redaction

app = App(os.environ["SHOP_URL"], redact=Redaction(
    headers=("x-customer",), fields=("body.card", "result.card"), errors=("[0-9]{4} [0-9]{4}",)))

@app.handler("orders", consumer="billing", keep_payload="always", keep_result=True)
def bill(message: Message[dict], tx):
    if message.body.get("bad"):
        raise ValueError(f"declined {message.body['card']}")
    return message.body
""",
    )
    for message_id, bad in (("a", False), ("b", True)):
        data = json.dumps({"card": "4111 1111", "bad": bad})
        sqlite_shop(
            "send", "orders", "--id", message_id, "--data", data, "--header", "x-customer=Ada"
        )
    ran = sqlite_shop("run", "--once", "--log-json", code=None)
    assert "declined ***" in ran.err
    assert "4111 1111" not in ran.out + ran.err
    for message_id in ("a", "b"):
        for more in ((), ("--json",)):
            told = sqlite_shop("show", "billing", message_id, "--reveal", *more).out
            assert "***" in told
            assert "4111 1111" not in told
            assert "Ada" not in told
    assert "4111 1111" not in sqlite_shop("list").out
