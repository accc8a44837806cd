"""Throw-away servers for tests that stop the database under a running worker."""

from __future__ import annotations

import itertools
import os
from types import TracebackType
from typing import Self

from tests.servers.mariadb import MariaDBServer
from tests.servers.postgresql import PostgreSQLServer
from tests.servers.process import ServerProcess

_numbers = itertools.count(1)


def _fresh_name(kind: str) -> str:
    return f"throwaway-{kind}-{os.getpid()}-{next(_numbers)}"


class _Throwaway(ServerProcess):
    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


class ThrowawayPostgres(_Throwaway, PostgreSQLServer):
    """`with ThrowawayPostgres() as server`: `.url`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. What was committed survives `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("postgresql"), preferred_port=55532)


class ThrowawayMariaDB(_Throwaway, MariaDBServer):
    """`with ThrowawayMariaDB() as server`: `.url`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. What was committed survives `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("mariadb"), preferred_port=53506)
