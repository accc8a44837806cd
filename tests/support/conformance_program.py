"""A program that follows docs/contract.md with nothing but psycopg, and wrong variants of it.

python -m tests.support.conformance_program [VARIANT]
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg import errors

VARIANT = sys.argv[1] if len(sys.argv) > 1 else ""

EFFECT = (
    "INSERT INTO conformance_effect (consumer, message_id, writer, follows)"
    " VALUES (%(consumer)s, %(id)s, 'program', %(follows)s)"
)


def page_sql() -> dict[str, Any]:
    """The statements of docs/contract.md by name, with psycopg's parameters; it wants literals, so they are Any."""
    page = Path(__file__, "../../../docs/contract.md").resolve().read_text()
    blocks = re.findall(r"```sql\n-- (.+?)\n(.+?)```", page, re.DOTALL)
    return {name: re.sub(r"(?<!:):(\w+)", r"%(\1)s", sql) for name, sql in blocks}


SQL = page_sql()

_LEASED = " AND token = %(token)s AND status = 'processing'"
_DUE = "next_attempt_at <= statement_timestamp()"
#: Variant → statement, and what is replaced in it by what.
WRONG: dict[str, tuple[str, str, str]] = {
    "no idle limit": ("arm", "'60s'", "'0'"),
    "failures are not flushed": ("attempt", "'on'", "'off'"),
    "the quarantine is not flushed": ("quarantine", "'on'", "'off'"),
    "processing is not flushed": ("close", "'on'", "'off'"),
    "another hash aside": ("quarantine", "%(hash)s", "sha256(%(hash)s)"),
    "copies aside are not counted": ("quarantine", "seen + 1", "seen"),
    "over a processed row": ("park", "DO NOTHING", "DO UPDATE SET status = 'failed', attempts = 1"),
    "the payload is not kept": ("park", "%(body)s, true", "NULL, true"),
    "clock of the process": ("park", "clock_timestamp()", "%(here)s::timestamp"),
    "at once": ("park", "%(retry_s)s", "0 * %(retry_s)s"),
    "discards failures": ("park", "'failed'", "'discarded'"),
    "never dead": ("park leased", "%(max_attempts)s", "1 + 99 * %(max_attempts)s"),
    "leases what is dead": ("lease", "'failed')", "'failed', 'dead')"),
    "leases before it is due": ("lease", _DUE, "true"),
    "leases without a payload": ("lease", "has_payload", "true"),
    "leases for all": ("lease", "= %(consumer)s", ">= ''"),
    "the start is not counted": ("lease", "starts + 1", "starts"),
    "clock of the process, leases": ("lease", "clock_timestamp() +", "%(here)s::timestamp +"),
    "takes locked rows": ("lease", "SKIP LOCKED", "NOWAIT"),
    "suspects in a batch": ("lease", "starts = 0", "starts >= 0"),
    "leases what is paused": (
        "lease",
        "txbox_pause.consumer = ",
        "txbox_pause.consumer < '' AND '' = ",
    ),
    "heartbeat for all": ("heartbeat", " AND token = %(token)s", ""),
    "no fence": ("fence", _LEASED, ""),
    "the start is not given back": ("fence", "greatest(starts - 1, 0)", "starts"),
    "keeps the error": ("fence", "error = NULL", "error = error"),
    "no fence of failures": ("park leased", _LEASED, ""),
    "the attempt is not counted": ("park leased", "attempts = attempts + 1", "attempts = attempts"),
    "no cause": ("stage", "%(consumer)s, %(id)s", "%(consumer)s, NULL"),
    "no route": ("stage", "%(route)s", "left(%(route)s, 0)"),
}
if VARIANT in WRONG:
    _name, _old, _new = WRONG[VARIANT]
    assert _old in SQL[_name], VARIANT
    SQL[_name] = SQL[_name].replace(_old, _new)
    if VARIANT == "over a processed row":
        SQL[_name] = SQL[_name].replace(
            "RETURNING status, ", "RETURNING txbox_inbox.status, txbox_inbox."
        )
CLAIM, CLASSIFY, CLOSE, FENCE = SQL["claim"], SQL["classify"], SQL["close"], SQL["fence"]
PARK, PARK_LEASED, LEASE = SQL["park"], SQL["park leased"], SQL["lease"]
HEARTBEAT, STAGE = SQL["heartbeat"], SQL["stage"]


