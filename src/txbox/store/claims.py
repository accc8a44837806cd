"""Claims: which messages a transaction has won, and the proof at its end that it still holds them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from txbox.session import Statement
from txbox.store.codec import Arrival
from txbox.store.inbox import InboxStore

_NOTHING: dict[str, Any] = {}


class Won(NamedTuple):
    """The outcome of a claim.

    Attributes:
        ids: the ids it won.
        finished: ids it did not win and that are known to be finished, under the same payload.
    """

    ids: set[str]
    finished: Sequence[str] = ()


def claim(
    store: InboxStore,
    consumer: str,
    arrivals: Sequence[Arrival],
    *,
    token: str,
    lock_timeout: timedelta,
    idle_s: float,
    keep: bool,
    wait: timedelta | None = None,
) -> tuple[Statement, ...]:
    """Return the statements that claim ids (each once, sorted by the caller) and arm the guard with `token`.

    Args:
        lock_timeout: the longest wait for an id.
        idle_s: after this long without a statement the server ends the transaction, if it can.
        keep: keep the payload in the row.
        wait: the longest wait for a lock taken by the handler, if the database can limit it and the
            batch can be run again; None for the connection's own setting.
    """
    params: dict[str, Any] = {
        **_bounds(lock_timeout, idle_s),
        "consumer": consumer,
        "token": token,
    }
    if keep:
        statement = store.dialect.statement(
            "claim_kept",
            {**params, "key_id": store.columns.key_id},
            store.columns.whole(arrivals),
        )
    elif len(arrivals) == 1 and (single := store.dialect.queries["claim_single"]):
        # as `Columns.row` has it, without the call: nearly every message comes this way
        arrival, message = arrivals[0], arrivals[0].message
        params |= {
            "message_id": arrival.message_id, "topic": message.topic, "type": message.type, "key": message.key,
            "sequence": message.sequence, "payload_hash": arrival.hash,
        }  # fmt: skip
        # one crash point, whichever form the claim takes; it bounds its wait by itself
        return _armed(store, [Statement("claim", single, params)], token)
    else:
        statement = store.dialect.statement("claim", params, store.columns.slim(arrivals))
    return _bounded(store, statement, token, lock_timeout, wait)


def claim_known(
    store: InboxStore,
    name: Literal["claim_leased", "claim_replay", "claim_rehearsal"],
    consumer: str,
    ids: Sequence[str],
    *,
    token: str,
    lock_timeout: timedelta,
    idle_s: float,
    wait: timedelta | None = None,
    **params: Any,
) -> tuple[Statement, ...]:
    """`claim` for existing rows: leased ones, processed ones that an operator replays, or those of a rehearsal.

    Args:
        params: of `claim_leased`: `lease`, the token they are leased under, and `keep`.

    Guarantee: a leased row that has since been leased to somebody else is not won.
    """
    params |= {**_bounds(lock_timeout, idle_s), "consumer": consumer, "token": token}
    statement = store.dialect.statement(name, params, {"message_id": ids})
    return _bounded(store, statement, token, lock_timeout, wait)


def _bounded(
    store: InboxStore,
    claim: Statement,
    token: str,
    lock_timeout: timedelta,
    wait: timedelta | None = None,
) -> tuple[Statement, ...]:
    dialect = store.dialect
    statements = [claim]
    if not dialect.claim_bounds_wait:
        statements.insert(0, store.bound_lock_timeout(lock_timeout))
    if wait is not None and dialect.has("bound_batch"):
        statements.append(dialect.statement("bound_batch", {"longest_s": wait.total_seconds()}))
    elif dialect.has("restore_lock_timeout"):
        statements.append(dialect.statement("restore_lock_timeout"))
    return _armed(store, statements, token)


def _armed(store: InboxStore, statements: list[Statement], token: str) -> tuple[Statement, ...]:
    """Arm the guard and mark the transaction, where the claim itself has not."""
    queries = store.dialect.queries
    if queries["arm"]:
        statements.append(_guard(store, "arm", token))
    if mark := queries["savepoint_claim"]:
        statements.append(Statement("savepoint_claim", mark, _NOTHING))
    return tuple(statements)


def claimed(
    store: InboxStore, statements: Sequence[Statement], results: Sequence[Any]
) -> Won | None:
    """Return what a claim won, if its own result says so; None means: classify by token."""
    if not store.dialect.returning:
        return None
    for statement, result in zip(statements, results, strict=True):
        if statement.name.startswith("claim"):
            return _won(store, statement, result)
    raise AssertionError("no claim among the statements")


def _won(store: InboxStore, claim: Statement, result: Any) -> Won:
    if not store.dialect.arrays:
        return Won({row[0] for row in result.rows})
    params = claim.params
    asked = params.get("rows.message_id") or (params["message_id"],)
    if "rows.payload_hash" in params:
        # a claim of new ids names those it did not win
        lost = dict(result.rows)
        won = set(asked).difference(lost) if lost else set(asked)
        return Won(won, [message_id for message_id, finished in lost.items() if finished])
    if result.count == len(asked):
        # normally all of them, so their ids need not be read
        return Won(set(asked))
    return Won({row[0] for row in result.rows})


def finds_duplicates(store: InboxStore, arrivals: Sequence[Arrival]) -> bool:
    """Whether `duplicates` is faster than `classify` for these."""
    return len(arrivals) > 1 and store.dialect.has("duplicates")


def duplicates(store: InboxStore, consumer: str, arrivals: Sequence[Arrival]) -> Statement:
    """Return the statement that reads which of these ids are finished, under the same payload."""
    columns: dict[str, list[Any]] = {
        "message_id": [arrival.message_id for arrival in arrivals],
        "payload_hash": [arrival.hash for arrival in arrivals],
    }
    return store.dialect.statement("duplicates", {"consumer": consumer}, columns)


def complete(
    store: InboxStore, consumer: str, ids: Sequence[str], *, token: str, keep: bool
) -> Statement:
    """Return the statement that makes claimed rows `processed` where the claim could not (promise 2.3).

    The caller checks the count: a missing row no longer belongs to this transaction.
    """
    return store.dialect.statement(
        "complete", {"consumer": consumer, "token": token, "keep": keep}, {"message_id": ids}
    )


def close(store: InboxStore, token: str) -> Statement:
    """Return the statement that fails unless this is still the claiming transaction."""
    return _guard(store, "close", token)


def _guard(store: InboxStore, name: Literal["arm", "close"], token: str) -> Statement:
    """A statement of the guard, which on MySQL and MariaDB is a savepoint named after the token."""
    sql = store.dialect.queries[name].replace("[canary]", f"txbox_{token}")
    return Statement(name, sql, {"token": token})


def still_claimed(store: InboxStore, token: str) -> Statement:
    """Return the statement that fails unless this is still the claiming transaction, even one that has failed.

    Only a rollback may follow.
    """
    if store.dialect.has("rollback_to_claim"):
        return store.dialect.statement("rollback_to_claim")
    return close(store, token)


# the same values for every message of a handler
@lru_cache(maxsize=64)
def _bounds(lock_timeout: timedelta, idle_s: float) -> dict[str, str]:
    return {
        "lock_timeout_ms": str(max(1, int(lock_timeout.total_seconds() * 1000))),
        "idle_ms": str(max(1, int(idle_s * 1000))),
    }
