"""A rehearsal: a handler runs in a transaction that is never committed, and what it does is recorded.

Source: docs/decisions/0040-rehearsals.md, docs/decisions/0069-rehearsed-deploys.md
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Literal, cast

from txbox.admin import tables
from txbox.admin.facts import MessageRef, keys_of, links
from txbox.admin.reader import Application, Audit
from txbox.admin.replay import Replays, kept_messages
from txbox.admin.tables import INBOX, OUTBOX, InboxFilter, stored_id
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.handlers import Handler
from txbox.identity import EFFECT_PREFIX, derived_id
from txbox.message import parsed
from txbox.policy import HIDDEN, Redaction
from txbox.processing.calls import handled
from txbox.processing.failure import BROKEN, failure_of
from txbox.session import Raised, Session, Statement
from txbox.store.codec import Arrival
from txbox.store.dialect import as_time
from txbox.text import lasting


class Rehearsals(Replays):
    """The verb that runs a handler and leaves nothing."""

    def rehearse(
        self,
        consumer: str,
        message_id: str,
        *,
        payload: bytes | None = None,
        actor: str | None = None,
        reason: str | None = None,
    ) -> Rehearsed:
        """Run a message's handler in a transaction that is never committed, and report what it would have done.

        Any message whose payload is kept can be rehearsed, unless it is being processed right now.

        Args:
            payload: a new payload, as for `edit`.

        Raises:
            ConfigurationError: no App, no such message, no payload, or a handler that works outside of a transaction.

        Guarantee: nothing of the transaction stays, and its connection is thrown away. What the handler does
            elsewhere (HTTP, files, other connections) really happens. `txbox_audit` has it before it runs.
        """
        where = InboxFilter(consumer=consumer, message_id=stored_id(message_id))
        if not self.has_handlers:
            raise ConfigurationError("A rehearsal runs a handler: give the App.")
        kept = kept_messages(self, where, after=-1, limit=1)
        if not kept:
            raise ConfigurationError(self.why_not("rehearse", where))
        arrival = kept[0].arrival
        if arrival.unreadable is not None:
            raise ConfigurationError(f"This message cannot be rehearsed. {arrival.unreadable}")
        if payload is not None:
            arrival = replace(arrival, message=replace(arrival.message, payload=payload))
        message = arrival.message
        handler = self.handler_of(message, consumer)
        if handler is None:
            raise ConfigurationError(
                f"{consumer} has no handler for topic {message.topic!r} with type {message.type!r}."
            )
        if not handler.options.transactional:
            raise ConfigurationError(
                f"{consumer} works outside a transaction: it cannot be rolled back."
            )
        self.announce(Audit.of(actor, reason), "rehearse", where, 1)
        return self.on_handlers_database(handler, _rehearsed, self.app, handler, arrival)


def recorded(operator: Rehearsals, consumer: str, message_id: str) -> Record:
    """Rehearse a message of an App, and tell all that its handler did, unredacted; not audited.

    What another transaction has locked is waited for, at most three times.
    """
    where = InboxFilter(consumer=consumer, message_id=stored_id(message_id))
    kept = kept_messages(operator, where, after=-1, limit=1)
    if not kept:
        return Record(skipped="gone")
    arrival = kept[0].arrival
    handler = operator.handler_of(arrival.message, consumer)
    if arrival.unreadable is not None:
        return Record(skipped="unreadable")
    if handler is None:
        return Record(skipped="no handler")
    if not handler.options.transactional:
        return Record(skipped="works outside a transaction")
    record = Record()
    for _ in range(_TRIES):
        record = Record(body=_body_of(arrival.message.payload))
        try:
            operator.on_handlers_database(
                handler, _rehearsed, operator.app, handler, arrival, record=record
            )
        except _NotNow:
            record.skipped = "locked"
        except _TooLong:
            record.outcome = "too long"
        if record.skipped is None:
            break
    return record


@dataclass(slots=True)
class Record:
    """All that one run of a handler did.

    Attributes:
        skipped: why it did not run; then there is nothing else.
        body: of the message.
        outcome: as in `Rehearsed`, with the type of the error; "too long" beyond its time.
        staged: by topic and type, in their order: key, headers, content type and body.
        rows: by table: how many were inserted, updated and deleted, and where the database tells, `rows`.
        statements: what wrote: their values, by their text.
        complete: `rows` has every row that was written, so that `statements` add nothing.
        calls: what was refused.
        handler_s: how long the handler ran.
    """

    skipped: str | None = None
    body: Any = None
    outcome: str = ""
    result: Any = None
    staged: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    rows: dict[str, Any] = field(default_factory=dict[str, Any])
    statements: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    complete: bool = False
    calls: set[str] = field(default_factory=set[str])
    handler_s: float = 0.0

    def document(self) -> dict[str, Any]:
        """What is compared, as JSON."""
        if self.outcome != "processed":
            return {"outcome": self.outcome, "calls": dict.fromkeys(sorted(self.calls))}
        return {
            "outcome": self.outcome,
            "result": self.result,
            "staged": self.staged,
            "rows": self.rows,
            "statements": self.statements,
            "calls": dict.fromkeys(sorted(self.calls)),
        }

    def shown(self, redact: Redaction) -> dict[str, Any]:
        """The same as people may see it."""
        document = self.document()
        hidden = set(_hidden_in(self.body, _shown_json(redact, "body", self.body)))
        if "result" in document:
            document["result"] = _shown_json(redact, "result", self.result)
            hidden.update(_hidden_in(self.result, document["result"]))
        if "staged" in document:
            document["staged"] = {
                topic: [_shown_message(redact, message) for message in messages]
                for topic, messages in self.staged.items()
            }
            hidden.update(_hidden_in(self.staged, document["staged"]))
        names = {path.rpartition(".")[2] for path in redact.fields}
        for kind in ("rows", "statements"):
            if kind in document:
                document[kind] = _redacted(document[kind], redact, names, hidden)
        return document


def _shown_message(redact: Redaction, message: Mapping[str, Any]) -> dict[str, Any]:
    headers = {name: redact.header(name, value) for name, value in message["headers"].items()}
    return {**message, "body": _shown_json(redact, "body", message["body"]), "headers": headers}


def _shown_json(redact: Redaction, what: Literal["body", "result"], value: Any) -> Any:
    return json.loads(redact.json(what, json.dumps(value).encode())[0])


def _hidden_in(value: Any, shown: Any) -> Iterator[str]:
    """The texts that a document has, and its redacted form hides."""
    if isinstance(value, dict):
        for name, item in cast("dict[str, object]", value).items():
            inside = cast("dict[str, object]", shown) if isinstance(shown, dict) else {}
            yield from _hidden_in(item, inside.get(name, HIDDEN))
    elif isinstance(value, list):
        items = cast("list[object]", value)
        ones = cast("list[object]", shown) if isinstance(shown, list) else [HIDDEN] * len(items)
        for item, one in zip(items, ones, strict=True):
            yield from _hidden_in(item, one)
    elif value != shown and value is not None:
        yield str(value)


def _redacted(value: Any, redact: Redaction, names: set[str], hidden: set[str]) -> Any:
    """What may be shown of rows: neither columns of such names, nor values that have hidden text in them."""
    if isinstance(value, dict):
        values = cast("dict[str, object]", value)
        return {
            name: HIDDEN if name in names else _redacted(item, redact, names, hidden)
            for name, item in values.items()
        }
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [_redacted(item, redact, names, hidden) for item in items]
    text = str(value).strip("'")
    if text in hidden or any(each in text for each in hidden if len(each) >= _TELLING):
        return HIDDEN
    return redact.error(value) if isinstance(value, str) else value


# a shorter text is in many
_TELLING = 4


# -- one run ----------------------------------------------------------------------------------

# how often it is tried while somebody else has locked what it needs
_TRIES = 3
# neither waits long for others, nor lets others wait
_LOCK_TIMEOUT = timedelta(seconds=2)
# it keeps locks, and a thread of the dashboard
_LONGEST = timedelta(seconds=30)
_STATEMENTS_MAX = 200
_STATEMENT_CHARACTERS = 2_000
_STAGED_MAX = 200
# what it stages gets ids of its own: under the usual ones may be what it staged when it was processed
_FIRST = 1_000_000
# what ends a transaction, first in its statement or behind a comment; a savepoint's ROLLBACK TO does not, nor does END
# behind a semicolon, which may end a block
_ENDS = re.compile(
    r"(?:^|;|\*/)\s*+"
    r"(?:commit|abort|prepare\s+transaction|xa|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b"
    r"|^\s*+end\b",
    re.IGNORECASE,
)
# what is quoted ends nothing, and what looks like a quote in a comment quotes nothing
_OPAQUE = re.compile(
    r"--[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/)?+"
    r"|'(?:[^']|'')*+'?+|\"(?:[^\"]|\"\")*+\"?+",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a handler would have done; nothing of it was committed.

    Attributes:
        outcome: what would have become of the message: "processed", "failed" (and tried again), "dead", or
            "broken" when the handler tried to end the transaction, or did end it.
        statements: what it sent to the database, in its order, without values; the first 200.
        staged: what it would have staged: outgoing messages, and effects.
        result: what it returned, as JSON and redacted, where the handler keeps its results.
    """

    consumer: str
    message_id: str
    outcome: Literal["processed", "failed", "dead", "broken"]
    error_type: str | None = None
    error: str | None = None
    duration_s: float
    statements: tuple[str, ...] = ()
    staged: tuple[MessageRef, ...] = ()
    result: bytes | None = None


