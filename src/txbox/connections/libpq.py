"""What goes through libpq's pipeline on a psycopg connection: txbox's own statements, and a handler's deferred ones.

Every message passes through here twice, so this bypasses psycopg's cursors and keeps the instructions few.

Source: docs/decisions/0009-round-trips.md, docs/decisions/0023-pipelined-handlers.md
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from os import urandom
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators, postgres, pq
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.rows import tuple_row
from psycopg.types import TypesRegistry
from psycopg.waiting import Ready, Wait

from txbox.connections import base
from txbox.connections.base import (
    acquired,
    check_committed,
    connection_lost,
    left_behind,
    refused_commit,
    watched_class,
)
from txbox.connections.settings import Settings
from txbox.errors import Fault, StoreError
from txbox.session import Lasts, Result, SettingChange, Statement, Statements
from txbox.store.dialect import native

BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED"
COMMIT = b"COMMIT"
DEALLOCATE = b"DEALLOCATE ALL"

_COMMAND_OK = int(pq.ExecStatus.COMMAND_OK)
_TUPLES_OK = int(pq.ExecStatus.TUPLES_OK)
_FINE = frozenset((_COMMAND_OK, _TUPLES_OK))
_SYNC = int(pq.ExecStatus.PIPELINE_SYNC)
_ABORTED = int(pq.ExecStatus.PIPELINE_ABORTED)
_READ, _READ_WRITE, _READY_READ = Wait.R, Wait.RW, Ready.R
_TEXT = 25  # the OID of text
_TEXT_FORMAT, _BINARY = pq.Format.TEXT, pq.Format.BINARY
# an idle connection of a pool is there at once
_IDLE_S = 0.01
_IDLE, _UNKNOWN = int(pq.TransactionStatus.IDLE), int(pq.TransactionStatus.UNKNOWN)

R = TypeVar("R")
Translate = Callable[[BaseException], StoreError | None]


_set = object.__setattr__


class Answer(Result):
    """A result from libpq. Its rows are read only when accessed."""

    __slots__ = ("_answer", "_connection")
    _answer: Any
    _connection: Any

    def __init__(self, connection: Any, answer: Any) -> None:
        _set(self, "_connection", connection)
        _set(self, "_answer", answer)

    @property
    def rows(self) -> Sequence[Sequence[Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        answer = self._answer
        count, fields = answer.ntuples, range(answer.nfields)
        if not count:
            return ()
        if all(answer.ftype(field) == _TEXT for field in fields):
            # the ids a claim won, on the path of every message
            return [
                [_text(answer.get_value(row, field)) for field in fields] for row in range(count)
            ]
        transformer = Transformer(_Plainly(self._connection))
        transformer.set_pgresult(answer)
        return transformer.load_rows(0, count, tuple)

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._answer.command_tuples or 0


class ExclusiveUse:
    """Waits for libpq as psycopg does: only while no other thread or task uses the connection.

    A thread or task that a handler did not wait for may still use it. It has a few seconds to finish its statement,
    then the transaction is abandoned. Either way, the connection is never used again.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        #: Another thread or task was using it.
        self.contended = False
        #: It did not become free in time.
        self.refused = False

    def in_use(self) -> bool:
        """Whether anybody else uses it, has used it or began a transaction on it; does not wait."""
        return self.contended or in_use(self._connection)

    def wait(self, steps: Generator[Wait, Ready, R]) -> R:
        raw = self._connection
        lock = raw.lock
        if not lock.acquire(False):
            self.contended = True
            if self.refused or not lock.acquire(timeout=base.LEFT_BEHIND_S):
                raise self._refusal(steps)
        try:
            answer: R = raw.wait(steps)
        finally:
            lock.release()
        return answer

    async def wait_async(self, steps: Generator[Wait, Ready, R]) -> R:
        raw = self._connection
        lock = raw.lock
        if lock.locked():
            self.contended = True
            if self.refused or not await acquired(lock):
                raise self._refusal(steps)
        else:
            await lock.acquire()
        try:
            answer: R = await raw.wait(steps)
        finally:
            lock.release()
        return answer

    def _refusal(self, steps: Generator[Wait, Ready, R]) -> StoreError:
        steps.close()
        self.refused = True
        return left_behind()

    def end_other(self) -> None:
        """Cancel a statement that is still running on the connection before closing it.

        Otherwise the server would keep the transaction's locks until it ends. Worse, the thread waiting for the
        answer would read from the next connection that gets the same file descriptor.
        """
        if self.refused:
            lock = self._connection.lock
            with suppress(psycopg.Error):
                self._connection.cancel()
            if lock.acquire(timeout=base.LEFT_BEHIND_S):
                lock.release()

    async def end_other_async(self) -> None:
        """`end_other` for async connections."""
        if self.refused:
            lock = self._connection.lock
            with suppress(psycopg.Error):
                await asyncio.to_thread(self._connection.cancel)
            if await acquired(lock):
                lock.release()


