"""`prove`: one undisturbed run of the handlers, and the same under every fault; each must end in the same state."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import inspect
import itertools
import json
import logging
import re
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import patch

from txbox.app import App
from txbox.errors import ConfigurationError, Reject
from txbox.handlers import Handler
from txbox.identity import EFFECT_PREFIX
from txbox.maintenance import Task, rescue
from txbox.message import Message
from txbox.outcome import Outcome
from txbox.session import Crashed, Session, Statement, drive, drive_async
from txbox.store import leases
from txbox.store.dialect import qualified
from txbox.testing import another_process, consumed, dates_forgotten, race
from txbox.testing.faults import (
    CODES,
    Call,
    Line,
    StatementFault,
    around_calls,
    lost_commit_answer,
    passing,
    statements,
)
from txbox.testing.recording import Recorder, another_day

Kind = Literal[
    "outside", "commit", "swallowed", "outlived", "random", "clock", "order", "failed", "differs"
]
State = dict[str, Any]
T = TypeVar("T")

_SETTLED = (Outcome.PROCESSED, Outcome.DUPLICATE, Outcome.DEAD, Outcome.QUARANTINED)
_WAITS = (Outcome.IN_PROGRESS, Outcome.DEFERRED)
# one of these shows the way to the others
_ONCE = ("swallowed", "random", "clock", "order", "differs")
# of a handler with more statements, the first ones fail in turn
_STATEMENTS_MAX = 8
# undisturbed runs in which a rare draw may come up
_DRAWS = (0.0001, 0.9999, 0.5)
# two clocks of one moment
_MOMENT_S = 120.0
_ENDS = re.compile(r"\b(?:commit|rollback)\(")
_WHOLE = re.compile(r"(?<![\w.])\d+(?![\w.])")


@dataclass(frozen=True)
class Finding:
    """What is wrong with a handler.

    Attributes:
        kind: "outside" (of the transaction), "commit" (before its end), "swallowed" (a database error), "outlived"
            (what the handler started), "random", "clock", "order", "failed" (undisturbed) or "differs" (the state).
        sentence: for people; begins with the line of the handler.
    """

    kind: Kind
    consumer: str
    sentence: str
    file: str
    line: int


@dataclass(frozen=True)
class Report:
    """The result of `prove`.

    Attributes:
        runs: what the handlers were put through → whether they ended in the state of the undisturbed run.
    """

    findings: tuple[Finding, ...]
    runs: Mapping[str, bool]
    messages: int
    duration_s: float

    @property
    def ok(self) -> bool:
        return not self.findings

    def check(self) -> None:
        """Raise AssertionError unless the proof holds."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        if self.ok:
            return (
                f"Proved: {self.messages} messages ended in the same state in all {len(self.runs)} runs, crashes, "
                f"duplicates, disorder and faults of the database included ({self.duration_s:.1f} s)."
            )
        return "\n".join(["Not proved:", *(f"- {finding.sentence}" for finding in self.findings)])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


async def proved(
    app: App, messages: Sequence[Message[Any]], observe: Callable[[], object] | None
) -> Report:
    """The proof as a coroutine; it never suspends unless a handler is async."""
    began = time.monotonic()
    proof = _Proof(app, messages, observe)
    # it would tell of every fault
    with patch.object(logging.getLogger("txbox"), "disabled", True):
        await proof.run()
    return Report(tuple(proof.findings), proof.runs, len(proof.messages), time.monotonic() - began)


def read_messages(path: Path) -> list[Message[Any]]:
    """Read messages from a file of JSON lines: topic, id, and body (JSON) or payload (text), type, key, headers.

    Raises:
        ConfigurationError: a line is something else, or the file cannot be read.
    """
    messages: list[Message[Any]] = []
    try:
        # JSON may have other line ends, such as U+2028, inside a text
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            body = fields.pop("body", None)
            text = fields.pop("payload", None)
            payload = json.dumps(body).encode() if text is None else str(text).encode()
            headers = tuple(dict(fields.pop("headers", {})).items())
            messages.append(Message(payload=payload, headers=headers, **fields))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(
                f'Line {number} of {path} is no message ({error}): write {{"id": "…", "topic": "…", "body": …}}.'
            ) from None
    return messages


Target = tuple[Message[Any], Handler]
Deliver = Callable[[Target], Awaitable[None]]


