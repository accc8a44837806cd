"""Claims: what a transaction has won to itself, and the proof at its end that it still has it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from txbox.steps import Statement
from txbox.store.codec import Arrival
from txbox.store.inbox import InboxStore


class Won(NamedTuple):
    """What a claim has come to.

    Attributes:
        ids: what it won.
        finished: of the others those that are known to be finished, under the same payload.
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
    """Statements that claim ids (sorted by the caller, each once) and arm the guard with `token`.

    Args:
        lock_timeout: the longest wait for an id.
        idle_s: after this time without a statement the server ends the transaction, where it can.
        keep: the payload stays in the row.
        wait: the longest wait for a lock of the handler's, where the database can bound it and a
            batch can be run again; None for the connection's own.
    """
    params = {**_bounds(lock_timeout, idle_s), "consumer": consumer, "token": token}
    if keep:
        statement = store.dialect.statement(
            "claim_kept",
            {**params, "key_id": store.columns.key_id},
            store.columns.whole(arrivals),
        )
    elif len(arrivals) == 1 and store.dialect.has("claim_single"):
        params.update(store.columns.single(arrivals[0]))
        # one crash point, whichever form the claim takes
        claimed = Statement("claim", store.dialect.queries["claim_single"], params)
        return (claimed, store.dialect.statement("savepoint_claim"))
    else:
        statement = store.dialect.statement("claim", params, store.columns.slim(arrivals))
    return _bounded(store, statement, token, lock_timeout, wait)


def claim_leased(
    store: InboxStore,
    consumer: str,
    ids: Sequence[str],
    *,
    token: str,
    lease: str,
    lock_timeout: timedelta,
    idle_s: float,
    keep: bool,
    wait: timedelta | None = None,
) -> tuple[Statement, ...]:
    """As `claim`, for rows leased under the token `lease`.

    Guarantee: the fence: a row whose lease was given to another is not won.
    """
    params = {
        **_bounds(lock_timeout, idle_s),
        "consumer": consumer,
        "token": token,
        "lease": lease,
        "keep": keep,
    }
    statement = store.dialect.statement("claim_leased", params, {"message_id": ids})
    return _bounded(store, statement, token, lock_timeout, wait)


def claim_replay(
    store: InboxStore,
    consumer: str,
    ids: Sequence[str],
    *,
    token: str,
    lock_timeout: timedelta,
    idle_s: float,
) -> tuple[Statement, ...]:
    """As `claim`, for processed rows that an operator replays."""
    params = {**_bounds(lock_timeout, idle_s), "consumer": consumer, "token": token}
    statement = store.dialect.statement("claim_replay", params, {"message_id": ids})
    return _bounded(store, statement, token, lock_timeout)


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
    if dialect.has("arm"):
        statements.append(dialect.statement("arm", {"token": token}, canary=token))
    if dialect.has("savepoint_claim"):
        statements.append(dialect.statement("savepoint_claim"))
    return tuple(statements)


def claimed(
    store: InboxStore, statements: Sequence[Statement], results: Sequence[Any]
) -> Won | None:
    """What a claim has won, where its own answer says so; else None: classify by token."""
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
        # a claim of new ones names what it has not won
        lost = dict(result.rows)
        won = set(asked).difference(lost) if lost else set(asked)
        return Won(won, [message_id for message_id, finished in lost.items() if finished])
    if result.count == len(asked):
        # all of them, as is the rule: their ids need not be read
        return Won(set(asked))
    return Won({row[0] for row in result.rows})


def finds_duplicates(store: InboxStore, arrivals: Sequence[Arrival]) -> bool:
    """Say whether `duplicates` is quicker than `classify` for these."""
    return len(arrivals) > 1 and store.dialect.has("duplicates")


def duplicates(store: InboxStore, consumer: str, arrivals: Sequence[Arrival]) -> Statement:
    """The statement that reads which of these ids are finished, under the same payload."""
    columns: dict[str, list[Any]] = {
        "message_id": [arrival.message_id for arrival in arrivals],
        "payload_hash": [arrival.hash for arrival in arrivals],
    }
    return store.dialect.statement("duplicates", {"consumer": consumer}, columns)


def complete(
    store: InboxStore, consumer: str, ids: Sequence[str], *, token: str, keep: bool
) -> Statement:
    """The statement that makes claimed rows `processed` where the claim could not (SEMANTICS 2.3).

    Its caller checks the count: a row less is no longer this transaction's.
    """
    return store.dialect.statement(
        "complete", {"consumer": consumer, "token": token, "keep": keep}, {"message_id": ids}
    )


def close(store: InboxStore, token: str) -> Statement:
    """The statement that fails unless this is still the claiming transaction."""
    return store.dialect.statement("close", {"token": token}, canary=token)


def still_claimed(store: InboxStore, token: str) -> Statement:
    """The statement that fails unless this is still the claiming transaction, failed or not.

    Nothing but a rollback may follow.
    """
    if store.dialect.has("rollback_to_claim"):
        return store.dialect.statement("rollback_to_claim")
    return close(store, token)


# the same two for every message of a handler
@lru_cache(maxsize=64)
def _bounds(lock_timeout: timedelta, idle_s: float) -> dict[str, str]:
    return {
        "lock_timeout_ms": str(max(1, int(lock_timeout.total_seconds() * 1000))),
        "idle_ms": str(max(1, int(idle_s * 1000))),
    }
