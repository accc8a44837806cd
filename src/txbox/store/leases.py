"""Leases: rows reserved for a limited time, which are extended, released, or expire; and due rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from txbox.outcome import Status
from txbox.policy import Lease
from txbox.session import Result, Session, Statement, Transaction
from txbox.store.codec import Arrival, Leased
from txbox.store.dialect import Dialect, as_time
from txbox.store.inbox import InboxStore

# for an ordered consumer: how many of the oldest rows are looked at before going from key to key
_WINDOW = 200
# one query in this many also considers rows without a key that are behind those
_LOOKS_PER_KEYLESS = 16


@dataclass(frozen=True, slots=True)
class Rescued:
    """A row whose lease had expired.

    Attributes:
        starts: runs from the table that never ended.
        error_type, error: what was recorded.
    """

    consumer: str
    message_id: str
    topic: str
    starts: int
    dead: bool
    error_type: str
    error: str


async def lease(
    db: Session,
    store: InboxStore,
    consumer: str,
    *,
    token: str,
    limit: int,
    lease: Lease,
    suspect: bool,
    heads_only: bool = False,
    dead_blocks: bool = False,
) -> list[Leased]:
    """Lease due rows in a transaction of its own, oldest due first.

    Args:
        suspect: take rows whose last run never ended; lease those one at a time.
        heads_only: take only the first unfinished row of each key.
        dead_blocks: with `heads_only`, a dead row stays the head of its key.

    Guarantee: the start is counted before a handler runs, so even a message that kills its process
    eventually runs out of starts.
    """
    params: dict[str, Any] = {
        "consumer": consumer,
        "token": token,
        "lease_s": lease.duration.total_seconds(),
    }
    if suspect:
        params |= {"heads_only": heads_only, "dead_blocks": dead_blocks}
        name = "lease_suspect"
    elif heads_only:
        looks, after = store.looks_in_order.get(consumer, (0, ""))
        params |= {
            "dead_blocks": dead_blocks,
            "limit": limit,
            "window": _WINDOW + limit,
            "after": after,
            "keyless": looks % _LOOKS_PER_KEYLESS == 0,
        }
        name = "lease_ordered"
    else:
        params["limit"] = limit
        name = "lease"
    leased = await _leased(db, store, consumer, name, params)
    if not leased and params.get("after"):
        # nothing from there on, so start over at the first key
        leased = await _leased(db, store, consumer, name, params | {"after": ""})
    if heads_only and not suspect:
        _look_on(store, consumer, leased, limit)
    return leased


def _look_on(store: InboxStore, consumer: str, leased: Sequence[Leased], limit: int) -> None:
    """Start the next query at the key where this one ended, so that no key always comes last."""
    looks, _ = store.looks_in_order.get(consumer, (0, ""))
    keys = [row.arrival.message.key for row in leased] if len(leased) == limit else []
    after = max((key for key in keys if key is not None), default="")
    store.looks_in_order[consumer] = looks + 1, after


async def lease_next(
    db: Session,
    store: InboxStore,
    consumer: str,
    key: str,
    *,
    token: str,
    lease: Lease,
    dead_blocks: bool,
) -> Leased | None:
    """Lease the row of a key whose turn it is, if it is due and no earlier run of it is unfinished."""
    params: dict[str, Any] = {"consumer": consumer, "key": key, "token": token}
    params |= {"lease_s": lease.duration.total_seconds(), "dead_blocks": dead_blocks}
    leased = await _leased(db, store, consumer, "lease_next", params)
    return leased[0] if leased else None


async def _leased(
    db: Session, store: InboxStore, consumer: str, name: str, params: dict[str, Any]
) -> list[Leased]:
    """Lease by a query, in a transaction of its own, and read what it leased."""
    if store.columns.codec is None:
        return _read(store, consumer, await store.dialect.take_alone(db, name, params))
    # a codec may raise, for instance while its key service is away: then nothing must be leased, which counts a start
    await db.begin()
    leased = _read(store, consumer, await store.dialect.take(db, name, params))
    # a ROLLBACK would cost the connection its prepared statements when there is nothing to lease
    await db.commit()
    return leased


def storing(
    store: InboxStore, consumer: str, arrivals: Sequence[Arrival], *, token: str, lease: Lease
) -> Statement:
    """Return the statement that inserts messages as `InboxStore.storing` does, leased from the start if possible.

    No other worker ever sees them waiting. Where that takes a second statement, `stored` runs it in the
    same transaction.
    """
    if not store.dialect.has("store_leased"):
        return store.storing(consumer, arrivals, token=token)
    params: dict[str, Any] = {"consumer": consumer, "token": token}
    params |= {"lease_s": lease.duration.total_seconds(), "key_id": store.columns.key_id}
    statement = store.dialect.statement(
        "store_leased", params, store.columns.whole(consumer, arrivals)
    )
    # one crash point, whichever form the storing takes
    return statement._replace(name="store")


async def stored(
    db: Transaction,
    store: InboxStore,
    consumer: str,
    arrivals: Sequence[Arrival],
    result: Result,
    *,
    token: str,
    lease: Lease,
) -> list[Leased]:
    """Return the new messages of `storing`, leased."""
    if not store.dialect.has("store_leased"):
        fresh = await store.stored(db, consumer, arrivals, result, token=token)
        if not fresh:
            return []
        params = {"consumer": consumer, "token": token, "lease_s": lease.duration.total_seconds()}
        rows = {"message_id": sorted(fresh)}
        result = await store.dialect.take(db, "lease_stored", params, rows)
        return _read(store, consumer, result)
    written = {row[0]: row for row in result.rows}
    leased: list[Leased] = []
    for arrival in arrivals:
        if arrival.message_id in written:
            _, received_at, number = written[arrival.message_id]
            message = replace(arrival.message, received_at=as_time(received_at))
            leased.append(
                Leased(replace(arrival, message=message), attempts=0, starts=1, number=number)
            )
    return leased


def _read(store: InboxStore, consumer: str, result: Result) -> list[Leased]:
    rows = (store.columns.arrival(consumer, row) for row in result.rows)
    return sorted(rows, key=lambda leased: leased.number)


async def heartbeat(
    db: Session, store: InboxStore, consumer: str, ids: Sequence[str], *, token: str, lease: Lease
) -> int:
    """Extend the leases of `token`; returns how many. Rows in a handler's transaction are skipped."""
    params = {"consumer": consumer, "token": token, "lease_s": lease.duration.total_seconds()}
    return (await store.dialect.take_alone(db, "heartbeat", params, {"message_id": ids})).count


