"""Leases: rows taken from the table for a time; extended, given back, or run out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from txbox.outcome import Status
from txbox.policy import Lease
from txbox.steps import Begin, Commit, Result, Statement, Steps
from txbox.store.codec import Arrival, Leased
from txbox.store.dialect import as_time
from txbox.store.inbox import InboxStore

# of an ordered consumer: how many of the oldest rows a look goes through before it goes from key to key
_WINDOW = 200
# one look in so many also asks for rows without a key that are behind those
_LOOKS_PER_KEYLESS = 16


@dataclass(frozen=True, slots=True)
class Rescued:
    """A row whose lease had run out.

    Attributes:
        starts: runs from the table that never ended.
        error_type, error: what was recorded of it.
    """

    consumer: str
    message_id: str
    topic: str
    starts: int
    dead: bool
    error_type: str
    error: str


def lease(
    store: InboxStore,
    consumer: str,
    *,
    token: str,
    limit: int,
    lease: Lease,
    suspect: bool,
    heads_only: bool = False,
    dead_blocks: bool = False,
) -> Steps[list[Leased]]:
    """Lease due rows in a transaction of its own, oldest due first.

    Args:
        suspect: take rows whose last run never ended; lease those one at a time.
        heads_only: of each key take only the first row that is unfinished.
        dead_blocks: with `heads_only`, a dead row stays the head of its key.

    Guarantee: the start is counted before a handler runs, so a message that kills its process
    still runs out of starts.
    """
    lease_s = lease.duration.total_seconds()
    params: dict[str, Any] = {"consumer": consumer, "token": token, "lease_s": lease_s}
    if suspect:
        params |= {"heads_only": heads_only, "dead_blocks": dead_blocks}
        statement = store.dialect.statement("lease_suspect", params)
    elif heads_only:
        looks, after = store.looks_in_order.get(consumer, (0, ""))
        params |= {
            "dead_blocks": dead_blocks,
            "limit": limit,
            "window": _WINDOW + limit,
            "after": after,
            "keyless": looks % _LOOKS_PER_KEYLESS == 0,
        }
        statement = store.dialect.statement("lease_ordered", params)
    else:
        statement = store.dialect.statement("lease", params | {"limit": limit})
    yield Begin()
    result = yield statement
    if not result.rows and params.get("after"):
        # nothing from there on: from the first key
        result = yield store.dialect.statement("lease_ordered", params | {"after": ""})
    if not result.rows:
        leased: list[Leased] = []
    else:
        leased = yield from _taken(store, consumer, result.rows, token, lease_s)
    # a ROLLBACK where there is nothing would cost the connection its prepared statements
    yield Commit()
    if heads_only and not suspect:
        _look_on(store, consumer, leased, limit)
    return leased


def _look_on(store: InboxStore, consumer: str, leased: Sequence[Leased], limit: int) -> None:
    """Have the next look at the keys begin where this one ended, so that none of them is always last."""
    looks, _ = store.looks_in_order.get(consumer, (0, ""))
    keys = [row.arrival.message.key for row in leased] if len(leased) == limit else []
    after = max((key for key in keys if key is not None), default="")
    store.looks_in_order[consumer] = looks + 1, after


def lease_next(
    store: InboxStore, consumer: str, key: str, *, token: str, lease: Lease, dead_blocks: bool
) -> Steps[Leased | None]:
    """Lease the row of a key whose turn it is, where it is due and no run of it was left unended."""
    lease_s = lease.duration.total_seconds()
    yield Begin()
    result = yield store.dialect.statement(
        "lease_next",
        {
            "consumer": consumer,
            "key": key,
            "token": token,
            "lease_s": lease_s,
            "dead_blocks": dead_blocks,
        },
    )
    if not result.rows:
        yield Commit()
        return None
    (leased,) = yield from _taken(store, consumer, result.rows, token, lease_s)
    yield Commit()
    return leased


def storing(
    store: InboxStore, consumer: str, arrivals: Sequence[Arrival], *, token: str, lease: Lease
) -> Statement:
    """The statement that inserts messages as `InboxStore.storing` does, where it can be leased from the start.

    Nobody else ever sees them waiting: what it leaves out, `stored` does in the same transaction.
    """
    if not store.dialect.has("store_leased"):
        return store.storing(consumer, arrivals, token=token)
    statement = store.dialect.statement(
        "store_leased",
        {
            "consumer": consumer,
            "token": token,
            "lease_s": lease.duration.total_seconds(),
            "key_id": store.columns.key_id,
        },
        store.columns.whole(arrivals),
    )
    # one crash point, whichever form the storing takes
    return statement._replace(name="store")


def stored(
    store: InboxStore,
    consumer: str,
    arrivals: Sequence[Arrival],
    result: Result,
    *,
    token: str,
    lease: Lease,
) -> Steps[list[Leased]]:
    """The messages that `storing` found to be new, leased."""
    if not store.dialect.has("store_leased"):
        fresh = yield from store.stored(consumer, arrivals, result, token=token)
        if not fresh:
            return []
        return (yield from _lease_stored(store, consumer, sorted(fresh), token=token, lease=lease))
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


def _lease_stored(
    store: InboxStore, consumer: str, ids: Sequence[str], *, token: str, lease: Lease
) -> Steps[list[Leased]]:
    lease_s = lease.duration.total_seconds()
    result = yield store.dialect.statement(
        "lease_stored",
        {"consumer": consumer, "token": token, "lease_s": lease_s},
        {"message_id": ids},
    )
    return (yield from _taken(store, consumer, result.rows, token, lease_s))


def _taken(
    store: InboxStore, consumer: str, rows: Sequence[Any], token: str, lease_s: float
) -> Steps[list[Leased]]:
    if store.dialect.has("lease_take"):
        yield store.dialect.statement(
            "lease_take",
            {"consumer": consumer, "token": token, "lease_s": lease_s},
            {"message_id": [row[0] for row in rows]},
        )
    return sorted(
        (store.columns.arrival(consumer, row) for row in rows), key=lambda leased: leased.number
    )


def heartbeat(
    store: InboxStore, consumer: str, ids: Sequence[str], *, token: str, lease: Lease
) -> Steps[int]:
    """Extend leases held under `token`; returns how many (those in a handler's transaction are skipped)."""
    yield Begin()
    result = yield store.dialect.statement(
        "heartbeat",
        {"consumer": consumer, "token": token, "lease_s": lease.duration.total_seconds()},
        {"message_id": ids},
    )
    if store.dialect.has("heartbeat_take") and result.rows:
        result = yield store.dialect.statement(
            "heartbeat_take",
            {"consumer": consumer, "lease_s": lease.duration.total_seconds()},
            {"message_id": [row[0] for row in result.rows]},
        )
    yield Commit()
    return int(result.count)


def release(
    store: InboxStore, consumer: str, ids: Sequence[str], *, token: str, delay_s: float
) -> Steps[int]:
    """Give leased rows back without an attempt, due in `delay_s`; returns how many were still ours.

    Guarantee: fenced by `token`; it waits for a commit in flight, and then matches nothing.
    """
    yield Begin()
    result = yield store.dialect.statement(
        "release",
        {"consumer": consumer, "token": token, "delay_s": delay_s},
        {"message_id": ids},
    )
    yield Commit()
    return int(result.count)


def rescue(
    store: InboxStore,
    *,
    consumer: str | None,
    max_starts: int,
    limit: int,
    dying: Callable[[Rescued], Steps[None]] | None = None,
) -> Steps[list[Rescued]]:
    """Put rows whose lease ran out back to `failed`, or to `dead` when too many runs never ended.

    Args:
        consumer: None for all.
        limit: rows of one batch.
        dying: what else belongs into this transaction when a row becomes dead.

    Guarantee: a batch is one commit with its history; rows that a handler's transaction holds are
    left alone, without waiting.
    """
    dialect = store.dialect
    yield Begin()
    params = {"consumer": consumer, "max_starts": max_starts, "limit": limit}
    rows = list((yield dialect.statement("rescue", params)).rows)
    if rows and dialect.has("rescue_take"):
        yield dialect.statement(
            "rescue_take",
            {"max_starts": max_starts},
            {"consumer": [row[0] for row in rows], "message_id": [row[1] for row in rows]},
        )
    rescued: list[Rescued] = []
    for name, message_id, topic, starts, status, attempts, error_type, error in rows:
        row = Rescued(name, message_id, topic, starts, status == Status.DEAD, error_type, error)
        rescued.append(row)
        yield store.attempt(
            name,
            message_id,
            attempts,
            status=status,
            error_type=error_type,
            error=error,
            fingerprint=None,
        )
        if dying is not None and row.dead:
            yield from dying(row)
    if dialect.has("rescue_broken"):
        yield dialect.statement("rescue_broken", {"consumer": consumer, "limit": limit})
    yield Commit()
    return rescued