def in_use(raw: Any) -> bool:
    """Whether a connection is in use now, or has an open transaction; not so if it is lost."""
    return raw.lock.locked() or int(raw.pgconn.transaction_status) not in (_IDLE, _UNKNOWN)


async def close_idle(pool: Any, count: int, *, is_async: bool) -> None:
    """Close up to so many idle connections of a psycopg_pool, which replaces them."""
    from psycopg_pool import PoolTimeout

    for _ in range(count):
        try:
            lent = pool.getconn(timeout=_IDLE_S)
            raw = await lent if is_async else lent
        except PoolTimeout:
            # others use them
            return
        raw.pgconn.finish()
        returned = pool.putconn(raw)
        if is_async:
            await returned


class _Sent:
    """What was sent up to a sync message: the statements, between two commands.

    Attributes:
        parsed: those of the statements that were prepared on the way.
        opening, closing: how many answers the commands have; 2 for one that was prepared on the way.
    """

    __slots__ = ("after", "before", "closing", "opening", "parsed", "statements")

    def __init__(self, statements: Statements, before: bytes | None, after: bytes | None) -> None:
        self.statements = statements
        self.before = before
        self.after = after
        self.parsed: list[Statement] = []
        self.opening = self.closing = 0


class Pipeline:
    """Sends statements to libpq without waiting in between, then reads all the answers.

    Args:
        prepare: False for poolers that cannot keep prepared statements.
        translate: translates psycopg errors.
    """

    def __init__(self, connection: Any, *, prepare: bool, translate: Translate) -> None:
        self._connection = connection
        self._prepare = prepare
        self._translate = translate
        # SQL → the name it is prepared under (None: not prepared) and its parameters in order
        self._plans: dict[str, tuple[bytes | None, tuple[str, ...]]] = {}
        # BEGIN, or the plan that a COMMIT comes behind → the name it is prepared under; without one, the server
        # would parse it every time
        self._commands: dict[bytes, bytes] = {}
        # unique: behind a pooler, an equal name could be another client's plan for something else
        self._prefix = b"txbox_%s_" % urandom(6).hex().encode()
        self._named = 0
        #: What was begun behind a COMMIT and not read yet.
        self.ahead: Statements | None = None
        self._ahead = _Sent((), None, None)

    def forget(self) -> None:
        """Forget all plans: the server has deallocated every prepared statement."""
        self._plans.clear()
        self._commands.clear()

    def send(
        self,
        statements: Statements,
        *,
        before: bytes | None = None,
        after: bytes | None = None,
        queue: Queue | None = None,
        meanwhile: Callable[[], Statements | None] | None = None,
    ) -> Generator[Wait, Ready, list[Result]]:
        """Send the statements between two commands; returns the results of the statements.

        Args:
            queue: what was deferred before them; its answers are collected too.
            meanwhile: called once everything is sent. What it returns is begun behind a sync of its own,
                so that nothing here waits for it; `begun` reads its answers.

        Raises:
            StoreError: the first failure; nothing after it was executed.
            psycopg.Error: a failure of what was sent earlier; none of the statements was executed.
        """
        pgconn = self._connection.pgconn
        sent = _Sent(statements, before, after)
        queued, syncs = (0, 0) if queue is None else queue.hand_over()
        try:
            if not queued:
                pgconn.enter_pipeline_mode()
            self._put(pgconn, sent)
            if pgconn.flush():
                yield from _flushed(pgconn)
            if meanwhile is not None and (behind := meanwhile()) is not None:
                self.ahead, self._ahead = behind, _Sent(behind, BEGIN, None)
                self._put(pgconn, self._ahead)
                yield from _flushed(pgconn)
            answers = yield from _answered(pgconn, syncs, last=self.ahead is None)
        except psycopg.Error as error:
            pgconn.finish()
            raise connection_lost(error.sqlstate, definite=after is not COMMIT) from error
        if queued:
            _check_queued(answers[:queued])
            answers = answers[queued:]
        try:
            return self._read(sent, answers)
        except StoreError as error:
            # outside a transaction, whatever came before the refusal is undone with it
            undone = pgconn.transaction_status == _IDLE and (
                after is not COMMIT or before is not None
            )
            if error.fault is not Fault.PREPARED or not undone:
                raise
        # another user of the pool deallocated every plan: prepare again
        return (yield from self.send(statements, before=before, after=after))

    def one_trip(self, statements: Statements) -> Generator[Wait, Ready, list[Result]]:
        """Send a whole transaction, unless the server has already closed the connection; as `send`."""
        check_alive(self._connection.pgconn)
        return (yield from self.send(statements, before=BEGIN, after=COMMIT))

    def begun(
        self, meanwhile: Callable[[], object] | None = None
    ) -> Generator[Wait, Ready, list[Result]]:
        """Wait for the statements begun behind a COMMIT; returns and raises as `send` does."""
        self.ahead = None
        pgconn = self._connection.pgconn
        if meanwhile is not None:
            meanwhile()
        try:
            answers = yield from _answered(pgconn, last=True)
        except psycopg.Error as error:
            pgconn.finish()
            raise connection_lost(error.sqlstate) from error
        return self._read(self._ahead, answers)

    def _put(self, pgconn: Any, sent: _Sent) -> None:
        if sent.before is not None:
            key = BEGIN if self._prepare and sent.before is BEGIN else None
            sent.opening = self._command(pgconn, sent.before, key)
        name: bytes | None = None
        for statement in sent.statements:
            plan = self._plans.get(statement.sql)
            if plan is None:
                plan = self._parse(pgconn, statement, sent.parsed)
            name, names = plan
            values, formats = _written(statement.params, names)
            # binary results do not depend on DateStyle, bytea_output, extra_float_digits or a time zone
            if name is not None:
                pgconn.send_query_prepared(name, values, formats, _BINARY)
            else:
                sql, _ = native(statement.sql, "numeric")
                pgconn.send_query_params(sql.encode(), values, None, formats, _BINARY)
        if sent.after is not None:
            # a COMMIT that lacks its plan would be in doubt, so it is prepared along with the plan it comes
            # behind: a server that lacks one lacks both, and that statement fails first
            new = sent.parsed and sent.parsed[-1] is sent.statements[-1]
            behind = name if sent.after is COMMIT and not new else None
            sent.closing = self._command(pgconn, sent.after, behind)
        pgconn.pipeline_sync()

    def _command(self, pgconn: Any, sql: bytes, key: bytes | None) -> int:
        """Send BEGIN, COMMIT or another command; returns how many answers it has.

        Args:
            key: of its plan; None sends it as text.
        """
        if key is None:
            pgconn.send_query_params(sql, None)
            return 1
        name, answers = self._commands.get(key), 1
        if name is None:
            self._named += 1
            # with the word, for readers of the wire
            name = self._commands[key] = b"%s%s_%d" % (self._prefix, sql.split()[0], self._named)
            pgconn.send_prepare(name, sql)
            answers = 2
        pgconn.send_query_prepared(name, ())
        return answers

    def _read(self, sent: _Sent, answers: list[Any]) -> list[Result]:
        connection, statements, parsed = self._connection, sent.statements, sent.parsed
        first = sent.opening
        last = first + len(statements) + len(parsed)
        if len(answers) < last + sent.closing or not _FINE.issuperset(
            [one.status for one in answers]
        ):
            raise self._failure(sent, answers)
        if sent.after is COMMIT:
            check_committed(_text(answers[-1].command_status))
        replies = answers[first:last]
        if parsed:
            replies = _without_parses(statements, parsed, replies)
        return [Answer(connection, answer) for answer in replies]

    def _parse(
        self, pgconn: Any, statement: Statement, parsed: list[Statement]
    ) -> tuple[bytes | None, tuple[str, ...]]:
        sql, names = native(statement.sql, "numeric")
        name: bytes | None = None
        if self._prepare:
            self._named += 1
            name = b"%s%d" % (self._prefix, self._named)
            pgconn.send_prepare(name, sql.encode())
            parsed.append(statement)
        plan = self._plans[statement.sql] = (name, names)
        return plan

    def _failure(self, sent: _Sent, answers: Sequence[Any]) -> StoreError:
        """Return the first command's error; forget the plans that were not prepared because of it."""
        for statement in sent.parsed:
            # a Parse after a failure never ran; one before it is merely prepared again
            self._plans.pop(statement.sql, None)
        if sent.opening > 1 or sent.closing > 1:
            self._commands.clear()
        refused = next(
            (one for one in answers if one.status not in (_COMMAND_OK, _TUPLES_OK, _ABORTED)), None
        )
        if refused is None:
            # the server went away in the middle of its answers
            return connection_lost(definite=sent.after is not COMMIT)
        error = psycopg.errors.error_from_result(refused)
        failure = self._translate(error) or StoreError(type(error).__name__)
        if failure.fault is Fault.PREPARED:
            # a pooler, or the handler's DEALLOCATE ALL, removed them: prepare again
            self.forget()
        last = sent.opening + len(sent.statements) + len(sent.parsed) + sent.closing - 1
        if sent.after is COMMIT and not any(refused is one for one in answers[:last]):
            # COMMIT's own answer, or what a server said that was ended behind it
            failure.definite = refused_commit(failure)
        failure.__cause__ = error
        return failure


