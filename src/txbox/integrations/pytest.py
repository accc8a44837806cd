"""pytest: fixtures for tests of handlers. Installed with txbox; they do nothing until a test asks for one.

    @pytest.fixture
    def txbox_app():  # without it: an App on a SQLite file of the test's, for handlers that the test registers
        from shop import app
        return app

    def test_a_second_copy_is_a_duplicate(txbox_deliver):
        assert txbox_deliver(paid) is Outcome.PROCESSED
        assert txbox_deliver(paid) is Outcome.DUPLICATE

For async handlers and everything else use `txbox.testing` with `txbox_app`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # every pytest that finds txbox installed imports this file
    from txbox.app import App
    from txbox.message import Message
    from txbox.outcome import Outcome
    from txbox.testing import Clock


@pytest.fixture
def txbox_app(tmp_path: Path) -> Iterator[App]:
    """An App on a SQLite file of this test's, with its tables; override it to return yours."""
    from txbox.app import App

    with App(f"sqlite:///{tmp_path / 'txbox.db'}") as app:
        app.init()
        yield app


@pytest.fixture
def txbox_deliver(txbox_app: App) -> Callable[..., Outcome]:
    """`txbox.testing.deliver` for `txbox_app`: takes a message, and `consumer=` and `tx=`."""
    from txbox.testing import deliver

    return partial(deliver, txbox_app)


@pytest.fixture
def txbox_drain(txbox_app: App) -> Callable[..., list[Outcome]]:
    """`txbox.testing.drain` for `txbox_app`: processes what is due in the table."""
    from txbox.testing import drain

    return partial(drain, txbox_app)


@pytest.fixture
def txbox_clock() -> Generator[Clock]:
    """The database's clock, stopped at the start of the test: `txbox_clock.advance(timedelta(minutes=1))`."""
    from txbox.testing import frozen_clock

    with frozen_clock() as clock:
        yield clock


@pytest.fixture
def txbox_crash_everywhere(txbox_app: App) -> Callable[..., dict[str, Outcome]]:
    """Crashes one delivery at each point that a delivery passes, and delivers its message again.

    It takes a function from an id to a message, and `consumer=`. It returns, for each point in its order, how the
    second delivery ended: PROCESSED, or DUPLICATE when the first had committed. Compare then what the handler wrote
    with one effect for each of them, and one more: the delivery by which the points were found.
    """
    from txbox.testing import Crashed, crash_at, crash_points, deliver

    def crash(
        message_of: Callable[[str], Message[Any]], *, consumer: str | None = None
    ) -> dict[str, Outcome]:
        passed = crash_points(txbox_app, message_of("first"), consumer=consumer)
        ended: dict[str, Outcome] = {}
        for point in dict.fromkeys(passed):
            message = message_of(f"crash-{point}")
            with pytest.raises(Crashed), crash_at(point):
                deliver(txbox_app, message, consumer=consumer)
            ended[point] = deliver(txbox_app, message, consumer=consumer)
        return ended

    return crash
