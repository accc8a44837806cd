"""Operations as generators of steps: what the steps are, and what a connection must do for them.

An operation yields a step and receives its result; it never touches a driver. `txbox.drive` has the
loops that carry steps out.

Source: docs/decisions/0002-steps.md
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from txbox.errors import StoreError

T = TypeVar("T")

Call = Callable[[Any], Any]


class Statement(NamedTuple):
    """One SQL statement with `:name` parameters; `name` is also its crash point."""

    name: str
    sql: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement returned: all rows, and the count of rows it touched."""

    rows: Sequence[Sequence[Any]]
    count: int


class Read(NamedTuple):
    """Read in no transaction but the statement's: one statement and one round trip where the driver can."""

    statement: Statement


class Begin(NamedTuple):
    """Begin a transaction of txbox's own and run statements, in one round trip where the driver can."""

    statements: tuple[Statement, ...] = ()


class Commit(NamedTuple):
    """Run statements and COMMIT unless one fails, in one round trip where the driver can.

    Args:
        then: asked, where the driver can, when the COMMIT has been sent and its answer is still out: what it
            returns is sent behind it, and begun when the COMMIT is done. The answer to that is read when
            this very step is yielded; any other step first rolls back what was begun.
    """

    statements: tuple[Statement, ...] = ()
    then: Callable[[], Begin | None] | None = None


class Rollback(NamedTuple):
    """Roll the transaction back; a connection that cannot is dropped."""


class Discard(NamedTuple):
    """Drop the connection: what its transaction became is not known here."""


class Pipe(NamedTuple):
    """From here to Commit no result is read: a connection that can puts statements off and sends them together."""


class Invoke(NamedTuple):
    """Call user code with the transaction's own driver object, or None outside of one; answers with a list."""

    calls: Sequence[Call]
    timeout_s: float | None = None


class InvokeGroups(NamedTuple):
    """As Invoke, each group between a savepoint and its release; answers with `Progress`.

    On a connection without savepoints it is Invoke: the first error ends the transaction.
    """

    groups: Sequence[Sequence[Call]]
    timeout_s: float | None = None
    piped: bool = False


class Undo(NamedTuple):
    """Roll back to the savepoint of the group that failed."""


class Wait(NamedTuple):
    """Wait outside any transaction, until the future is done or the time is over."""

    timeout_s: float
    until: Future[Any] | None = None


class Raised(Exception):
    """User code raised; `database_error` is the same in txbox's words, if it was one.

    `lost` says that the connection of the transaction is gone; `left`, that this call has ended the
    transaction, which those before it had not.
    """

    def __init__(
        self,
        error: BaseException,
        database_error: StoreError | None,
        lost: bool,
        left: bool = False,
    ) -> None:
        super().__init__(error)
        self.error = error
        self.database_error = database_error
        self.lost = lost
        self.left = left


@dataclass(slots=True)
class Progress:
    """How far groups of calls came: `released` of them are done, the next one is to be rolled back.

    Attributes:
        answers: what the calls of the groups that are done returned, in their order.
        raised: why the next group failed; None when all are done.
        culprit: which call of that group raised; None when that is not known.
    """

    answers: list[Any] = field(default_factory=list[Any])
    released: int = 0
    raised: Raised | None = None
    culprit: int | None = None


Step = (
    Statement
    | Read
    | Begin
    | Commit
    | Rollback
    | Discard
    | Pipe
    | Invoke
    | InvokeGroups
    | Undo
    | Wait
)
Steps = Generator[Step, Any, T]


class Executor(Protocol):
    """A connection in a transaction of the caller's; it executes statements and nothing else."""

    def execute(self, statement: Statement) -> Result: ...


class AsyncExecutor(Protocol):
    """The awaitable twin of `Executor`."""

    async def execute(self, statement: Statement) -> Result: ...


class Connection(Protocol):
    """A connection whose transactions txbox begins and ends.

    Every method raises `StoreError`. `discard` closes at once, without a round trip.
    """

    @property
    def native(self) -> Any: ...
    @property
    def lost(self) -> bool: ...
    def execute(self, statement: Statement) -> Result: ...
    def begin(self, statements: Sequence[Statement]) -> list[Result]: ...
    def commit(self, statements: Sequence[Statement]) -> list[Result]: ...
    def rollback(self) -> None: ...
    def discard(self) -> None: ...
    def translate(self, error: BaseException) -> StoreError | None: ...