def _written(
    params: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[bytes | None], list[pq.Format] | None]:
    """Write the parameters of a statement of txbox's, in order; its text says what types they have."""
    # in hexadecimal, a payload would double in size
    formats = (
        [_BINARY if params[each].__class__ is bytes else _TEXT_FORMAT for each in names]
        if "payload" in params or "rows.payload" in params
        else None
    )
    values = [
        value
        if value is None
        else value.encode()
        if value.__class__ is str
        else value
        if formats is not None and value.__class__ is bytes
        else _dump(value)
        for value in map(params.__getitem__, names)
    ]
    return values, formats


def _without_parses(
    statements: Statements, parsed: Sequence[Statement], answers: Sequence[Any]
) -> list[Any]:
    """Leave out what answers a Parse, which comes before the answer of its statement."""
    waiting, rest = list(parsed), iter(answers)
    executed: list[Any] = []
    for statement in statements:
        if waiting and waiting[0] is statement:
            waiting.pop(0)
            next(rest)
        executed.append(next(rest))
    return executed


def check_alive(pgconn: Any) -> None:
    """Find out, without a round trip, whether the server has closed an idle connection.

    A COMMIT that is about to travel with its BEGIN would be in doubt otherwise. An end that is still on its way is
    not seen, and puts it in doubt.

    Raises:
        StoreUnavailable: it has.
    """
    try:
        # the first reads what the server may have said, the second that nothing follows
        pgconn.consume_input()
        pgconn.consume_input()
    except psycopg.Error as error:
        pgconn.finish()
        raise connection_lost(error.sqlstate) from error