def _opened(match: re.Match[str]) -> str:
    text = match[0]
    if text.startswith(("--", "/*")):
        return "*/"
    # a backslash may have quoted what seems to end the string, and what has no end quotes nothing
    closed = len(text) > 1 and text[-1] == text[0] in "'\""
    return "''" if closed and "\\" not in text else text


class _Refused(Exception):
    """The handler was about to end the transaction."""


class _NotNow(ConfigurationError):
    """Another transaction has the row."""


class _TooLong(ConfigurationError):
    """The handler took more than its time."""


@dataclass(slots=True)
class _Watch:
    """Sees each statement of a handler before it is sent, and refuses what would end the transaction."""

    until: float
    active: bool = True
    escaped: bool = False
    late: bool = False
    statements: list[str] = field(default_factory=list[str])
    record: Record | None = None

    def check(self, sql: str, values: Any) -> None:
        if not self.active:
            return
        if time.monotonic() > self.until:
            self.late = True
            raise _Refused("the time of this rehearsal is over")
        if _ENDS.search(_OPAQUE.sub(_opened, sql)):
            self.escaped = True
            raise _Refused(
                "a rehearsal is never committed: its handler must not end the transaction"
            )
        # what txbox itself writes for the handler is in `staged`
        if sql and len(self.statements) < _STATEMENTS_MAX and "txbox_" not in sql:
            self.statements.append(" ".join(sql.split())[:_STATEMENT_CHARACTERS])
        if self.record is not None and "txbox_" not in sql and _writes(sql):
            text = " ".join(_LITERAL.sub("?", sql).split())[:_STATEMENT_CHARACTERS]
            literals = (match[0] for match in _LITERAL.finditer(sql))
            made = [*map(_short, literals), *_flat(plain(values))]
            # by their position: it stays in the path of a difference
            by_position = {str(number): value for number, value in enumerate(made, 1)}
            self.record.statements.setdefault(text, []).append(by_position)


