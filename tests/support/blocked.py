"""A connection's coroutine methods as plain calls, for tests that hold one in their hands."""

from __future__ import annotations

import inspect
from typing import Any

from txbox.session import Connections, blocking


class Blocked:
    """A sync connection whose methods return what they come to."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.connection, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *args, **kwargs: blocking(found(*args, **kwargs))


def acquired(connections: Connections | None) -> Blocked:
    """Take a connection; it goes back by `released`."""
    assert connections is not None
    return Blocked(blocking(connections.acquire()))


def released(connections: Connections | None, held: Blocked) -> None:
    """Give a connection back."""
    assert connections is not None
    blocking(connections.release(held.connection))
