"""A shop with everything in it that an operator meets: what is processed, dead, quarantined, waiting and leaving."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from txbox import App, Message, Reject, RetryPolicy
from txbox.brokers.local import Local

#: Nothing of it may be executed or steer anything: HTML, script, ANSI, marks of direction, what cannot be seen.
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "\x1b[31mred\x1b[0m \u202eevil\u202c \u200bzero {{7*7}} '\"&</td></table> /../?a=b&c#d %2e%2e é"
)
TOKEN = "a-token-of-the-tests-that-is-long-enough"


class Broken:
    """Decides what the handlers do; tests mend it."""

    def __init__(self) -> None:
        self.gateway = True


def shop(url: str, broken: Broken | None = None) -> App:
    app = App(url)
    state = broken or Broken()
    soon = RetryPolicy(
        max_attempts=2, base=timedelta(milliseconds=1), cap=timedelta(milliseconds=1)
    )

    @app.handler("orders", consumer="billing", keep_payload="always", retry=soon)
    def bill(message: Message[dict[str, Any]], tx: Any) -> None:
        number = message.body["number"]
        if number % 17 == 0:
            raise Reject("the card was declined")
        if number % 11 == 0 and state.gateway:
            raise TimeoutError(f"the gateway did not answer within 5 s for order {number}")
        if number % 5 == 0:
            app.outbox.stage(tx, "invoices", {"number": number}, key=message.key)

    @app.handler("orders", consumer="ledger")
    def book(message: Message[dict[str, Any]], tx: Any) -> None: ...

    @app.handler("shipments", consumer="parcels", keep_payload="always")
    def ship(message: Message[dict[str, Any]], tx: Any) -> None:
        raise ConnectionError("the warehouse is away")

    @app.handler("hostile", consumer="<b>guests</b>", keep_payload="always")
    def host(message: Message[bytes], tx: Any) -> None:
        raise Reject(HOSTILE)

    @app.handler("invoices", consumer="mailer")
    def mail(message: Message[dict[str, Any]], tx: Any) -> None: ...

    app.consume(Local())
    return app


def order(number: int, **fields: Any) -> Message[Any]:
    body = {"number": number, "lines": [{"sku": f"A-{number}", "count": 2}], **fields}
    return Message(
        id=f"order-{number:04d}", topic="orders", type="order.placed", key=f"customer-{number % 7}",
        payload=json.dumps(body).encode(), headers=[("traceparent", "00-" + "a" * 32)],
        content_type="application/json",
    )  # fmt: skip


def fill(app: App, orders: int = 60) -> None:
    """Let messages come."""
    for number in range(1, orders + 1):
        for consumer in ("billing", "ledger"):
            outcome = app.process(order(number), consumer=consumer)
            while outcome == "failed":
                outcome = app.process(order(number), consumer=consumer)
                if outcome == "deferred":
                    break
    # the same id with another payload
    for number in (3, 4):
        app.process(order(number, changed=True), consumer="billing")
    for number in range(3):
        app.process(
            Message(id=f"parcel-{number}", topic="shipments", payload=b'{"number": 1}'),
            consumer="parcels",
        )
    app.process(hostile())


def hostile() -> Message[Any]:
    return Message(
        id=HOSTILE, topic="hostile", type=HOSTILE[:200], key=HOSTILE, payload=HOSTILE.encode() * 40,
        headers=[("x-hostile", HOSTILE)], content_type="text/html",
    )  # fmt: skip
