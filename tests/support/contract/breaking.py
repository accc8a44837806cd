"""Handlers that break their contract, and by which rule each database and each kind of connection answers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from tests.support.connections import Kind, do
from txbox.store.dialect import Dialect


class Hand:
    """What a handler does with the object that it was given; every verb is awaited, also of sync drivers."""

    def __init__(self, kind: Kind, tx: Any, message_id: str, *, puts_off: bool = False) -> None:
        self.kind = kind
        self.puts_off = puts_off
        self.tx = tx
        self.message_id = message_id

    async def do(self, sql: str) -> None:
        done = do(self.kind.family, self.tx, sql)
        if inspect.isawaitable(done):
            await done

    async def write(self) -> None:
        if self.puts_off:
            # with parameters psycopg's statements are put off where the handler says pipeline=True
            sql = "INSERT INTO effect (message_id, note) VALUES (%s, '')"
            done = self.tx.execute(sql, (self.message_id,))
            if inspect.isawaitable(done):
                await done
            return
        await self.do(f"INSERT INTO effect (message_id, note) VALUES ('{self.message_id}', '')")

    async def commit(self) -> None:
        await self._end("commit")

    async def rollback(self) -> None:
        await self._end("rollback")

    async def close(self) -> None:
        done = self.tx.close()
        if inspect.isawaitable(done):
            await done

    async def fail(self) -> None:
        """A statement that the database refuses."""
        await self.do("INSERT INTO effect (message_id) VALUES (NULL)")

    async def _end(self, verb: str) -> None:
        if self.kind.family == "asyncpg":
            await self.do(verb)  # asyncpg's connections have no such method
        elif self.kind.family == "django":
            getattr(transaction, verb)(using=self.tx.alias)
        else:
            done = getattr(self.tx, verb)()
            if inspect.isawaitable(done):
                await done


async def commits(hand: Hand) -> None:
    await hand.write()
    await hand.commit()


async def commits_then_raises(hand: Hand) -> None:
    await hand.write()
    await hand.commit()
    raise ValueError("after the commit")


async def commits_and_swallows_the_refusal(hand: Hand) -> None:
    await hand.write()
    with contextlib.suppress(Exception):
        await hand.commit()


async def rolls_back(hand: Hand) -> None:
    await hand.write()
    await hand.rollback()


async def rolls_back_and_writes_on(hand: Hand) -> None:
    await hand.rollback()
    await hand.write()


async def sends_commit(hand: Hand) -> None:
    await hand.write()
    await hand.do("COMMIT")


async def sends_rollback(hand: Hand) -> None:
    await hand.write()
    await hand.do("ROLLBACK")


async def escapes(hand: Hand) -> None:
    """A transaction of its own, with the effect in it."""
    await hand.do("ROLLBACK")
    await hand.do("BEGIN")
    await hand.write()
    await hand.do("COMMIT")


async def escapes_then_raises(hand: Hand) -> None:
    await escapes(hand)
    raise ValueError("after the commit of its own")


async def commits_its_own_then_fails(hand: Hand) -> None:
    """The failure aborts a transaction, on PostgreSQL, that is no longer the one that claimed."""
    await hand.rollback()
    await hand.write()
    await hand.commit()
    await hand.fail()


async def escapes_then_fails(hand: Hand) -> None:
    await escapes(hand)
    await hand.do("BEGIN")
    await hand.fail()


async def escapes_then_swallows(hand: Hand) -> None:
    await escapes(hand)
    await hand.do("BEGIN")
    with contextlib.suppress(Exception):
        await hand.fail()


async def fails(hand: Hand) -> None:
    """Allowed: an ordinary failure."""
    await hand.write()
    await hand.fail()


async def fails_in_a_savepoint(hand: Hand) -> None:
    """Allowed: an ordinary failure."""
    await hand.do("SAVEPOINT mine")
    await hand.write()
    await hand.fail()


async def closes_then_raises(hand: Hand) -> None:
    """As psycopg's `with tx:` does around an error."""
    await hand.write()
    await hand.close()
    raise ValueError("after it closed its connection")


async def swallows(hand: Hand) -> None:
    await hand.write()
    with contextlib.suppress(Exception):
        await hand.fail()


async def runs_ddl(hand: Hand) -> None:
    await hand.write()
    await hand.do(f"CREATE TABLE made_{hand.message_id} (id integer)")


async def begins_again(hand: Hand) -> None:
    await hand.write()
    await hand.do("BEGIN")


async def uses_a_savepoint(hand: Hand) -> None:
    """Allowed: what is inside may be undone, the rest stands."""
    await hand.do("SAVEPOINT mine")
    await hand.write()
    await hand.do("ROLLBACK TO SAVEPOINT mine")
    await hand.write()
    await hand.do("RELEASE SAVEPOINT mine")