def deallocates(connection: Any) -> bool | None:
    """Whether psycopg deallocates every prepared statement behind the next rollback; None if that is not known."""
    # it does so if it has prepared any; private, so a release may be without it
    names = getattr(getattr(connection, "_prepared", None), "_names", None)
    return None if names is None else bool(names)


def nothing() -> Generator[Wait, Ready, None]:
    """Send nothing: only wait until the connection is free."""
    yield from ()


def collected(pgconn: Any, syncs: int) -> Generator[Wait, Ready, list[Any]]:
    """Send what is queued in pipeline mode with a sync; returns every answer in order and leaves that mode.

    Args:
        syncs: how many were sent before.

    Fewer answers than expected mean that the server is gone.
    """
    pgconn.pipeline_sync()
    yield from _flushed(pgconn)
    return (yield from _answered(pgconn, syncs, last=True))


def _flushed(pgconn: Any) -> Generator[Wait, Ready, None]:
    while pgconn.flush():
        if (yield _READ_WRITE) & _READY_READ:
            pgconn.consume_input()


def _answered(pgconn: Any, syncs: int = 0, *, last: bool) -> Generator[Wait, Ready, list[Any]]:
    """Return every answer up to the sync behind so many others; leaves pipeline mode after the last one."""
    answers: list[Any] = []
    is_busy, get_result = pgconn.is_busy, pgconn.get_result
    # each command answers with one result and a null; a sync ends a group of them
    while True:
        while is_busy():
            yield _READ
            pgconn.consume_input()
        answer = get_result()
        if answer is None:
            # no more answers: the server is gone
            pgconn.finish()
            return answers
        if answer.status == _SYNC:
            if syncs:
                syncs -= 1
                continue
            if last:
                pgconn.exit_pipeline_mode()
            return answers
        answers.append(answer)
        get_result()  # the null, which arrives together with its result


def _check_queued(answers: Sequence[Any]) -> None:
    for answer in answers:
        if answer.status not in _FINE:
            raise psycopg.errors.error_from_result(answer)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _dump(value: Any) -> bytes:
    """Write a value in PostgreSQL's text format."""
    kind: type[Any] = value.__class__
    if kind is bytes:
        return f"\\x{value.hex()}".encode()
    if kind is bool:
        return b"t" if value else b"f"
    if kind is list:
        return f"{{{_elements(value)}}}".encode()
    return str(value).encode()


def _elements(values: list[Any]) -> str:
    """Write one column of many rows. Fast paths for a value shared by all rows, and for plain text."""
    first = values[0] if values else None
    if values.count(first) == len(values):
        return ",".join([_element(first)] * len(values))
    kind: type[Any] = first.__class__
    try:
        if kind is bytes:
            return '"\\\\x' + '","\\\\x'.join(map(bytes.hex, values)) + '"'
        if kind is str:
            texts = '","'.join(values)
            if "\\" not in texts and texts.count('"') == 2 * (len(values) - 1):
                return f'"{texts}"'
    except TypeError:
        pass  # one is None
    return ",".join(map(_element, values))


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    if type(value) is bytes:
        return '"\\\\x' + value.hex() + '"'
    if type(value) is str:
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