def connect() -> psycopg.Connection[Any]:
    return psycopg.connect(
        os.environ["TXBOX_DATABASE_URL"], autocommit=True, prepare_threshold=None
    )


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def pause(message: dict[str, Any], point: str) -> None:
    if message.get("pause") == point:
        message["pause"] = None  # once
        say({"at": point})
        assert json.loads(sys.stdin.readline()) == {"do": "go"}


def stored_id(text: str) -> str:
    raw = text.encode()
    if VARIANT == "long ids as they are":
        return text
    if len(raw) > 255 or text.startswith("sha256:"):
        return "sha256:" + hashlib.sha256(raw).hexdigest()
    return text


class Broken(Exception):
    """The handler has left the transaction that claimed."""


def handle(
    db: psycopg.Connection[Any], message: dict[str, Any], stage: Callable[[Any], None]
) -> None:
    """Do what the kit asks of a handler."""
    kind = message["handler"]
    if kind in ("leave", "escape"):
        db.execute("ROLLBACK")
    if kind == "leave":
        db.execute("BEGIN")
    db.execute(EFFECT, message | {"follows": -1 if kind == "orphan" else None})
    if message.get("stage") is not None:
        stage(message["stage"])
    if kind in ("fail", "escape"):
        raise ValueError("the handler fails")
    if kind == "swallow":
        with suppress(errors.DivisionByZero):
            db.execute("SELECT 1/0")
    if kind == "commit":
        db.execute("COMMIT")


def staged(db: psycopg.Connection[Any], message: dict[str, Any], out: dict[str, Any]) -> None:
    """Stage an outgoing message."""
    row = {
        "out_id": str(uuid.uuid4()), "out_topic": out["topic"], "out_key": out.get("key"), "route": out["route"],
        "out_headers": json.dumps([["causation-id", message["id"]]]), "out_type": None, "out_content_type": None,
        "out_payload": base64.b64decode(out["payload"]),
    }  # fmt: skip
    if VARIANT == "headers as an object":
        row["out_headers"] = json.dumps({"causation-id": message["id"]})
    if VARIANT == "staged outside":
        with connect() as other:
            other.execute(STAGE, message | row)
    else:
        db.execute(STAGE, message | row)


def run(db: psycopg.Connection[Any], message: dict[str, Any], claim: Any) -> str | None:
    """BEGIN, claim, handler, close, COMMIT; None if nothing was claimed.

    Raises:
        Broken, LockNotAvailable, Exception: rolled back.
    """
    message["guard"] = "the same" if VARIANT == "one token" else uuid.uuid4().hex
    level = "REPEATABLE READ" if VARIANT == "repeatable read" else "READ COMMITTED"
    db.execute("BEGIN ISOLATION LEVEL " + level)
    try:
        db.execute(SQL["arm"], message)
        if VARIANT == "closed at once":
            db.execute(CLOSE, message)
        if VARIANT == "no inbox" and claim == CLAIM:
            claimed = True
        elif VARIANT == "check then insert" and claim == CLAIM:
            claimed = db.execute(CLASSIFY, message).fetchone() is None
        else:
            claimed = db.execute(claim, message).fetchone() is not None
        if not claimed:
            db.execute("ROLLBACK")
            return None
        db.execute(SQL["begin handler"])
        if VARIANT == "claim committed first":
            db.execute(CLOSE, message)
            db.execute("COMMIT")
            db.execute("BEGIN")
            message["guard"] = ""
        if VARIANT != "no savepoint":
            db.execute("SAVEPOINT txbox_claim")
        pause(message, "claimed")
        try:
            handle(db, message, lambda out: staged(db, message, out))
        except Exception as error:
            if not isinstance(error, psycopg.Error) or error.sqlstate != "TXB02":
                still_claimed(db)
            raise
        pause(message, "handled")
        if VARIANT == "check then insert" and claim == CLAIM:
            db.execute(claim, message)
        try:
            if VARIANT != "no close":
                db.execute(CLOSE, message)
            elif message["handler"] != "leave":
                db.execute("SELECT set_config('txbox.closed', %(guard)s, true)", message)
        except psycopg.Error as error:
            if error.sqlstate == "TXB01":
                raise Broken from None
            if VARIANT != "believes COMMIT":
                still_claimed(db)
                raise
        db.execute("COMMIT")
    except BaseException:
        if not db.closed:
            db.execute("ROLLBACK")
        raise
    pause(message, "committed")
    return "processed"


def still_claimed(db: psycopg.Connection[Any]) -> None:
    if VARIANT == "no savepoint":
        return
    try:
        db.execute("ROLLBACK TO SAVEPOINT txbox_claim")
    except psycopg.Error:
        if db.closed:
            raise
        raise Broken from None


