"""txbox itself as the program of `txbox conformance`: what the contract says is what its code does.

python -m tests.support.conformance_txbox
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.support.conformance_program import handle, pause, say
from txbox import App, Lease, Limits, Message, Outbox, Retry, RetryPolicy, session
from txbox.errors import SchemaError, StoreUnavailable, UnusableMessage
from txbox.session import drive
from txbox.store import leases
from txbox.store.codec import Leased

URL = os.environ["TXBOX_DATABASE_URL"]

# by what a command may say of them
apps: dict[tuple[Any, ...], App] = {}
# what is being done
current: dict[str, Any] = {}
# what is leased, by token and id
rows: dict[tuple[str, str], Leased] = {}


def app_for(command: dict[str, Any]) -> App:
    """The App for such a command: a policy is an option of a handler, and not of a message."""
    current.clear()
    current.update(command)
    options = tuple(
        command.get(name) for name in ("consumer", "lease_s", "lock_timeout_ms", "max_attempts")
    )
    if options in apps:
        return apps[options]
    app = apps[options] = App(
        URL,
        lease=Lease(duration=timedelta(seconds=command.get("lease_s", 60))),
        limits=Limits(lock_timeout=timedelta(milliseconds=command.get("lock_timeout_ms", 1000))),
    )

    @app.handler(
        "*",
        consumer=command["consumer"],
        retry=RetryPolicy(max_attempts=command.get("max_attempts", 8)),
    )
    def work(message: Message[bytes], tx: Any) -> None:
        def stage(out: dict[str, Any]) -> None:
            payload, key = base64.b64decode(out["payload"]), out.get("key")
            out_id = Outbox().stage(tx, out["topic"], payload, key=key)
            tx.execute("UPDATE txbox_outbox SET route = %s WHERE id = %s", (out["route"], out_id))

        pause(current, "claimed")
        try:
            handle(tx, current | {"id": message.id}, stage)
        except ValueError as error:
            # the delay as it is, without jitter
            raise Retry(str(error), after=timedelta(seconds=current["retry_s"])) from error
        pause(current, "handled")
        current["ran"] = True

    return app


def run(app: App, step: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Run an operation on the store."""
    assert app.database.sync is not None
    return drive(app.database.sync, step, *args, **named)


def deliver(app: App, command: dict[str, Any]) -> dict[str, Any]:
    """Process a delivery."""
    payload = None if command["payload"] is None else base64.b64decode(command["payload"])
    message = Message(
        id=command["id"], topic=command["topic"], payload=payload, key=command.get("key")
    )
    try:
        return {"outcome": app.process(message)}
    except UnusableMessage:
        return {"outcome": "refused"}
    except StoreUnavailable:
        return {"outcome": "in_progress"}


def lease(app: App, command: dict[str, Any]) -> dict[str, Any]:
    """Lease what is due; a worker does not look while its consumer is paused."""
    app.pauses.stale_at = 0.0
    run(app, app.look_for_pauses)
    token, leased = secrets.token_hex(16), list[Leased]()
    if command["consumer"] in app.pauses.paused:
        return {"token": token, "ids": []}
    for suspect in (False, True):
        leased = leased or run(
            app,
            leases.lease,
            app.store,
            command["consumer"],
            token=token,
            limit=command["limit"],
            lease=app.lease,
            suspect=suspect,
        )
    rows.update(((token, row.arrival.message_id), row) for row in leased)
    return {"token": token, "ids": [row.arrival.message_id for row in leased]}


def heartbeat(app: App, command: dict[str, Any]) -> dict[str, Any]:
    """Extend leases."""
    extended = run(
        app,
        leases.heartbeat,
        app.store,
        command["consumer"],
        command["ids"],
        token=command["token"],
        lease=app.lease,
    )
    return {"extended": extended}


def finish(app: App, command: dict[str, Any]) -> dict[str, Any]:
    """Run a leased row."""
    row = rows[command["token"], command["id"]]
    (handler,) = app.handlers.consumers()[command["consumer"]]
    answer = run(app, app.protocol.run_leased, handler, row, command["token"])
    known = ("processed", "failed", "dead")
    return {"outcome": answer.outcome if answer.outcome in known else "lost"}


def main() -> None:
    """Answer each line."""
    with App(URL) as app:
        try:
            run(app, app.protocol.check_schema)
        except SchemaError as error:
            sys.exit(str(error))
    say({"contract": 1})
    verbs = {"deliver": deliver, "lease": lease, "heartbeat": heartbeat, "finish": finish}
    session.crash_point = at
    for line in sys.stdin:
        command = json.loads(line)
        say(verbs[command["do"]](app_for(command), command))


def at(point: str) -> None:
    """Pass a crash point of txbox: some are points of the contract."""
    if point == "record_failure":
        pause(current, "rolled_back")
    elif point == "after:commit" and current.get("ran"):
        pause(current, "committed")


if __name__ == "__main__":
    main()