# -- what a handler does to the connection's object -------------------------------------------

_SENDS = ("execute", "executemany", "stream", "copy")
_FACTORIES = (
    "row_factory",
    "cursor_factory",
    "server_cursor_factory",
    "prepare_threshold",
    "prepared_max",
)


def reset(pgconn: Any) -> Generator[Any, Any, None]:
    """Undo, outside a transaction, what statements have set in the session.

    Raises:
        psycopg.Error: it was not all undone.
    """
    pgconn.send_query(base.RESET.encode())
    for answer in (yield from generators.execute(pgconn)):
        if answer.status not in _FINE:
            raise psycopg.errors.error_from_result(answer)


class _Adapters(AdaptersMap):
    """Adapters that notice when one is added."""

    changed = False

    def register_loader(self, *args: Any, **kwargs: Any) -> None:
        self.changed = True
        super().register_loader(*args, **kwargs)

    def register_dumper(self, *args: Any, **kwargs: Any) -> None:
        self.changed = True
        super().register_dumper(*args, **kwargs)


class Watched:
    """A psycopg connection whose cursors say what they send, and whose attributes are put back after a handler.

    Args:
        settings: judges statements; None for none.
        sets: called with what a statement or an attribute sets.
    """

    def __init__(
        self,
        connection: Any,
        settings: Settings | None,
        sets: Callable[[SettingChange | None], None],
    ) -> None:
        self._connection = connection
        self._settings = settings
        self.quiet = set[str]() if settings is None else settings.quiet
        self._sets = sets
        self._classes: dict[Any, Any] = {}
        self._lent: Any = None

    def sent(self, text: str) -> None:
        """A handler is about to send a statement."""
        if text not in self.quiet and self._settings is not None:
            self._sets(self._settings.of(text))

    def watch(self, sets: Callable[[SettingChange | None], None] | None = None) -> None:
        """Begin: remember the attributes as they are, and give out cursors that tell."""
        self._sets = sets or self._sets
        raw = self._connection
        self._before = tuple([getattr(raw, name) for name in _FACTORIES])
        if raw.adapters is not self._lent or self._lent.changed:
            self._adapters = AdaptersMap(raw.adapters)
            self._lend_adapters()
        raw.cursor_factory = self._told(raw.cursor_factory)
        raw.server_cursor_factory = self._told(raw.server_cursor_factory)
        self._during = tuple([getattr(raw, name) for name in _FACTORIES])

    def _told(self, kind: Any) -> Any:
        known = self._classes.get(kind)
        if known is None:
            known = self._classes[kind] = watched_class(kind, self.sent, _SENDS, self.quiet)
        return known

    def _lend_adapters(self) -> None:
        self._lent = _Adapters(self._adapters)
        self._connection._adapters = self._lent  # noqa: SLF001 - has no public name

    def restore(self) -> None:
        """Undo what a call has set on the object."""
        raw, during, lent = self._connection, self._during, self._lent
        # for every message: nearly always nothing has changed
        if (
            raw.row_factory is during[0]
            and raw.cursor_factory is during[1]
            and raw.server_cursor_factory is during[2]
            and raw.prepare_threshold is during[3]
            and raw.prepared_max is during[4]
            and raw.adapters is lent
            and not lent.changed
        ):
            return
        if tuple([getattr(raw, name) for name in _FACTORIES]) != during:
            if raw.cursor_factory is not self._during[1]:
                # what such cursors sent was not seen
                self._sets(SettingChange("cursor_factory", Lasts.CONNECTION))
            for name, value in zip(_FACTORIES, self._during, strict=True):
                setattr(raw, name, value)
        if self._lent.changed or raw.adapters is not self._lent:
            self._lend_adapters()

    def leave(self) -> None:
        """End, after `restore`: give the object back as it was."""
        for name, value in zip(_FACTORIES, self._before, strict=True):
            setattr(self._connection, name, value)


_watched: WeakKeyDictionary[Any, Watched] = WeakKeyDictionary()


def watched_in_pool(
    connection: Any,
    settings: Settings | None,
    sets: Callable[[SettingChange | None], None],
) -> Watched:
    """Watch a connection of a foreign pool until `leave`."""
    watched = _watched.get(connection)
    if watched is None:
        watched = _watched[connection] = Watched(connection, settings, sets)
    watched.watch(sets)
    return watched


