"""Throw-away servers for tests that stop the database under a running worker."""

from __future__ import annotations

import itertools
import os
from types import TracebackType
from typing import Self

from tests.servers import mariadb, postgresql

_numbers = itertools.count(1)


def _name(kind: str) -> str:
    return f"throwaway-{kind}-{os.getpid()}-{next(_numbers)}"


class ThrowawayPostgreSQL(postgresql.PostgreSQLServer):
    """`with ThrowawayPostgreSQL() as server`: `.url`, `.stop(immediate=True)`, `.start()`."""

    def __init__(self) -> None:
        super().__init__(_name("postgresql"), preferred_port=55532)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


class ThrowawayMariaDB(mariadb.MariaDBServer):
    """`with ThrowawayMariaDB() as server`: `.url`, `.stop(immediate=True)`, `.start()`."""

    def __init__(self) -> None:
        super().__init__(_name("mariadb"), preferred_port=53506)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()