class Failed(NamedTuple):
    """A statement that was put off failed; `position` is what `Piping.position` was before it was sent."""

    raised: Raised
    position: int


class Piping(Protocol):
    """A Connection that can put statements off.

    `pipe` begins that; `commit` sends everything with its own statements, and raises `Raised` for what
    failed of the rest. `execute` and `rollback` end it too: what had failed is seen as an aborted transaction.
    """

    @property
    def position(self) -> int | None:
        """How much was sent since `pipe`; None when nothing is put off."""
        ...

    def pipe(self) -> None: ...
    def flush(self) -> Failed | None:
        """Send what was put off, wait for all of it, and end putting off; returns what failed first."""
        ...


class AsyncPiping(Protocol):
    """The awaitable twin of `Piping`."""

    @property
    def position(self) -> int | None: ...
    async def pipe(self) -> None: ...
    async def flush(self) -> Failed | None: ...


class Nesting(Protocol):
    """A Connection with savepoints that the handler's own object knows of."""

    def savepoint(self) -> None: ...
    def release_savepoint(self) -> None: ...
    def rollback_to_savepoint(self) -> None: ...


class AsyncNesting(Protocol):
    """The awaitable twin of `Nesting`."""

    async def savepoint(self) -> None: ...
    async def release_savepoint(self) -> None: ...
    async def rollback_to_savepoint(self) -> None: ...


class Reading(Protocol):
    """A Connection that can read without a transaction of txbox's; the others begin one and commit it."""

    def read(self, statement: Statement) -> Result: ...


class AsyncReading(Protocol):
    """The awaitable twin of `Reading`."""

    async def read(self, statement: Statement) -> Result: ...


class Watching(Protocol):
    """A Connection, sync or async, that knows without a round trip when the transaction it began has ended."""

    def left(self) -> bool: ...


class Chaining(Protocol):
    """A Connection that can send the next BEGIN behind a COMMIT, without waiting in between.

    Whatever `commit_then` raises is about the COMMIT; `rollback` also ends what was begun behind it.
    """

    @property
    def ahead(self) -> Begin | None:
        """What was begun behind the last COMMIT, and has not been waited for."""
        ...

    def commit_then(
        self, statements: Sequence[Statement], then: Callable[[], Begin | None]
    ) -> list[Result]: ...
    def begun(self) -> list[Result]:
        """Wait for what was begun behind the COMMIT; returns, and raises, what `begin` would have."""
        ...


class AsyncChaining(Protocol):
    """The awaitable twin of `Chaining`."""

    @property
    def ahead(self) -> Begin | None: ...
    async def commit_then(
        self, statements: Sequence[Statement], then: Callable[[], Begin | None]
    ) -> list[Result]: ...
    async def begun(self) -> list[Result]: ...


class AsyncConnection(Protocol):
    """The awaitable twin of `Connection`; `discard` and `translate` do no I/O."""

    @property
    def native(self) -> Any: ...
    @property
    def lost(self) -> bool: ...
    async def execute(self, statement: Statement) -> Result: ...
    async def begin(self, statements: Sequence[Statement]) -> list[Result]: ...
    async def commit(self, statements: Sequence[Statement]) -> list[Result]: ...
    async def rollback(self) -> None: ...
    def discard(self) -> None: ...
    def translate(self, error: BaseException) -> StoreError | None: ...


# not isinstance(), which looks at every method of a protocol each time: that costs more than a statement


class Connections(Protocol):
    """Where connections come from and go back to."""

    def acquire(self) -> Connection: ...
    def release(self, connection: Any) -> None: ...


class AsyncConnections(Protocol):
    """The awaitable twin of `Connections`."""

    async def acquire(self) -> AsyncConnection: ...
    async def release(self, connection: Any) -> None: ...


class Crashed(BaseException):
    """Raised by a hook to lose the process at a point; only the test that has set the hook catches it."""


#: Called with "before:<name>" and "after:<name>" around every step; None outside of tests.
crash_point: Callable[[str], None] | None = None


def at(point: str) -> None:
    """Pass a named crash point that is not a step (for instance `received` or `before:ack`)."""
    if crash_point is not None:
        crash_point(point)


def around(statements: Sequence[Statement], first: str, last: str) -> None:
    # statements that share a round trip are passed together: no client can die between them
    if crash_point is not None:
        crash_point(first)
        for statement in statements:
            crash_point(f"{last}:{statement.name}")