async def release(
    db: Session, store: InboxStore, consumer: str, ids: Sequence[str], *, token: str, delay_s: float
) -> int:
    """Give leased rows back without counting an attempt, due in `delay_s`; returns how many were still ours.

    Guarantee: fenced by `token`. It waits for a commit in flight, and then matches nothing.
    """
    params = {"consumer": consumer, "token": token, "delay_s": delay_s}
    return (await store.dialect.run(db, "release", params, {"message_id": ids})).count


async def rescue(
    db: Session,
    store: InboxStore,
    *,
    consumer: str | None,
    max_starts: int,
    limit: int,
    dying: Callable[[Session, Sequence[Rescued]], Awaitable[None]] | None = None,
) -> list[Rescued]:
    """Return rows whose lease expired to `failed`, or make them `dead` after too many unfinished runs.

    Args:
        consumer: None for all.
        limit: rows per batch.
        dying: what else must happen in this transaction if rows become dead.

    Guarantee: a batch and its history are one commit. Rows held by a handler's transaction are left
    alone, without waiting for them.
    """
    dialect = store.dialect
    await db.begin()
    params = {"consumer": consumer, "max_starts": max_starts, "limit": limit}
    expired = await dialect.take(db, "rescue", params)
    rescued: list[Rescued] = []
    for name, message_id, topic, starts, status, attempts, error_type, error in expired.rows:
        row = Rescued(name, message_id, topic, starts, status == Status.DEAD, error_type, error)
        rescued.append(row)
        await db.execute(
            store.attempt(
                name,
                message_id,
                attempts,
                status=status,
                error_type=error_type,
                error=error,
                fingerprint=None,
            )
        )
    given_up = [row for row in rescued if row.dead]
    if dying is not None and given_up:
        await dying(db, given_up)
    if dialect.has("rescue_broken"):
        await db.execute(dialect.statement("rescue_broken", {"consumer": consumer, "limit": limit}))
    await db.commit()
    return rescued


# -- what there is to lease -------------------------------------------------------------------


async def due(
    db: Session,
    dialect: Dialect,
    consumers: Sequence[str],
    *,
    ahead_s: float,
    routes: Sequence[str],
    local: str | None = None,
) -> list[tuple[str, float]]:
    """Return which consumers have rows due within `ahead_s`, and in how many seconds the first is due.

    Args:
        consumers: one or more.
        routes: outbox routes, reported together under the empty name.
        local: which of these routes leads to the App's own consumers, if any.

    Guarantee: one statement without writes or locks. The answer is a hint; leases decide.
    """
    # columns of equal length: a NULL route matches nothing, and a repeated consumer only repeats its answer
    columns: dict[str, list[str | None]] = {
        "consumer": [*consumers, *list(consumers[:1]) * (len(routes) - len(consumers))],
        "route": [*routes, *[None] * (len(consumers) - len(routes))],
    }
    result = await db.alone(dialect.statement("due", {"ahead_s": ahead_s, "local": local}, columns))
    return [(str(consumer), float(in_s)) for consumer, in_s in result.rows]


async def work_left(
    db: Session, dialect: Dialect, *, consumer: str, order: tuple[bool, bool] = (False, False)
) -> bool:
    """Whether a consumer has rows that are due now, or leased by anybody.

    Args:
        order: whether only the heads of keys run, and whether dead rows stay heads.
    """
    heads_only, dead_blocks = order
    if heads_only:
        params = {"consumer": consumer, "dead_blocks": dead_blocks}
        result = await dialect.run(db, "work_left_ordered", params)
    else:
        result = await dialect.run(db, "work_left", {"consumer": consumer})
    return bool(result.rows[0][0])