def attempt(
    db: psycopg.Connection[Any],
    message: dict[str, Any],
    claim: Any,
    park: Any,
    again: Callable[[], str],
) -> str:
    """Run a message once; record its failure."""
    try:
        return run(db, message, claim) or again()
    except errors.LockNotAvailable:
        return "in_progress"
    except Broken:
        message |= {
            "final": True,
            "error_type": "TransactionBroken",
            "error": "the handler left the transaction",
        }
    except Exception as error:  # noqa: BLE001  # of any handler
        if db.closed and VARIANT != "a lost connection fails":
            return "in_progress"
        message |= {
            "final": False,
            "error_type": type(error).__name__,
            "error": str(error).partition("\n")[0],
        }
    pause(message, "rolled_back")
    message["here"] = datetime.now()  # noqa: DTZ005  # wrong on purpose
    with connect() as db, db.transaction():
        row = db.execute(park, message).fetchone()
        if row is not None:
            status, number = row
            if VARIANT != "no history":
                db.execute(SQL["attempt"], message | {"status": status, "attempt": number})
            return str(status)
    return again()


def deliver(db: psycopg.Connection[Any], message: dict[str, Any]) -> dict[str, Any]:
    if VARIANT == "any id":
        message["id"] = message["id"].replace("\0", "")
    elif not message["id"] or "\0" in message["id"]:
        return {"outcome": "refused"}
    body = None if message["payload"] is None else base64.b64decode(message["payload"])
    hashed = bytes(32) if body is None else hashlib.sha256(body).digest()
    if VARIANT == "hash of canonical JSON" and body is not None:
        with suppress(ValueError):
            hashed = hashlib.sha256(json.dumps(json.loads(body), sort_keys=True).encode()).digest()
    message |= {
        "id": stored_id(message["id"]),
        "body": body,
        "hash": hashed,
        "type": None,
        "key": message.get("key"),
    }
    if VARIANT == "ids in lower case":
        message["id"] = message["id"].lower()

    def existing() -> str:
        row = db.execute(CLASSIFY, message).fetchone()
        if row is None:
            return "in_progress"
        status, known, has_payload = row
        if known is not None and bytes(known) != hashed and VARIANT != "payload not compared":
            db.execute(SQL["quarantine"], message)
            return "quarantined"
        if (
            status
            in ("processed", "dead", "discarded")[: 1 if VARIANT == "only processed is done" else 3]
        ):
            return "duplicate"
        if VARIANT == "what waits is a duplicate":
            return "duplicate"
        return "deferred" if has_payload else "in_progress"

    if VARIANT == "answers before COMMIT" and message["handler"] == "orphan":
        attempt(db, message, CLAIM, PARK, existing)
        return {"outcome": "processed"}
    return {"outcome": attempt(db, message, CLAIM, PARK, existing)}


def lease(db: psycopg.Connection[Any], message: dict[str, Any]) -> dict[str, Any]:
    message |= {"token": "the same" if VARIANT == "one lease" else uuid.uuid4().hex}
    message["here"] = datetime.now()  # noqa: DTZ005  # wrong on purpose
    if VARIANT == "leases nothing in the table":
        rows = db.execute(
            LEASE[LEASE.index("(") + 1 : LEASE.index("UPDATE") - 2], message
        ).fetchall()
        return {"token": message["token"], "ids": [row[0] for row in rows]}
    rows = (
        db.execute(LEASE, message).fetchall()
        or db.execute(SQL["lease suspect"], message).fetchall()
    )
    return {"token": message["token"], "ids": [row[0] for row in rows]}


def heartbeat(db: psycopg.Connection[Any], message: dict[str, Any]) -> dict[str, Any]:
    return {"extended": db.execute(HEARTBEAT, message).rowcount}


def finish(db: psycopg.Connection[Any], message: dict[str, Any]) -> dict[str, Any]:
    return {"outcome": attempt(db, message, FENCE, PARK_LEASED, lambda: "lost")}


def main() -> None:
    with connect() as db:
        version = db.execute(
            "SELECT compatible_from FROM txbox_schema ORDER BY version DESC LIMIT 1"
        ).fetchone()
        if version is None or (version[0] > 1 and VARIANT != "any version"):
            sys.exit("the txbox tables are newer than contract 1")
    say({"contract": 1})
    verbs = {"deliver": deliver, "lease": lease, "heartbeat": heartbeat, "finish": finish}
    for line in sys.stdin:
        message = json.loads(line)
        with connect() as db:
            answer = verbs[message["do"]](db, message)
        say(answer)


if __name__ == "__main__":
    main()
