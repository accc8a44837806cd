"""psycopg connections on which a handler's statements are deferred and sent together with close and COMMIT.

A handler that declares `pipeline=True` calls `tx.execute(…)` as usual. While deferring, statements go to
libpq without a cursor and without looking at the socket, both of which cost more than the statement.
Anything else the handler does with the connection first sends what was deferred.

Source: docs/decisions/0023-pipelined-handlers.md
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import PyFormat, Transformer

from txbox.connections.libpq import collected

_PLACEHOLDER = re.compile(r"%(.?)", re.DOTALL)
_FLUSH_EVERY = 32
_INTS = {int}
# the OIDs of int2[], int4[] and int8[]
_INT_ARRAYS = ((2**15, 1005), (2**31, 1007), (2**63, 1016))
# psycopg's own limit on prepared statements per connection
_PLANS_MAX = 100
_IN_TRANSACTION = int(pq.TransactionStatus.INTRANS)
_FINE = (int(pq.ExecStatus.COMMAND_OK), int(pq.ExecStatus.TUPLES_OK))


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
        self._named = 0

    def forget(self) -> None:
        """Forget all plans: the server has deallocated every prepared statement."""
        self._known.clear()

    def find(self, query: str) -> Plan | None:
        """Return the plan of a query with `%s` placeholders; None for queries only psycopg understands."""
        if query in self._known:
            return self._known[query]
        if len(self._known) >= _PLANS_MAX:
            # the handler writes values into its SQL
            return None
        found = _PLACEHOLDER.findall(query)
        numbers = iter(range(1, len(found) + 1))
        sql = _PLACEHOLDER.sub(
            lambda match: f"${next(numbers)}" if match[1] == "s" else match[1], query
        )
        strange = any(placeholder not in ("s", "%") for placeholder in found)
        plan = self._known[query] = None if strange else Plan(sql.encode(), found.count("s"))
        return plan

    def new_name(self) -> bytes:
        self._named += 1
        return b"txbox_handler_%d" % self._named


class Queue:
    """What one handler's transaction has deferred. Nothing here waits.

    Attributes:
        entered: libpq is in pipeline mode, and answers are outstanding.
        sent: how many answers are outstanding.
        position: the number of the next answer, counted from the beginning of the transaction.
        failure: the error of the first statement that failed, and the number of its answer.
        over: nothing more is sent through it.
    """

    def __init__(self, connection: Any, plans: Plans) -> None:
        self._pgconn = connection.pgconn
        self._plans = plans
        self._transformer = Transformer(connection)
        adapters, default = connection.adapters, psycopg.adapters
        self._plain_lists = all(
            adapters.get_dumper(kind, PyFormat.AUTO) is default.get_dumper(kind, PyFormat.AUTO)
            for kind in (int, list)
        )
        self.entered = self.over = False
        self.sent = 0
        self.position = 0
        self.failure: tuple[psycopg.Error, int] | None = None
        self._parsed: list[tuple[Plan, tuple[int, ...]]] = []
        self.unread = Unread(connection)

    def put(self, query: Any, params: Any) -> bool:
        """Send a handler's statement; False leaves it to psycopg."""
        pgconn, plans = self._pgconn, self._plans
        kind: type[Any] = params.__class__
        if query.__class__ is not str or (kind is not tuple and kind is not list):
            return False
        plan = plans.find(query)
        if plan is None or len(params) != len(plan.formats) or not self._may_send():
            return False
        values, types, formats = self._dumped(params, plan)
        if plans.prepare:
            name = plan.names.get(types)
            if name is None:
                name = plan.names[types] = plans.new_name()
                self._parsed.append((plan, types))
                pgconn.send_prepare(name, plan.sql, types)
                self._count()
            pgconn.send_query_prepared(name, values, formats)
        else:
            pgconn.send_query_params(plan.sql, values, types, formats)
        self._count()
        if not self.sent % _FLUSH_EVERY:
            # let the server work while the handler goes on
            pgconn.flush()
        return True

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
        self._count()
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

    def _count(self) -> None:
        self.sent += 1
        self.position += 1

    def left(self) -> int:
        """Hand over the outstanding answers to the caller, who collects them; returns how many."""
        sent, self.sent, self.entered = self.sent, 0, False
        return sent

    def drained(self) -> Any:
        """Return the generator, for `wait`, that collects all answers and keeps the first failure."""
        first = self.position - self.sent
        self.left()
        answers = yield from collected(self._pgconn)
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
        # the smallest type that can hold the largest number
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


class _PutOff:
    """Replaces a connection's `execute` and `wait` while its statements are deferred."""

    def __init__(self, connection: psycopg.Connection[Any], queue: Queue) -> None:
        self._connection = connection
        self._queue = queue

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        if not options:
            with self._connection.lock:
                put = self._queue.put(query, params)
            if put:
                return self._queue.unread
        return psycopg.Connection.execute(self._connection, query, params, **options)

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        connection, queue = self._connection, self._queue
        if queue.entered:
            psycopg.Connection.wait(connection, queue.drained())
            if queue.failure is not None:
                gen.close()
                raise queue.failure[0]
        return psycopg.Connection.wait(connection, gen, *args, **kwargs)


class _PutOffAsync:
    """`_PutOff` for async connections."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], queue: Queue) -> None:
        self._connection = connection
        self._queue = queue

    async def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        if not options and self._queue.put(query, params):
            return self._queue.unread
        return await psycopg.AsyncConnection.execute(self._connection, query, params, **options)

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        connection, queue = self._connection, self._queue
        if queue.entered:
            await psycopg.AsyncConnection.wait(connection, queue.drained())
            if queue.failure is not None:
                gen.close()
                raise queue.failure[0]
        return await psycopg.AsyncConnection.wait(connection, gen, *args, **kwargs)


def put_off(connection: Any, queue: Queue) -> bool:
    """Route a connection's own `execute` and `wait` through the queue until `put_on`.

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
    through = _PutOffAsync(connection, queue) if is_async else _PutOff(connection, queue)
    connection.execute, connection.wait = through.execute, through.wait
    return True


def put_on(connection: Any, queue: Queue) -> None:
    """Undo `put_off`. A bound method that a handler kept since then goes back to psycopg."""
    queue.over = True
    del connection.execute, connection.wait