# whatever an application registers, for all connections or for one, our statements are read and written like this
_PLAIN = AdaptersMap(types=TypesRegistry())
postgres.register_default_types(_PLAIN.types)
postgres.register_default_adapters(_PLAIN)


class _Plainly(NamedTuple):
    """A connection with psycopg's own adapters."""

    connection: Any
    adapters: AdaptersMap = _PLAIN


def plain(cursor: Any) -> Any:
    """Return a cursor of any class whose values are read and written by psycopg's own adapters."""
    cursor._adapters = AdaptersMap(_PLAIN)  # noqa: SLF001 - has no public name
    return cursor


def plain_cursor(connection: Any) -> Any:
    """Return a cursor whatever the connection's own are: rows are tuples, and values psycopg's."""
    is_async = isinstance(connection, psycopg.AsyncConnection)
    kind: Any = psycopg.AsyncCursor if is_async else psycopg.Cursor
    return plain(kind(connection, row_factory=tuple_row))


# -- a handler's deferred statements ----------------------------------------------------------
#
# A handler that declares `pipeline=True` calls `tx.execute(…)` as usual. While deferring, statements go to
# libpq without a cursor and without looking at the socket, both of which cost more than the statement.
# Anything else the handler does with the connection first sends what was deferred.

_PLACEHOLDER = re.compile(r"%(.?)", re.DOTALL)
# What follows a sync runs whatever came before it, and behind a COMMIT in transactions of its own. So only what cannot
# end the transaction is deferred.
_DEFERRABLE = re.compile(r"\s*(?:select|insert|update|delete|merge|with|values)\b", re.IGNORECASE)
# Behind so many bytes a sync is sent, well before libpq sends them without one, which it does at 8 kB: to the server, a
# transaction is idle only behind a sync. Without it, a handler that hangs would lock its rows for as long.
_SYNC_BYTES = 4096
# what a statement and each of its values take on the wire, roughly
_STATEMENT_BYTES, _VALUE_BYTES = 64, 8
_INTS = {int}
# the OIDs of int2[], int4[] and int8[]
_INT_ARRAYS = ((2**15, 1005), (2**31, 1007), (2**63, 1016))
# psycopg's own limit on prepared statements per connection
_PLANS_MAX = 100
_IN_TRANSACTION = int(pq.TransactionStatus.INTRANS)


class Plan:
    """A query in libpq's syntax, and the names it is prepared under, one per combination of types."""

    __slots__ = ("formats", "names", "sql")

    def __init__(self, sql: bytes, parameters: int) -> None:
        self.sql = sql
        self.formats = [PyFormat.AUTO] * parameters
        self.names: dict[tuple[int, ...], bytes] = {}


class Plans:
    """What a connection has prepared for its handlers.

    Args:
        prepare: False for poolers that cannot keep prepared statements.
    """

    def __init__(self, prepare: bool) -> None:
        self.prepare = prepare
        self._known: dict[str, Plan | None] = {}
        self._ours: dict[str, tuple[Plan, tuple[str, ...]]] = {}
        self._named = 0

    def forget(self) -> bool:
        """Forget all plans; returns whether there were any, which the server is to deallocate."""
        plans = [*self._known.values(), *(plan for plan, _ in self._ours.values())]
        self._known.clear()
        self._ours.clear()
        return any(plan is not None and plan.names for plan in plans)

    def find(self, query: str) -> Plan | None:
        """Return the plan of a query with `%s` placeholders; None for those that psycopg sends."""
        if query in self._known:
            return self._known[query]
        if len(self._known) >= _PLANS_MAX:
            # the handler writes values into its SQL
            return None
        placeholders = _PLACEHOLDER.findall(query)
        numbers = iter(range(1, len(placeholders) + 1))
        sql = _PLACEHOLDER.sub(
            lambda match: f"${next(numbers)}" if match[1] == "s" else match[1], query
        )
        strange = not _DEFERRABLE.match(query) or any(
            each not in ("s", "%") for each in placeholders
        )
        plan = self._known[query] = None if strange else Plan(sql.encode(), placeholders.count("s"))
        return plan

    def of_ours(self, statement: Statement) -> tuple[Plan, tuple[str, ...]]:
        """Return the plan of a statement of txbox's, and its parameters in order."""
        known = self._ours.get(statement.sql)
        if known is None:
            sql, names = native(statement.sql, "numeric")
            known = self._ours[statement.sql] = Plan(sql.encode(), len(names)), names
        return known

    def new_name(self) -> bytes:
        self._named += 1
        return b"txbox_handler_%d" % self._named


