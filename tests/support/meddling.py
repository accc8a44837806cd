"""Sessions whose transactions a test answers itself: another error, or something else that happens meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

from txbox.session import Connections, Operation, P, Session, Statement, Statements, T, blocking

Verb = Literal["begin", "execute", "commit", "rollback"]
#: Gets the verb, its statements, and what carries it out; returns, or raises, what the operation sees.
Meddle = Callable[[Verb, Statements, Callable[[], Awaitable[Any]]], Awaitable[Any]]


class _Meddled(Session):
    def __init__(self, connections: Connections, meddle: Meddle) -> None:
        super().__init__(connections)
        self._meddle = meddle

    async def begin(
        self,
        statements: Statements = (),
        meanwhile: Callable[[], None] | None = None,
        *,
        user_code: bool = False,
    ) -> Any:
        begin = partial(super().begin, statements, meanwhile, user_code=user_code)
        return await self._meddle("begin", statements, begin)

    async def execute(self, statement: Statement) -> Any:
        return await self._meddle("execute", (statement,), partial(super().execute, statement))

    async def commit(self, statements: Statements = (), *, goes_on: bool = False) -> Any:
        commit = partial(super().commit, statements, goes_on=goes_on)
        return await self._meddle("commit", statements, commit)

    async def together(self, statements: Statements) -> Any:
        # in two steps, so that both are met
        results = await self.begin(statements)
        await self.commit()
        return results

    async def rollback(self) -> None:
        await self._meddle("rollback", (), super().rollback)


def drive_meddled(
    connections: Connections,
    meddle: Meddle,
    operation: Operation[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """As `drive`, with every transaction's begin and end answered by `meddle`."""
    db = _Meddled(connections, meddle)
    try:
        return blocking(operation(db, *args, **kwargs))
    finally:
        db.close()