# what only reads, or sets; of WITH, what names no writing statement
_READS = re.compile(
    r"\s*(?:select|show|savepoint|release|rollback|set|reset|declare|fetch|close|explain|values|pragma|table|describe)\b"
    r"|\s*with\b(?!.*\b(?:insert|update|delete|merge|replace)\b)|\s*\Z",
    re.IGNORECASE | re.DOTALL,
)
_LITERAL = re.compile(
    r"'(?:[^']|'')*'|\$(\w*)\$.*?\$\1\$|(?<![\w.\"`$:])-?\d+(?:\.\d+)?(?![\w\"`])", re.DOTALL
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_CHARACTERS = 200


def _writes(sql: str) -> bool:
    return _READS.match(_COMMENTS.sub(" ", sql)) is None


_COMMENTS = re.compile(r"--[^\n]*|/\*(?:[^*]|\*(?!/))*+(?:\*/)?")


def _flat(value: Any) -> Iterator[Any]:
    """What a driver gets in lists, or lists of rows, one after the other."""
    if isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _flat(item)
    elif value is not None:
        yield value


def plain(value: Any) -> Any:
    """A driver's value as JSON: equal for equal values, in whatever objects they come."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, bytes | bytearray):
        return _short(value.hex())
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        return {str(name): plain(item) for name, item in mapping.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, Iterator):
        # reading it would leave nothing for the driver
        return type(cast("object", value)).__name__
    if isinstance(value, str):
        return _short(value)
    # adapters of JSON have what they wrap
    inside = getattr(value, "obj", value)
    if inside is not value:
        return plain(inside)
    return _short(_ADDRESS.sub("", str(value)))


def _short(text: str) -> str:
    if len(text) <= _CHARACTERS:
        return text
    return f"{text[:_CHARACTERS]} … {sha256(text.encode()).hexdigest()[:16]}"


# -- calls elsewhere --------------------------------------------------------------------------

# what audit events say of them; the transaction's connection is open before, and C libraries do not tell
_CALLS = {
    "socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1, "subprocess.Popen": 0, "os.system": None,
    "os.posix_spawn": 0, "os.exec": 0, "sqlite3.connect": 0,
}  # fmt: skip


class CallRefused(PermissionError):
    """A handler wanted to do something that a rehearsal cannot take back."""


class _Calls:
    """Refuses what leaves the process, in any thread, while a handler runs."""

    def __init__(self) -> None:
        self.noted: set[str] | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        noted = self.noted
        if noted is None or event not in _CALLS:
            return
        index = _CALLS[event]
        what = "" if index is None or index >= len(arguments) else arguments[index]
        if isinstance(what, tuple):
            what = ":".join(map(str, cast("tuple[object, ...]", what)[:2]))
        noted.add(f"{event} {what}".strip())
        raise CallRefused(f"refused in a rehearsal: {event} {what}".strip())


_calls = _Calls()


def refuse_calls() -> None:
    """From here on, a handler whose rehearsal is recorded cannot connect elsewhere or start a process.

    It cannot be undone: for a process that does nothing else. Libraries in C, such as libpq, connect unseen.
    """
    sys.addaudithook(_calls)


async def _rehearsed(
    db: Session,
    app: Application,
    handler: Handler,
    arrival: Arrival,
    record: Record | None = None,
) -> Rehearsed:
    """Run a handler for a message whose row is there, and roll back.

    Args:
        record: collects all that it does.

    Raises:
        ConfigurationError: its row is being processed, or locked by another transaction; or its time is over.

    Guarantee: the database refuses COMMIT, and the connection refuses what ends a transaction and is thrown
        away. What the handler does outside its transaction really happens.
    """
    started, redact = time.monotonic(), app.store.columns.redact
    watch = _Watch(started + _LONGEST.total_seconds(), record=record)
    timeout = min(handler.options.timeout or _LONGEST, _LONGEST)
    bounded = replace(handler, options=replace(handler.options, timeout=timeout))
    try:
        await _claimed(db, app, handler, arrival, token := secrets.token_hex(16))
        ((now,),) = (await db.execute(app.store.dialect.statement("database_clock"))).rows
        faults = await _broken_references(db, app)
        counted = {} if record is None else await _begin_record(db, app)
        assert db.connection is not None
        db.connection.watch(watch.check)
        raised: Raised | None = None
        answers: list[Any] = []
        begun = time.perf_counter()
        try:
            _calls.noted = None if record is None else record.calls
            answers = await handled(db, bounded, [replace(arrival, first=_FIRST)])
        except Raised as error:
            raised = error
        finally:
            _calls.noted = None
        handler_s = time.perf_counter() - begun
        watch.active = False
        if watch.late or (raised is not None and time.monotonic() > watch.until):
            longest = lasting(_LONGEST.total_seconds())
            raise _TooLong(
                f"The handler ran longer than the {longest} of a rehearsal, and is rolled back."
            )
        staged: list[MessageRef] = []
        if raised is None and not watch.escaped:
            try:
                staged = await _staged(db, app, handler, arrival)
                if record is not None:
                    record.staged = await _whole(db, app, staged)
                    await _end_record(db, app, record, counted)
                await db.execute(app.store.closing(token))
                if await _broken_references(db, app) - faults:
                    broken = StoreError("SQLite: a foreign key would refuse the COMMIT.")
                    raised = Raised(broken, broken, False)
                if app.store.dialect.has("rehearse_constraints"):
                    await db.execute(app.store.dialect.statement("rehearse_constraints"))
            except StoreError as error:
                watch.escaped = error.fault is Fault.GUARD
                raised = Raised(error, error, False)
    finally:
        watch.active = False
        db.discard()
    usual = (
        dict(zip(_ids(handler, arrival, _FIRST), _ids(handler, arrival, 0), strict=True))
        if staged
        else {}
    )
    done = Rehearsed(
        consumer=handler.consumer,
        message_id=arrival.message_id,
        outcome="processed",
        duration_s=time.monotonic() - started,
        statements=tuple(map(redact.error, watch.statements)),
        staged=tuple(replace(link, message_id=usual[link.message_id]) for link in staged),
        result=redact.json("result", answers[0])[0]
        if answers and handler.options.keep_result
        else None,
    )
    if record is not None:
        if raised is not None and raised.database_error and raised.database_error.transient:
            record.skipped = "locked"
        record.handler_s = handler_s
        if answers and handler.options.keep_result:
            record.result = parsed(answers[0])
    if watch.escaped:
        done = replace(
            done,
            outcome="broken",
            error_type=BROKEN.error_type,
            error="the handler ended the transaction that txbox began, or tried to: a worker would reject it for good",
            staged=(),
        )
    elif raised is not None:
        done = _failed(app, handler, arrival, done, raised, as_time(now))
    if record is not None:
        record.outcome = done.outcome + (f" ({done.error_type})" if done.error_type else "")
    return done


def _failed(
    app: Application, handler: Handler, arrival: Arrival, done: Rehearsed, raised: Raised, now: datetime | None
) -> Rehearsed:  # fmt: skip
    """What a worker would have made of this failure."""
    failure = failure_of(
        raised.error, raised.database_error, handler.options, app.limits, app.store.columns.redact
    )
    message, retry = arrival.message, handler.options.retry
    assert now is not None
    old = retry.max_age and message.received_at and now - message.received_at > retry.max_age
    dead = failure.final or message.attempt >= retry.max_attempts or old
    return replace(
        done,
        outcome="dead" if dead else "failed",
        error_type=failure.error_type,
        error=failure.error,
        staged=(),
    )


async def _claimed(
    db: Session, app: Application, handler: Handler, arrival: Arrival, token: str
) -> None:
    timeout = handler.options.timeout
    claim = app.store.claim_known(
        "claim_rehearsal",
        handler.consumer,
        [arrival.message_id],
        token=token,
        lock_timeout=_LOCK_TIMEOUT,
        idle_s=max(app.lease.duration.total_seconds(), timeout.total_seconds() if timeout else 0.0),
    )
    dialect = app.store.dialect
    params = {
        "token": f"txbox_{token}",
        "limit_ms": int(_LONGEST.total_seconds() * 1000),
        "lock_timeout_ms": int(_LOCK_TIMEOUT.total_seconds() * 1000),
    }
    names = ("rehearse_leave", "rehearse_begin", "rehearse_limit")
    limit = [dialect.statement(name, params) for name in names if dialect.has(name)]
    # where a claim puts back what the session had
    waits = [dialect.statement(name, params) for name in ("rehearse_wait",) if dialect.has(name)]
    try:
        # first for all of the transaction: the claim puts back what it finds
        begins = app.store.begin_bounded(_LOCK_TIMEOUT, *limit, *claim, *waits)
        results = await db.begin(begins, user_code=True)
        results = results[len(begins) - len(claim) - len(waits) :][: len(claim)]
    except StoreError as error:
        if error.fault is not Fault.LOCK_TIMEOUT:
            raise
        raise _NotNow(
            f"{handler.consumer} {arrival.message_id} is locked by another transaction: try again."
        ) from None
    won = app.store.claimed(claim, results)
    if won is None:
        # where an UPDATE does not name the rows, it has changed this one: to a new token
        claimed = any(
            result.count
            for statement, result in zip(claim, results, strict=True)
            if statement.name == "claim_rehearsal"
        )
    else:
        claimed = bool(won.ids)
    if not claimed:
        raise _NotNow(
            f"{handler.consumer} {arrival.message_id} is being processed, or gone: `txbox explain` says which."
        )


def _ids(handler: Handler, arrival: Arrival, first: int) -> list[str]:
    ordinals = range(first, first + _STAGED_MAX)
    return [derived_id(handler.consumer, arrival.message_id, ordinal) for ordinal in ordinals]


async def _staged(
    db: Session, app: Application, handler: Handler, arrival: Arrival
) -> list[MessageRef]:
    """What this run has staged: the ids are derived from its own."""
    ids = _ids(handler, arrival, _FIRST)
    dialect = app.store.dialect
    outgoing = await db.execute(dialect.statement("explain_outbox", {}, {"message_id": ids}))
    staged = links(outgoing.rows)
    for consumer in app.handlers.consumers():
        if consumer.startswith(EFFECT_PREFIX):
            keys = keys_of([consumer], ids)
            effects = await db.execute(dialect.statement("explain_inbox", {}, keys))
            staged += links(effects.rows)
    return sorted(staged, key=lambda link: ids.index(link.message_id))


async def _broken_references(db: Session, app: Application) -> set[Sequence[Any]]:
    """Rows with a dangling reference, on databases that check these only at COMMIT."""
    dialect = app.store.dialect
    if not dialect.has("rehearse_references"):
        return set()
    result = await db.execute(dialect.statement("rehearse_references"))
    return {tuple(row) for row in result.rows}


# -- what is recorded -------------------------------------------------------------------------


async def _begin_record(db: Session, app: Application) -> dict[str, list[Any]]:
    """Have the database note the rows that this transaction writes, where it can do that for one connection alone.

    Returns: what is written already.
    """
    if app.store.dialect.has("rehearse_record"):
        made = await db.execute(app.store.dialect.statement("rehearse_record"))
        for (sql,) in made.rows:
            await db.execute(Statement("rehearse_record", sql, {}))
    return await _written(db, app)


async def _written(db: Session, app: Application) -> dict[str, list[Any]]:
    """By table: how many rows were inserted, updated and deleted; how to read them; and whether that is all."""
    if not app.store.dialect.has("rehearse_written"):
        return {}
    result = await db.execute(app.store.dialect.statement("rehearse_written"))
    return {name: list(values) for name, *values in result.rows}


async def _end_record(
    db: Session, app: Application, record: Record, before: dict[str, list[Any]]
) -> None:
    """Record the rows that the handler has written.

    The counts of a session may include those of its transactions before, so they are compared with `before`.
    """
    complete = True
    for name, (*counts, query, whole) in (await _written(db, app)).items():
        new = [
            int(n) - int(old) for n, old in zip(counts, before.get(name, [0, 0, 0]), strict=False)
        ]
        if not any(new):
            continue
        table: dict[str, Any] = dict(zip(("inserted", "updated", "deleted"), new, strict=True))
        if query is not None:
            rows = await db.execute(Statement("rehearse_rows", query, {}))
            table["rows"] = [plain(json.loads(row)) for (row,) in rows.rows]
        complete = complete and bool(whole)
        record.rows[name] = table
    # a database that counts nothing has not told that nothing was written
    record.complete = complete and (bool(record.rows) or not record.statements)


async def _whole(
    db: Session, app: Application, staged: Sequence[MessageRef]
) -> dict[str, list[Any]]:
    """What was staged, by topic and type, unredacted."""
    columns, messages = copy(app.store.columns), dict[str, list[Any]]()
    columns.redact = Redaction()
    for link in staged:
        table = OUTBOX if link.consumer is None else INBOX
        key = {"consumer": link.consumer, "message_id": link.message_id}
        shown = await db.execute(app.store.dialect.statement(f"{table.name}_show", key))
        for row in shown.rows:
            message = tables.message_of(columns, table, row, (), reveal=True)
            name = message.topic if message.type is None else f"{message.topic} {message.type}"
            messages.setdefault(name, []).append(
                {
                    "key": message.key,
                    "content_type": message.content_type,
                    "headers": {name: plain(value) for name, value in message.headers},
                    "body": _body_of(message.payload),
                }
            )
    return messages


def _body_of(payload: bytes | None) -> Any:
    try:
        return None if payload is None else parsed(payload)
    except ValueError:
        return plain(payload)