@dataclass(frozen=True)
class Expected:
    """How a message of a broken handler ends: its row's status, and how often the effect may be there."""

    status: str
    effects: tuple[int, ...]


PROCESSED = Expected("processed", (1,))
FAILED = Expected("failed", (0,))  # retried, since nothing was persisted


def broken(*effects: int) -> Expected:
    """Dead, never retried by itself: what it wrote is unknowable to txbox."""
    return Expected("dead", effects)


def expected_of(kind: Kind, dialect: Dialect, misbehaviour: Misbehaviour) -> Expected:
    """The rule, in the words of promises 2.1 to 2.3.

    1. A database that refuses the commit persists nothing: an ordinary failure. One that cannot
       (MySQL) has committed: dead.
    2. Whoever leaves the claiming transaction by a rollback is dead.
    3. A session's commit() and rollback() end a savepoint only, and Django refuses both.
    4. A statement that failed aborts the transaction on PostgreSQL; elsewhere only the statement is undone.
    5. DDL is a write like any other, where it is transactional; elsewhere it is a commit.
    """
    return misbehaviour.rule(_flavour(kind), kind, dialect)


def _flavour(kind: Kind) -> str:
    if "sessionmaker" in kind.name:
        return "session"
    return "django" if kind.family == "django" else "driver"


Rule = Callable[[str, Kind, Dialect], Expected]


def _committed(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    if flavour == "session":
        return PROCESSED
    if flavour == "django":
        return FAILED
    return _sent_commit(flavour, kind, dialect)


def _sent_commit(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    return FAILED if dialect.refuses_commit else broken(1)


def _committed_then_raised(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    return FAILED if flavour == "session" else _committed(flavour, kind, dialect)


def _refusal_swallowed(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    if flavour in ("session", "django"):
        return PROCESSED
    if not dialect.refuses_commit:
        return broken(1)
    if kind.family == "sqlalchemy" and kind.dialect == "sqlite":
        return FAILED  # SQLAlchemy knows that its transaction has ended; on PostgreSQL close does not ask it
    # a refused COMMIT leaves SQLite's transaction open, with everything in it
    return PROCESSED if kind.dialect == "sqlite" else broken(0)


def _rolled_back(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    if flavour == "session":
        return Expected("processed", (0,))  # the handler undid its own write, and returned
    return FAILED if flavour == "django" else broken(0)


def _wrote_on(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    if flavour == "session":
        return PROCESSED
    # outside of any transaction some drivers commit each statement
    return FAILED if flavour == "django" else broken(0, 1)


def _own_then_failed(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    # a session's ends are those of savepoints, and Django refuses the rollback
    return broken(1) if flavour == "driver" else FAILED


def _closed_then_raised(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    # asyncpg does not tell who closed a connection: it is lost, and its transaction was rolled back
    return FAILED if flavour == "session" or kind.family == "asyncpg" else broken(0)


def _swallowed(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    return FAILED if kind.dialect == "postgresql" else PROCESSED


def _begun_again(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    if not dialect.refuses_commit:
        return broken(1)  # BEGIN commits what is open
    return FAILED if kind.dialect == "sqlite" else PROCESSED  # an error, or a warning


def _ddl(flavour: str, kind: Kind, dialect: Dialect) -> Expected:
    return broken(1) if dialect.name == "mysql" else PROCESSED


@dataclass(frozen=True)
class Misbehaviour:
    run: Callable[[Hand], Awaitable[None]]
    rule: Rule

    @property
    def name(self) -> str:
        return str(getattr(self.run, "__name__", self.run))


MISBEHAVIOURS = (
    Misbehaviour(commits, _committed),
    Misbehaviour(commits_then_raises, _committed_then_raised),
    Misbehaviour(commits_and_swallows_the_refusal, _refusal_swallowed),
    Misbehaviour(rolls_back, _rolled_back),
    Misbehaviour(rolls_back_and_writes_on, _wrote_on),
    Misbehaviour(sends_commit, _sent_commit),
    Misbehaviour(sends_rollback, lambda *_: broken(0)),
    Misbehaviour(escapes, lambda *_: broken(1)),
    Misbehaviour(escapes_then_raises, lambda *_: broken(1)),
    Misbehaviour(commits_its_own_then_fails, _own_then_failed),
    Misbehaviour(escapes_then_fails, lambda *_: broken(1)),
    Misbehaviour(escapes_then_swallows, lambda *_: broken(1)),
    Misbehaviour(fails, lambda *_: FAILED),
    Misbehaviour(fails_in_a_savepoint, lambda *_: FAILED),
    Misbehaviour(closes_then_raises, _closed_then_raised),
    Misbehaviour(swallows, _swallowed),
    Misbehaviour(runs_ddl, _ddl),
    Misbehaviour(begins_again, _begun_again),
    Misbehaviour(uses_a_savepoint, lambda *_: PROCESSED),
)
MODES = ("inline", "retried", "stored")