class Queue:
    """What one handler's transaction has deferred. Nothing here waits, except `drained`.

    Attributes:
        entered: libpq is in pipeline mode, and answers are outstanding.
        stuck: the socket takes no more for now; wait for `drained`.
        sent: how many answers are outstanding.
        position: the number of the next answer, counted from the beginning of the transaction.
        failure: the error of the first statement that failed, and the number of its answer.
        over: nothing more is sent through it.
    """

    def __init__(self, connection: Any, plans: Plans, watched: Watched) -> None:
        self._told, self._quiet = watched.sent, watched.quiet
        self._pgconn = connection.pgconn
        self._plans = plans
        self._transformer = Transformer(connection)
        adapters, default = connection.adapters, psycopg.adapters
        self._plain_lists = all(
            adapters.get_dumper(kind, PyFormat.AUTO) is default.get_dumper(kind, PyFormat.AUTO)
            for kind in (int, list)
        )
        self.entered = self.stuck = self.over = False
        self.sent = 0
        self._syncs = self._unsynced_bytes = 0
        self.position = 0
        self.failure: tuple[psycopg.Error, int] | None = None
        self._parsed: list[tuple[Plan, tuple[int, ...]]] = []
        self.unread = Unread(connection)

    def put(self, query: Any, params: Any) -> bool:
        """Send a handler's statement; False leaves it to psycopg."""
        kind: type[Any] = params.__class__
        if query.__class__ is not str or (kind is not tuple and kind is not list):
            return False
        if query not in self._quiet:
            self._told(query)
        plan = self._plans.find(query)
        if plan is None or len(params) != len(plan.formats) or not self._may_send():
            return False
        self._send(plan, *self._dumped(params, plan))
        return True

    def send(self, statement: Statement) -> bool:
        """Send a statement whose result is not read; False outside a transaction."""
        if not self._may_send():
            return False
        plan, names = self._plans.of_ours(statement)
        values, formats = _written(statement.params, names)
        self._send(plan, values, (), formats)
        return True

    def _send(
        self,
        plan: Plan,
        values: Sequence[Any],
        types: tuple[int, ...],
        formats: Sequence[pq.Format] | None,
    ) -> None:
        pgconn, plans = self._pgconn, self._plans
        size = len(values) * _VALUE_BYTES + len(b"".join(filter(None, values)))
        if plans.prepare:
            name = plan.names.get(types)
            if name is None:
                name = plan.names[types] = plans.new_name()
                self._parsed.append((plan, types))
                pgconn.send_prepare(name, plan.sql, types)
                self._count(len(plan.sql))
            pgconn.send_query_prepared(name, values, formats)
        else:
            pgconn.send_query_params(plan.sql, values, types or None, formats)
            size += len(plan.sql)
        self._count(size)
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._sync()

    def _dumped(
        self, params: Any, plan: Plan
    ) -> tuple[Sequence[Any], tuple[int, ...], Sequence[pq.Format] | None]:
        arrays = _int_arrays(params) if self._plain_lists else None
        if arrays is not None:
            return *arrays, None
        transformer = self._transformer
        values = transformer.dump_sequence(params, plan.formats)
        return values, transformer.types or (), transformer.formats

    def command(self, sql: bytes) -> bool:
        """Send a command without parameters; False if there is no transaction to send it in."""
        if not self._may_send():
            return False
        self._pgconn.send_query_params(sql, None)
        self._count(len(sql))
        return True

    def _may_send(self) -> bool:
        if not self.entered:
            if (
                self.over
                or self._pgconn.transaction_status != _IN_TRANSACTION
                or self._pgconn.pipeline_status
            ):
                # the handler ended the transaction, or it has failed, or the handler uses a pipeline of
                # its own: psycopg knows what to do
                return False
            self._pgconn.enter_pipeline_mode()
            self.entered = True
        return True

    def _count(self, size_bytes: int) -> None:
        self.sent += 1
        self.position += 1
        self._unsynced_bytes += _STATEMENT_BYTES + size_bytes

    def _sync(self) -> None:
        """Let the server work, and be idle afterwards, while the handler goes on."""
        pgconn = self._pgconn
        pgconn.pipeline_sync()
        self._syncs += 1
        self._unsynced_bytes = 0
        # a server whose answers are not read would stop
        pgconn.consume_input()
        self.stuck = bool(pgconn.flush())

    def hand_over(self) -> tuple[int, int]:
        """Hand over the outstanding answers to the caller, who collects them; returns how many, and how many syncs."""
        sent, syncs = self.sent, self._syncs
        self.sent = self._syncs = self._unsynced_bytes = 0
        self.entered = self.stuck = False
        return sent, syncs

    def drained(self) -> Any:
        """Return the generator, for `wait`, that collects all answers and keeps the first failure."""
        first = self.position - self.sent
        _, syncs = self.hand_over()
        answers = yield from collected(self._pgconn, syncs)
        for number, answer in enumerate(answers, first):
            if answer.status not in _FINE:
                if self.failure is None:
                    self.failure = psycopg.errors.error_from_result(answer), number
                for plan, types in self._parsed:
                    # a Parse after a failure never ran; one before it is merely prepared again
                    plan.names.pop(types, None)
                break
        self._parsed.clear()


