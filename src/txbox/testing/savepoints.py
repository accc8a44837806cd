"""Connections whose transactions are savepoints of a transaction that somebody else owns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from txbox.connections.base import (
    CallersAsyncConnection,
    CallersConnection,
    dbapi_error,
    handler_left,
)
from txbox.errors import Fault, StoreError
from txbox.steps import AsyncConnection, Connection, Raised, Result, Statement
from txbox.store.dialect import Dialect

_DRIVERS = frozenset({"psycopg", "asyncpg", "sqlite3", "aiosqlite", "pymysql", "asyncmy"})

# what is sent behind a handler that raised, to a savepoint that the session's own is in; MySQL's close goes to one
_BEHIND_A_FAILURE = frozenset({"close", "rollback_to_claim"})

_numbers = itertools.count(1)


class Savepoints:
    """Lends the one connection it has."""

    def __init__(self, tx: Any, lent: CallersConnection) -> None:
        self._tx = tx
        self._lent = lent

    def acquire(self) -> Connection:
        return _Savepoint(self._tx, self._lent)

    def release(self, connection: Any) -> None:
        """Keep the connection: it is the test's."""


class AsyncSavepoints:
    """The awaitable twin of `Savepoints`."""

    def __init__(self, tx: Any, lent: CallersAsyncConnection) -> None:
        self._tx = tx
        self._lent = lent
        self._last: _AsyncSavepoint | None = None

    async def acquire(self) -> AsyncConnection:
        await self.settle()
        self._last = _AsyncSavepoint(self._tx, self._lent)
        return self._last

    async def release(self, connection: Any) -> None:
        """Keep the connection: it is the test's."""

    async def settle(self) -> None:
        """Undo what was discarded: discarding awaits nothing."""
        last, self._last = self._last, None
        if last is not None and last.discarded:
            await last.undo()


class _Named:
    """The savepoint's name, and what errors mean."""

    def __init__(self, tx: Any, dialect: Dialect) -> None:
        self.native = tx
        self.lost = False
        self._dialect = dialect
        self._name: str | None = None
        # SQLAlchemy keeps its own account of savepoints: a session's objects expire with them
        self._nests = hasattr(tx, "begin_nested")
        self._is_session = hasattr(tx, "flush")
        self._nested: Any = None
        # a flush that fails ends the innermost savepoint: not the one that the claim is in
        self._inner: Any = None
        self._claims = False

    def _note(self, statements: Sequence[Statement]) -> None:
        self._claims = any(statement.name.startswith("claim") for statement in statements)

    def _found_nothing(self, statements: Sequence[Statement]) -> bool:
        # a claim without a close wrote nothing, but it armed the guard: that must be undone, since
        # the transaction around it goes on
        return self._claims and not statements

    def _opening(self) -> Statement:
        # numbered: MySQL replaces a savepoint of the same name, and a handler may deliver in turn
        self._name = f"txbox_inside_{next(_numbers)}"
        return Statement("savepoint", f"SAVEPOINT {self._name}", {})

    def _releasing(self) -> Statement:
        return Statement("release_savepoint", f"RELEASE SAVEPOINT {self._name}", {})

    def _undoing(self) -> Statement:
        return Statement("rollback_to_savepoint", f"ROLLBACK TO SAVEPOINT {self._name}", {})

    def _check_nested(self) -> None:
        if self._nests and not self._nested.is_active:
            raise handler_left("it ended the savepoint around it")
        if self._inner is not None and not self._inner.is_active:
            raise StoreError(
                "The session needs a rollback: the handler caught the error of a flush.",
                fault=Fault.ABORTED,
            )

    def _failed(self, error: Exception) -> Raised:
        # a flush that the session put off until now is the handler's
        return Raised(error, self.translate(error), self.lost)

    def _gone(self, error: StoreError) -> StoreError:
        self._name = None
        if error.fault is Fault.UNAVAILABLE:
            self.lost = True
            return error
        return handler_left("the savepoint around it is gone")

    def translate(self, error: BaseException) -> StoreError | None:
        """Put a driver's error into txbox's words; None when it is none."""
        cause = getattr(error, "orig", None) or error
        if type(cause).__module__.partition(".")[0] not in _DRIVERS:
            return None
        return dbapi_error(cause, self._dialect)