class _Proof:
    def __init__(
        self, app: App, messages: Sequence[Message[Any]], observe: Callable[[], object] | None
    ) -> None:
        self.app = app
        self.messages = list(messages)
        self.targets: list[Target] = [
            (message, handler)
            for message in self.messages
            for handler in app.handlers.matching(message.topic, message.type)
        ]
        if not self.targets:
            raise ConfigurationError("No handler of this App takes any of these messages.")
        self.consumers = {handler.consumer: handler for _, handler in self.targets}
        self.findings: list[Finding] = []
        self.runs: dict[str, bool] = {}
        self.tables = _Tables(app, {message_id_of(target) for target in self.targets})
        self._observe = observe
        self._expected: State = {}
        self._points: list[str] = []
        self._clean = Recorder()

    async def run(self) -> None:
        async with self.tables.kept(self.on_database):
            if not await self._undisturbed():
                return
            await self._repeated()
            for run in (
                self._crashes, self._faults, self._answers, self._copies, self._payloads, self._disorder, self._zombies,
            ):  # fmt: skip
                await run()

    # -- one run ------------------------------------------------------------------------------

    async def on_database(
        self, operation: Callable[..., Coroutine[Any, Any, T]], *args: Any, **options: Any
    ) -> T:
        database = self.app.database
        if database.sync is not None:
            return drive(database.sync, operation, *args, **options)
        assert database.asynchronous is not None
        return await drive_async(database.asynchronous, operation, *args, **options)

    async def deliver(self, target: Target, app: App | None = None) -> Outcome:
        """Deliver a message, and run what it leaves in the table."""
        (message, handler), app = target, app or self.app
        if handler.is_async:
            outcome = await app.process_async(message, consumer=handler.consumer)
        else:
            outcome = app.process(message, consumer=handler.consumer)
        if outcome not in _SETTLED and not self._is_clear(self._clean):
            await self.settle(handler, app)
        return outcome

    @staticmethod
    def _is_clear(recorder: Recorder) -> bool:
        """Whether the handler fails, and why is known: each attempt may take long."""
        return bool(recorder.errors) and bool(recorder.ends or recorder.seconds)

    async def settle(self, handler: Handler, app: App | None = None) -> None:
        """Run what the table has for a consumer, dates and leases aside."""
        app = app or self.app
        database = app.database
        if handler.is_async:
            assert database.asynchronous is not None
            await drive_async(database.asynchronous, _settled, app, handler)
        else:
            assert database.sync is not None
            drive(database.sync, _settled, app, handler)

    async def through(
        self, deliver: Deliver | None = None, targets: Iterable[Target] | None = None
    ) -> State:
        """Run all messages from the beginning; returns the state at the end."""
        await self.tables.restore(self.on_database)
        for target in self.targets if targets is None else targets:
            await (self.deliver(target) if deliver is None else deliver(target))
        return await self.state()

    async def state(self) -> State:
        state: State = await self.on_database(self.tables.read)
        if self._observe is not None:
            seen = self._observe()
            inbox = state["txbox_inbox"]
            state = {
                "observe()": await seen if inspect.isawaitable(seen) else seen,
                "txbox_inbox": inbox,
            }
        return state

    async def same(self, name: str, state: State, line: Line, kind: Kind = "differs") -> None:
        """Compare a state with that of the undisturbed run."""
        difference = self.tables.difference(self._expected, state)
        self.runs[name] = difference is None and self.runs.get(name, True)
        if difference is None:
            return
        if kind == "order":
            text = f"depends on the order in which messages come: {difference} Make it independent, or ordered=True."
        else:
            text = f"ends in another state after {name}: {difference}"
        self.find(kind, line, text)

    def find(self, kind: Kind, line: Line, text: str, consumer: str | None = None) -> None:
        name = consumer or self._consumer_of(line)
        same = [other for other in self.findings if other.kind == kind and other.consumer == name]
        if any(other.line == line.number or kind in _ONCE for other in same):
            return
        if kind in ("differs", "order") and any(
            other.kind != "outlived" for other in self.findings
        ):
            # one cause has many consequences
            return
        sentence = f"{line}: the handler of {name} {text}"
        self.findings.append(Finding(kind, name, sentence, line.file, line.number))

    def _consumer_of(self, line: Line) -> str:
        for handler in self.consumers.values():
            code = Call(handler, None).code
            if code is not None and (code.co_filename, code.co_name) == (line.file, line.function):
                return handler.consumer
        return next(iter(self.consumers))

    def _line(self, mentions: str | None = None, *, reads: bool = False) -> Line:
        """A line to name for what is seen in the state only: the first statement that fits, or the first line."""
        for text, line in self._clean.statements:
            if reads and re.match(r"\s*(?:select|with)\b", text, re.IGNORECASE):
                return line
            if mentions is not None and mentions in text:
                return line
        if self._clean.statements and not reads:
            return self._clean.statements[0][1]
        return self._line() if reads else Call(self.targets[0][1], None).line()

    @contextmanager
    def _recorded(self, recorder: Recorder) -> Any:
        with around_calls(self.app, recorder.around), statements(self.app, recorder.on_statement):
            yield

    # -- undisturbed --------------------------------------------------------------------------

    async def _undisturbed(self) -> bool:
        """Run all once; False if that already fails."""
        recorder = self._clean

        async def first(target: Target) -> None:
            if not self._is_clear(recorder):
                with suppress(Crashed), passing(self._points.append):
                    await self.deliver(target)

        # what only some deliveries pass
        await self.on_database(self.app.look_for_pauses)
        with self._recorded(recorder):
            self._expected = await self.through(first)
        self.runs["nothing"] = True
        for line in recorder.outlived:
            self.find(
                "outlived", line,
                "starts a thread, job or task that outlives the call: what it does is no longer part of the "
                "transaction. Wait for it, or stage the work in the outbox.",
            )  # fmt: skip
        for line in () if recorder.seconds else recorder.commits[:1]:
            self._early(line)
        for message_id, consumer, error_type in (
            () if self.findings else await self.on_database(self.tables.unprocessed)
        ):
            if not any(issubclass(kind, Reject) for kind, _ in recorder.errors):
                self._failed(str(message_id), str(consumer), str(error_type))
        if recorder.seconds and recorder.errors and not self.findings:
            self._failed(message_id_of(self.targets[0]), self.targets[0][1].consumer, "")
        if not self.findings:
            return True
        self.runs["nothing"] = False
        return False

    def _failed(self, message_id: str, consumer: str, error_type: str) -> None:
        recorder = self._clean
        handler = self.consumers[consumer]
        first = Call(handler, None).line()
        if handler.options.reject_on and any(
            issubclass(kind, tuple(handler.options.reject_on)) for kind, _ in recorder.errors
        ):
            return
        seconds = recorder.seconds
        if recorder.ends and not seconds:
            self._early(recorder.ends[0])
        elif seconds:
            self._outside(
                seconds[0].line, f"{seconds[0].what}, which waits for its own transaction"
            )
        elif error_type == "TransactionBroken":
            # a driver in C tells no profiler
            lines, number = inspect.getsourcelines(inspect.unwrap(handler.function))
            ending = (at for at, text in enumerate(lines, number) if _ENDS.search(text))
            self._early(first._replace(number=next(ending, first.number)))
        elif (
            not recorder.errors or error_type == "InFailedSqlTransaction" or "Aborted" in error_type
        ):
            line = (
                recorder.statements[-2 if recorder.errors else -1][1]
                if recorder.statements
                else first
            )
            self._swallowed(line, "an error of the database")
        else:
            kind, line = recorder.errors[-1]
            self.find(
                "failed", line, f"does not process message {message_id} undisturbed: {kind.__name__}.", consumer,
            )  # fmt: skip

    def _early(self, line: Line) -> None:
        self.find(
            "commit", line,
            "ends the transaction early: a crash behind this line would leave half of its work. Leave COMMIT and "
            "ROLLBACK to txbox, and undo a part with a savepoint.",
        )  # fmt: skip

    def _swallowed(self, line: Line, what: str) -> None:
        self.find(
            "swallowed", line,
            f"swallows {what}: the transaction has failed, and what it wrote is lost though the handler returns. Let "
            "errors of the database propagate.",
        )  # fmt: skip

    def _outside(self, line: Line, what: str) -> None:
        self.find(
            "outside", line,
            f"{what}: it is outside of the transaction, and a retry after a crash does it twice. Stage it in the "
            "outbox, or as an effect with an idempotency key.",
        )  # fmt: skip

    async def _repeated(self) -> None:
        """Run it again, with other draws, and on another day."""
        recorder, first = self._clean, self._line()
        for draw in (None, *(_DRAWS * 2 if recorder.draws else ())):
            state = await self._elsewhere(draw=draw)
            # what differs now would differ in every run
            tables = self.tables.mask(self._expected, state, drawn=bool(recorder.draws))
            if not tables:
                continue
            kind: Kind = "clock" if recorder.clocks and not recorder.draws else "random"
            lines = recorder.clocks if kind == "clock" else recorder.draws
            line = lines[0] if lines else self._line(tables[0]) if self._observe is None else first
            what = "something random" if kind == "random" else "the clock"
            self._varies(kind, line, what, tables[0])
        for days in (400, -35):
            state = await self._elsewhere(days=days)
            if tables := self.tables.mask(self._expected, state, drawn=True):
                self._varies("clock", (recorder.clocks or [first])[0], "the clock", tables[0])
        self.runs["repetition, with other draws and on another day"] = not self.findings

    def _varies(self, kind: Kind, line: Line, what: str, table: str) -> None:
        self.find(
            kind, line,
            f"writes {what} to {table}: a retry writes something else than the run that was lost. Derive it from the "
            "message, or take message.time.",
        )  # fmt: skip

    async def _elsewhere(self, *, days: int = 0, draw: float | None = None) -> State:
        @contextmanager
        def around(call: Call) -> Any:
            with another_day(call, days=days, draw=draw):
                yield

        with around_calls(self.app, around):
            return await self.through()

    # -- disturbed ----------------------------------------------------------------------------

    async def _crashes(self) -> None:
        """Crash every message behind the handler and behind COMMIT; at the other points one message each, in turn."""
        points = list(dict.fromkeys(self._points))
        for point in ("after:handler", "after:commit"):
            if point in points:
                points.remove(point)
                await self._in_turn([point])
        for at in range(0, len(points), len(self.targets)):
            await self._in_turn(points[at : at + len(self.targets)])

    async def _in_turn(self, points: Sequence[str]) -> None:
        turns = itertools.cycle(points)
        state = await self.through(lambda target: self._crashed(next(turns), target))
        for point in points:
            await self.same(f"a crash {point.replace(':', ' ')}", state, self._line())

    async def _crashed(self, point: str, target: Target) -> None:
        """Lose the process at a point, and deliver again."""
        looks = point == "after:handler" and target[1].options.transactional
        before = await self.state() if looks else {}
        lost, again = Recorder(), Recorder()
        with ExitStack() as stack:
            if looks:
                stack.enter_context(self._recorded(lost))
            with suppress(Crashed), passing(_crash_at(point)):
                await self.deliver(target)
        if looks:
            after = await self.state()
            # the row of a message that is stored is no effect
            for state in (before, after):
                state.pop("txbox_inbox", None)
            difference = self.tables.difference(before, after)
            if difference is not None:
                line = (lost.others or lost.ends or [self._line()])[0]
                self._outside(line, "writes over another connection")
            if lost.ends and difference is not None and not lost.others:
                self._early(lost.ends[0])
        with ExitStack() as stack:
            if looks:
                stack.enter_context(self._recorded(again))
            await self.deliver(target)
        for effect in lost.effects:
            if any(other.line == effect.line for other in again.effects):
                self._outside(effect.line, effect.what)

    async def _faults(self) -> None:
        """Each statement fails for every message, in one of the ways, which take turns."""
        per_call = -(-len(self._clean.statements) // len(self.targets))
        turns = itertools.cycle(CODES)
        for nth in range(1, min(per_call, _STATEMENTS_MAX) + 1):
            for _ in range(max(1, len(CODES) // len(self.targets))):
                names: list[str] = []

                async def faulty(target: Target, nth: int = nth, names: list[str] = names) -> None:
                    names.append(next(turns))
                    fault = StatementFault(self.app, names[-1], nth)
                    with fault.injected():
                        await self.deliver(target)
                    if fault.swallowed is not None:
                        self._swallowed(fault.swallowed, f"a {names[-1].replace('_', ' ')}")

                state = await self.through(faulty)
                for name in dict.fromkeys(names):
                    await self.same(f"a {name.replace('_', ' ')}", state, self._line())

    async def _answers(self) -> None:
        async def lost(target: Target) -> None:
            with suppress(AssertionError), lost_commit_answer():
                await self.deliver(target)
            await self.deliver(target)

        name = "a lost answer of COMMIT"
        await self.same(name, await self.through(lost), self._line())

    async def _copies(self) -> None:
        async def at_once(target: Target) -> None:
            message, handler = target
            if handler.is_async:
                copies = [another_process(self.app) for _ in range(2)]
                await asyncio.gather(
                    *(copy.process_async(message, consumer=handler.consumer) for copy in copies)
                )
            else:
                race(self.app, message, 2, consumer=handler.consumer)
            await self.deliver(target)

        name = "duplicates at once"
        await self.same(name, await self.through(at_once), self._line())
        name = "duplicates much later"
        for target in self.targets:
            await self.deliver(target)
        await self.same(name, await self.state(), self._line())

    async def _payloads(self) -> None:
        name = "another payload under the same id"
        for message, handler in self.targets:
            other = dataclasses.replace(message, payload=(message.payload or b"") + b" ")
            await self.deliver((other, handler))
        await self.same(name, await self.state(), self._line())

    async def _disorder(self) -> None:
        in_order = [target for target in self.targets if target[1].in_order]
        others = [target for target in self.targets if not target[1].in_order]
        if len(others) < 2:
            return
        name = "disorder"
        state = await self.through(targets=[*reversed(others), *in_order])
        await self.same(name, state, self._line(reads=True), "order")

    async def _zombies(self) -> None:
        async def late(target: Target) -> None:
            _, handler = target
            database = self.app.database
            if handler.is_async:
                await self.app.send_async(target[0])
                assert database.asynchronous is not None
                await drive_async(database.asynchronous, _zombie, self.app, handler)
            else:
                self.app.send(target[0])
                assert database.sync is not None
                drive(database.sync, _zombie, self.app, handler)

        name = "a zombie past its lease"
        # `send` stores a message for every consumer
        targets = {id(target[0]): target for target in self.targets}.values()
        await self.same(name, await self.through(late, targets), self._line())


def message_id_of(target: Target) -> str:
    return str(target[0].id)


def _crash_at(point: str) -> Callable[[str], None]:
    crashed = False

    def crash(passed: str) -> None:
        nonlocal crashed
        if passed == point and not crashed:
            crashed = True
            raise Crashed(f"crashed at {point}")

    return crash


async def _settled(db: Session, app: App, handler: Handler) -> None:
    while True:
        outcomes: list[Outcome] = []
        await dates_forgotten(db, app, handler.consumer)
        await rescue(db, app, Task(consumer=handler.consumer))
        await consumed(db, app, handler.consumer, handler.is_async, outcomes)
        if all(outcome in _WAITS for outcome in outcomes):
            return


async def _zombie(db: Session, app: App, handler: Handler) -> None:
    """Lease the stored message, let another worker run it, and only then run it."""
    token = secrets.token_hex(16)
    leased = await leases.lease(
        db, app.store, handler.consumer, token=token, limit=1, lease=app.lease, suspect=False
    )
    await _settled(db, another_process(app), handler)
    for row in leased:
        await app.protocol.run_leased(db, handler, row, token)


# -- the state --------------------------------------------------------------------------------

# schema, table, column, "serial" for a number that the server counts, "default" for another value of its own,
# "generated" for one that cannot be written
_COLUMNS = {
    "postgresql": """
SELECT n.nspname, c.relname, a.attname,
       CASE WHEN a.attgenerated <> '' THEN 'generated'
            WHEN a.attidentity <> '' OR pg_get_expr(d.adbin, d.adrelid) LIKE 'nextval(%' THEN 'serial'
            WHEN d.adbin IS NOT NULL THEN 'default' ELSE '' END
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
  AND substr(n.nspname, 1, 3) <> 'pg_' AND n.nspname <> 'information_schema' AND substr(c.relname, 1, 6) <> 'txbox_'
ORDER BY n.nspname, c.relname, a.attnum""",
    "mysql": """
SELECT NULL, c.table_name, c.column_name,
       CASE WHEN c.generation_expression <> '' THEN 'generated' WHEN c.extra LIKE '%auto_increment%' THEN 'serial'
            WHEN c.column_default IS NOT NULL THEN 'default' ELSE '' END
FROM information_schema.columns c JOIN information_schema.tables t
  ON t.table_schema = c.table_schema AND t.table_name = c.table_name AND t.table_type = 'BASE TABLE'
WHERE c.table_schema = DATABASE() AND substr(c.table_name, 1, 6) <> 'txbox_'
ORDER BY c.table_name, c.ordinal_position""",
    "sqlite": """
SELECT NULL, t.name, c.name,
       CASE WHEN c.hidden IN (2, 3) THEN 'generated' WHEN c.pk = 1 AND upper(c.type) = 'INTEGER' THEN 'serial'
            WHEN c.dflt_value IS NOT NULL THEN 'default' ELSE '' END
FROM sqlite_master t JOIN pragma_table_xinfo(t.name) c
WHERE t.type = 'table' AND substr(t.name, 1, 7) <> 'sqlite_' AND substr(t.name, 1, 6) <> 'txbox_'
ORDER BY t.name, c.cid""",
}
# table, column, and the table that it refers to
_REFERENCES = {
    "postgresql": "SELECT a.relname, k.attname, b.relname FROM pg_constraint c JOIN pg_class a ON a.oid = c.conrelid"
    " JOIN pg_class b ON b.oid = c.confrelid JOIN pg_attribute k ON k.attrelid = c.conrelid AND k.attnum = c.conkey[1]"
    " WHERE c.contype = 'f'",
    "mysql": "SELECT table_name, column_name, referenced_table_name FROM information_schema.key_column_usage"
    " WHERE table_schema = DATABASE() AND referenced_table_name IS NOT NULL",
    "sqlite": 'SELECT t.name, f."from", f."table" FROM sqlite_master t JOIN pragma_foreign_key_list(t.name) f'
    " WHERE t.type = 'table'",
}
_OURS = {
    "txbox_inbox": ("consumer", "message_id", "status"),
    "txbox_outbox": ("id", "topic", "payload"),
}
_EMPTIED = ("txbox_attempt", "txbox_quarantine", "txbox_outbox", "txbox_sequence", "txbox_inbox")


@dataclass
class _Table:
    name: str
    quoted: str
    backup: str
    columns: list[str] = field(default_factory=list[str])
    kinds: dict[str, str] = field(default_factory=dict[str, str])


class _Tables:
    """The application's tables: read, and put back as they were."""

    def __init__(self, app: App, ids: set[str]) -> None:
        self._app = app
        self._dialect = app.database.dialect.name
        self._ids = ids
        self._tables: list[_Table] = []
        self._before: State = {}
        self._foreign: dict[tuple[str, str], str] = {}
        #: (table, column) that differ between undisturbed runs.
        self.masked: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def kept(self, run: Callable[..., Any]) -> AsyncGenerator[None]:
        """Put everything back at the end."""
        await run(self._save)
        try:
            yield
        finally:
            await self.restore(run)
            await run(self._drop)

    async def _rows(self, db: Session, sql: str) -> Sequence[Sequence[Any]]:
        schema = self._app.database.schema
        text = qualified(sql, schema) if schema else sql
        return (await db.execute(Statement("prove", text, {}))).rows

    def _quoted(self, *names: str | None) -> str:
        mark = "`" if self._dialect == "mysql" else '"'
        return ".".join(f"{mark}{name}{mark}" for name in names if name)

    async def _save(self, db: Session) -> None:
        await db.begin()
        for ours in ("txbox_inbox", "txbox_outbox"):
            if await self._rows(db, f"SELECT 1 FROM {ours} LIMIT 1"):  # noqa: S608 - a constant
                raise ConfigurationError(
                    f"A proof puts every table back as it was, again and again: it needs a database for tests, but "
                    f"there are messages in {ours}."
                )
        tables: dict[tuple[Any, Any], _Table] = {}
        for schema, name, column, kind in await self._rows(db, _COLUMNS[self._dialect]):
            table = tables.setdefault(
                (schema, name),
                _Table(
                    name, self._quoted(schema, name), self._quoted(f"txbox_prove_{len(tables)}")
                ),
            )
            table.columns.append(column)
            table.kinds[column] = kind
        refers: dict[str, set[str]] = {}
        for name, column, other in await self._rows(db, _REFERENCES[self._dialect]):
            refers.setdefault(str(name), set()).add(str(other))
            self._foreign[str(name), str(column)] = str(other)
        self._tables = _in_order(list(tables.values()), refers)
        await db.commit()
        for table in self._tables:
            for sql in (
                f"DROP TABLE IF EXISTS {table.backup}",
                f"CREATE TABLE {table.backup} AS SELECT * FROM {table.quoted}",  # noqa: S608 - quoted names
            ):
                await db.begin()
                await self._rows(db, sql)
                await db.commit()
        await db.begin()
        self._before = await self._read(db)
        await db.commit()

    async def _drop(self, db: Session) -> None:
        for table in self._tables:
            await db.begin()
            await self._rows(db, f"DROP TABLE IF EXISTS {table.backup}")
            await db.commit()

    async def restore(self, run: Callable[..., Any]) -> None:
        for _ in range(3):
            # reads again: a trigger may have written to another table
            if not await run(self._put_back):
                return
        raise ConfigurationError(
            "The tables cannot be put back as they were: give the proof a database of its own."
        )

    async def _put_back(self, db: Session) -> bool:
        """Returns whether there was anything to do."""
        await db.begin()
        now = await self._read(db)
        changed = [table for table in self._tables if now[table.name] != self._before[table.name]]
        if self._dialect == "mysql":
            await self._rows(db, "SET FOREIGN_KEY_CHECKS = 0")
        for table in reversed(changed):
            await self._rows(db, f"DELETE FROM {table.quoted}")  # noqa: S608 - quoted names
        for table in changed:
            names = ", ".join(
                self._quoted(column)
                for column in table.columns
                if table.kinds[column] != "generated"
            )
            overriding = "OVERRIDING SYSTEM VALUE " if self._dialect == "postgresql" else ""
            await self._rows(
                db,
                f"INSERT INTO {table.quoted} ({names}) {overriding}SELECT {names} FROM {table.backup}",  # noqa: S608
            )
        if self._dialect == "mysql":
            await self._rows(db, "SET FOREIGN_KEY_CHECKS = 1")
        filled = [
            name
            for name in _EMPTIED
            if await self._rows(db, f"SELECT 1 FROM {name} LIMIT 1")  # noqa: S608 - a constant
        ]
        for name in filled:
            await self._rows(db, f"DELETE FROM {name}")  # noqa: S608 - a constant
        await (db.commit() if changed or filled else db.rollback())
        return bool(changed)

    async def unprocessed(self, db: Session) -> Sequence[Sequence[Any]]:
        """Id, consumer and error of the messages that were not processed."""
        await db.begin()
        rows = await self._rows(
            db,
            "SELECT message_id, consumer, error_type FROM txbox_inbox WHERE status <> 'processed'",
        )
        await db.rollback()
        # effects have yet to run
        return [row for row in map(_plain, rows) if not str(row[1]).startswith(EFFECT_PREFIX)]

    async def read(self, db: Session) -> State:
        await db.begin()
        state = await self._read(db)
        for name, columns in _OURS.items():
            rows = await self._rows(db, f"SELECT {', '.join(columns)} FROM {name}")  # noqa: S608
            state[name] = sorted(map(_plain, rows), key=repr)
        await db.rollback()
        return state

    async def _read(self, db: Session) -> State:
        state: State = {}
        for table in self._tables:
            names = ", ".join(map(self._quoted, table.columns))
            rows = await self._rows(db, f"SELECT {names} FROM {table.quoted}")  # noqa: S608 - quoted names
            state[table.name] = sorted(map(_plain, rows), key=repr)
        return state

    # -- comparison ---------------------------------------------------------------------------

    def _columns(self, name: str) -> Sequence[str]:
        for table in self._tables:
            if table.name == name:
                return table.columns
        return _OURS.get(name, ())

    def _kinds(self, table: str) -> dict[str, str]:
        for each in self._tables:
            if each.name == table:
                return each.kinds
        return {}

    def _serial(self, table: str) -> str | None:
        kinds = self._kinds(table)
        return next((column for column, kind in kinds.items() if kind == "serial"), None)

    def _numbers(self, expected: State, state: State) -> dict[str, dict[Any, Any]]:
        """For each table the numbers that the server has counted: those of a state → those of the expected one."""
        numbers: dict[str, dict[Any, Any]] = {}
        for table, rows in self._before.items():
            serial = self._serial(table)
            if serial is None or table not in expected:
                continue
            at = self._columns(table).index(serial)
            known = {row[at] for row in rows}
            # the same row has another number, so it is known by all the rest
            fresh = [
                sorted(
                    (row for row in side[table] if row[at] not in known),
                    key=lambda row: (repr(self._bare(table, row, {}, ())), row[at]),
                )
                for side in (expected, state)
            ]
            numbers[table] = {new[at]: old[at] for old, new in zip(*fresh, strict=False)}
        return numbers

    def difference(self, expected: State, state: State) -> str | None:
        """What is different, in a sentence; None for nothing that counts."""
        numbers = self._numbers(expected, state)
        merged = {str(new): str(old) for pairs in numbers.values() for new, old in pairs.items()}
        for table in expected:
            wanted, right = expected[table], state.get(table)
            if not isinstance(wanted, list) or table == "observe()":
                if wanted != right:
                    return f"observe() returned {right!r} instead of {wanted!r}."
                continue
            # a number may stand in a text, or in a column without a foreign key
            differences = [
                self._different(table, wanted, right or [], numbers, anywhere)
                for anywhere in ({}, merged)
            ]
            if all(differences):
                return differences[0]
        return None

    def _different(
        self, table: str, wanted: Any, right: Any, numbers: Any, anywhere: Mapping[str, str]
    ) -> str | None:
        before = sorted((self._bare(table, row, {}, {}) for row in wanted), key=repr)
        after = sorted((self._bare(table, row, numbers, anywhere) for row in right), key=repr)
        if len(before) != len(after):
            return f"{table} has {len(after)} rows instead of {len(before)}."
        for row, other in zip(before, after, strict=True):
            if not all(map(_same, row, other)):
                return f"{table} has {other} instead of {row}."
        return None

    def _bare(self, table: str, row: Sequence[Any], numbers: Any, anywhere: Any) -> tuple[Any, ...]:
        """A row without what is masked, and with the other run's numbers; `()` leaves numbers out."""
        cells: list[Any] = []
        serial = self._serial(table)
        for column, value in zip(self._columns(table), row, strict=True):
            target = table if column == serial else self._foreign.get((table, column))
            if (table, column) in self.masked or (anywhere == () and target is not None):
                continue
            if target in numbers:
                cells.append(numbers[target].get(value, value))
            elif anywhere and isinstance(value, (int, str)) and not isinstance(value, bool):
                text = _WHOLE.sub(lambda match: anywhere.get(match[0], match[0]), str(value))
                cells.append(type(value)(text))
            else:
                cells.append(value)
        return tuple(cells)

    def mask(self, expected: State, state: State, *, drawn: bool) -> list[str]:
        """Mask what differs between two undisturbed runs; returns the tables to blame the handler for."""
        if self.difference(expected, state) is None:
            return []
        numbers = self._numbers(expected, state)
        blamed: list[str] = []
        for table, rows in expected.items():
            others: Any = state.get(table)
            if table == "observe()":
                if rows != others:
                    blamed.append(table)
                continue
            kinds = self._kinds(table)
            columns = [c for c in self._columns(table) if (table, c) not in self.masked]
            sides = [
                [self._bare(table, row, named, {}) for row in side]
                for side, named in ((rows, {}), (others, numbers))
            ]
            for at, column in enumerate(columns):
                wanted, right = (sorted((row[at] for row in side), key=repr) for side in sides)
                if len(wanted) == len(right) and all(map(_same, wanted, right)):
                    continue
                self.masked.add((table, column))
                if drawn or kinds.get(column) != "default":
                    blamed.append(f"{table}.{column}")
        return blamed


def _in_order(tables: list[_Table], refers: Mapping[str, set[str]]) -> list[_Table]:
    """Those that others refer to first."""
    ordered: list[_Table] = []
    remaining = list(tables)
    while remaining:
        names = {table.name for table in remaining}
        ready = [t for t in remaining if not (refers.get(t.name, set()) - {t.name}) & names]
        # a circle: any of them
        ready = ready or remaining[:1]
        ordered += ready
        remaining = [table for table in remaining if table not in ready]
    return ordered


def _plain(row: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        value.decode("utf-8", "backslashreplace")
        if isinstance(value, (bytes, bytearray))
        else value
        if isinstance(
            value, (int, float, str, datetime.datetime, datetime.date, datetime.timedelta)
        )
        or value is None
        else repr(value)
        for value in row
    )


def _same(value: object, other: object) -> bool:
    """Whether two cells are equal, or two readings of the server's clock."""
    if value == other:
        return True
    first, second = _moment(value), _moment(other)
    now = time.time()
    return (
        first is not None
        and second is not None
        and abs(first - second) < _MOMENT_S
        and abs(first - now) < 10 * _MOMENT_S
    )


def _moment(value: object) -> float | None:
    if isinstance(value, str):
        with suppress(ValueError):
            value = datetime.datetime.fromisoformat(value)
    if isinstance(value, datetime.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
        return aware.timestamp()
    return float(value) if isinstance(value, (int, float)) and value > 1e9 else None