def _int_arrays(params: Any) -> tuple[list[bytes], tuple[int, ...]] | None:
    """Write lists of integers as psycopg does, in a fifth of the time; None unless all parameters are such lists."""
    values: list[bytes] = []
    types: list[int] = []
    for param in params:
        if param.__class__ is not list or set(map(type, param)) != _INTS:
            return None
        # the smallest type that fits the largest number
        largest = max(*param, -min(param) - 1)
        kind = next((oid for bound, oid in _INT_ARRAYS if largest < bound), None)
        if kind is None:
            return None
        types.append(kind)
        values.append(b"{%s}" % ",".join(map(str, param)).encode())
    return (values, tuple(types)) if values else None


class Unread(psycopg.Cursor[Any]):
    """What `execute` returns while deferring. It has no rows, and says so when asked."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        return self.connection.cursor().execute(*args, **kwargs)


class _Deferring:
    """Replaces a connection's `execute` and `wait` while its statements are deferred."""

    def __init__(self, connection: psycopg.Connection[Any], queue: Queue) -> None:
        self._connection = connection
        self._queue = queue

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        if not options:
            with self._connection.lock:
                put = self._queue.put(query, params)
                if self._queue.stuck:
                    self._drain()
            if put:
                return self._queue.unread
        return psycopg.Connection.execute(self._connection, query, params, **options)

    def send(self, statement: Statement) -> bool:
        """See `Queue.send`."""
        with self._connection.lock:
            sent = self._queue.send(statement)
            if self._queue.stuck:
                self._drain()
        return sent

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        if self._queue.entered:
            try:
                self._drain()
            except psycopg.Error:
                gen.close()
                raise
        return psycopg.Connection.wait(self._connection, gen, *args, **kwargs)

    def _drain(self) -> None:
        psycopg.Connection.wait(self._connection, self._queue.drained())
        if self._queue.failure is not None:
            raise self._queue.failure[0]


class _DeferringAsync:
    """`_Deferring` for async connections."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], queue: Queue) -> None:
        self._connection = connection
        self._queue = queue

    async def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        if not options and self._queue.put(query, params):
            if self._queue.stuck:
                await self._drain()
            return self._queue.unread
        return await psycopg.AsyncConnection.execute(self._connection, query, params, **options)

    async def send(self, statement: Statement) -> bool:
        """See `Queue.send`."""
        sent = self._queue.send(statement)
        if self._queue.stuck:
            await self._drain()
        return sent

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        if self._queue.entered:
            try:
                await self._drain()
            except psycopg.Error:
                gen.close()
                raise
        return await psycopg.AsyncConnection.wait(self._connection, gen, *args, **kwargs)

    async def _drain(self) -> None:
        await psycopg.AsyncConnection.wait(self._connection, self._queue.drained())
        if self._queue.failure is not None:
            raise self._queue.failure[0]


def defer(connection: Any, queue: Queue) -> bool:
    """Route a connection's own `execute` and `wait` through the queue until `stop_deferring`.

    Done on the object rather than with a class of ours: any pool's connection will do, and one that defers
    nothing pays nothing. Returns False, without changes, for a connection that overrides these methods
    (for tracing, say).
    """
    kind: Any = connection.__class__
    mine: dict[str, Any] = connection.__dict__
    is_async = issubclass(kind, psycopg.AsyncConnection)
    base: Any = psycopg.AsyncConnection if is_async else psycopg.Connection
    if kind.execute is not base.execute or kind.wait is not base.wait:
        return False
    if "execute" in mine or "wait" in mine:
        return False
    through = _DeferringAsync(connection, queue) if is_async else _Deferring(connection, queue)
    connection.execute, connection.wait = through.execute, through.wait
    return True


def deferring_of(connection: Any) -> Any:
    """Return what defers a connection's statements; None if nothing does."""
    through = getattr(connection.__dict__.get("execute"), "__self__", None)
    return through if isinstance(through, (_Deferring, _DeferringAsync)) else None


def stop_deferring(connection: Any, queue: Queue) -> None:
    """Undo `defer`. A bound method that a handler kept since then goes back to psycopg."""
    queue.over = True
    del connection.execute, connection.wait
