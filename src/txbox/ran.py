"""How a transaction around a handler ended, and how that is read from an error (SEMANTICS 2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from txbox.errors import Fault, StoreError
from txbox.steps import Raised
from txbox.store.dialect import Dialect
from txbox.store.failures import Failure
from txbox.store.inbox import Existing


class End(Enum):
    """How a transaction around a handler ended."""

    COMMITTED = "committed"
    RAISED = "raised"  # the handler, or the database on its behalf: rolled back
    BROKEN = "broken"  # the handler left the claiming transaction
    CONFLICT = "conflict"  # deadlock or serialization failure: rolled back
    LOCKED = "locked"  # another transaction holds an id
    LOST = "lost"  # the connection is gone before COMMIT was sent: rolled back by the server
    AMBIGUOUS = "ambiguous"  # the COMMIT may have taken effect
    REFUSED = (
        "refused"  # the server answered COMMIT with an error: it failed, if the next claim wins
    )
    WAITS = "waits"  # earlier messages of its key come first: nothing ran


class Recorded(NamedTuple):
    """A failure that is part of its batch's transaction."""

    failure: Failure
    dead: bool
    attempt: int


# the bare types, by names that are typed: `set[str]()` takes six times as long, and one transaction needs seven
_ids: type[set[str]] = set
_by_id: Any = dict
_ids_in_order: type[list[str]] = list


@dataclass(slots=True)
class Ran:
    """A transaction that has ended, and what it met."""

    end: End
    fresh: set[str] = field(default_factory=_ids)
    existing: dict[str, Existing] = field(default_factory=_by_id)
    error: BaseException | None = None
    store: StoreError | None = None
    #: The ids that must wait.
    waiting: set[str] = field(default_factory=_ids)
    #: The version that was expected instead of this one, when it was not waited for any longer.
    gap: int | None = None
    #: What the handler returned, for each id, where it is kept.
    results: dict[str, bytes] = field(default_factory=_by_id)
    #: The rows as they were recorded in this transaction, of messages whose handler failed under a savepoint.
    failed: dict[str, Recorded] = field(default_factory=_by_id)
    #: The ids the handler was called for, in their order; may repeat.
    called: list[str] = field(default_factory=_ids_in_order)
    #: What a BROKEN transaction leaves unknown: who was called when, or after, it was left.
    unknown: set[str] = field(default_factory=_ids)
    #: Several ids were asked for, whatever was won: locks are waited for shortly.
    together: bool = False
    #: When the claim was answered, by `time.monotonic`.
    claimed_at: float = 0.0


def end_of_handler(raised: Raised, *, together: bool) -> End:
    """How a transaction ends whose handler raised."""
    fault = raised.store.fault if raised.store else None
    if fault is Fault.UNAVAILABLE and raised.lost:
        return End.LOST
    # a batch waits shorter for a lock than a message alone, which the handler need not know
    if fault in (Fault.CONFLICT, Fault.PREPARED) or (together and fault is Fault.LOCK_TIMEOUT):
        return End.CONFLICT
    return End.RAISED


def end_of_commit(error: StoreError) -> End:
    """How a transaction ends whose close or COMMIT failed."""
    if not error.definite:
        # what a pooler or a server that goes away says is about the connection
        answered = error.code is not None and error.fault is not Fault.UNAVAILABLE
        return End.REFUSED if answered else End.AMBIGUOUS
    if error.fault is Fault.GUARD:
        return End.BROKEN
    # psycopg deallocates txbox's statements with its own when a savepoint of the handler's is rolled back
    if error.fault in (Fault.CONFLICT, Fault.PREPARED):
        return End.CONFLICT
    if error.fault is Fault.UNAVAILABLE:
        return End.LOST
    return End.RAISED


def refused(dialect: Dialect, raised: Raised) -> bool:
    """A COMMIT that the database refused has persisted nothing: an ordinary failure (SEMANTICS 2.1)."""
    return raised.store is not None and raised.store.fault is Fault.GUARD and dialect.refuses_commit