class _Savepoint(_Named):
    def __init__(self, tx: Any, lent: CallersConnection) -> None:
        super().__init__(tx, lent.dialect)
        self._lent = lent

    def execute(self, statement: Statement) -> Result:
        if self._inner is not None and statement.name in _BEHIND_A_FAILURE:
            # it would take this savepoint from under the session
            inner, self._inner = self._inner, None
            inner.rollback()
        return self._lent.execute(statement)

    def begin(self, statements: Sequence[Statement]) -> list[Result]:
        if self._nests:
            self._nested = self.native.begin_nested()
            if self._is_session:
                # a session sends its SAVEPOINT when it is first asked for the connection
                self.native.connection()
        else:
            self.execute(self._opening())
        self._note(statements)
        results = [self.execute(statement) for statement in statements]
        if self._is_session:
            self._inner = self.native.begin_nested()
        return results

    def commit(self, statements: Sequence[Statement]) -> list[Result]:
        self._check_nested()
        if self._found_nothing(statements):
            self.rollback()
            return []
        if self._is_session:
            inner, self._inner = self._inner, None
            try:
                inner.commit()
            except Exception as error:
                raise self._failed(error) from error
        results = [self.execute(statement) for statement in statements]
        if self._nests:
            nested, self._nested = self._nested, None
            nested.commit()
            return results
        try:
            self.execute(self._releasing())
        except StoreError as error:
            raise self._gone(error) from error
        self._name = None
        return results

    def rollback(self) -> None:
        nested, self._nested, self._inner = self._nested, None, None
        if nested is not None and nested.is_active:
            nested.rollback()
        if self._name is None:
            return
        try:
            self.execute(self._undoing())
            self.execute(self._releasing())
        except StoreError as error:
            raise self._gone(error) from error
        self._name = None

    def discard(self) -> None:
        try:
            self.rollback()
        except StoreError:
            # the transaction around it is gone as well: nothing is left to undo
            self._name = None


class _AsyncSavepoint(_Named):
    def __init__(self, tx: Any, lent: CallersAsyncConnection) -> None:
        super().__init__(tx, lent.dialect)
        self._lent = lent
        self.discarded = False

    async def execute(self, statement: Statement) -> Result:
        if self._inner is not None and statement.name in _BEHIND_A_FAILURE:
            # it would take this savepoint from under the session
            inner, self._inner = self._inner, None
            await inner.rollback()
        return await self._lent.execute(statement)

    async def begin(self, statements: Sequence[Statement]) -> list[Result]:
        if self._nests:
            self._nested = await self.native.begin_nested()
            if self._is_session:
                await self.native.connection()
        else:
            await self.execute(self._opening())
        self._note(statements)
        results = [await self.execute(statement) for statement in statements]
        if self._is_session:
            self._inner = await self.native.begin_nested()
        return results

    async def commit(self, statements: Sequence[Statement]) -> list[Result]:
        self._check_nested()
        if self._found_nothing(statements):
            await self.rollback()
            return []
        if self._is_session:
            inner, self._inner = self._inner, None
            try:
                await inner.commit()
            except Exception as error:
                raise self._failed(error) from error
        results = [await self.execute(statement) for statement in statements]
        if self._nests:
            nested, self._nested = self._nested, None
            await nested.commit()
            return results
        try:
            await self.execute(self._releasing())
        except StoreError as error:
            raise self._gone(error) from error
        self._name = None
        return results

    async def rollback(self) -> None:
        nested, self._nested, self._inner = self._nested, None, None
        if nested is not None and nested.is_active:
            await nested.rollback()
        if self._name is None:
            return
        try:
            await self.execute(self._undoing())
            await self.execute(self._releasing())
        except StoreError as error:
            raise self._gone(error) from error
        self._name = None

    async def undo(self) -> None:
        try:
            await self.rollback()
        except StoreError:
            self._name = None

    def discard(self) -> None:
        self.discarded = True
