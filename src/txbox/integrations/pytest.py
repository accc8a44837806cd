"""pytest: fixtures for tests of handlers. Installed with txbox; they do nothing until a test asks for one.

    @pytest.fixture
    def txbox_app():  # without it: an App on a SQLite file of the test's, for handlers that the test registers
        from shop import app
        return app

    def test_a_second_copy_is_a_duplicate(txbox_deliver):
        assert txbox_deliver(paid) is Outcome.PROCESSED
        assert txbox_deliver(paid) is Outcome.DUPLICATE

For async handlers the fixtures end in `_async`, and what they return is awaited. For everything else use
`txbox.testing` with `txbox_app`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # every pytest that finds txbox installed imports this file
    from txbox.app import App
    from txbox.outcome import Outcome
    from txbox.testing import Clock
    from txbox.testing.proof import Report


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
def txbox_deliver_async(txbox_app: App) -> Callable[..., Coroutine[Any, Any, Outcome]]:
    """`txbox.testing.deliver_async` for `txbox_app`."""
    from txbox.testing import deliver_async

    return partial(deliver_async, txbox_app)


@pytest.fixture
def txbox_drain(txbox_app: App) -> Callable[..., list[Outcome]]:
    """`txbox.testing.drain` for `txbox_app`: processes what is due in the table."""
    from txbox.testing import drain

    return partial(drain, txbox_app)


@pytest.fixture
def txbox_drain_async(txbox_app: App) -> Callable[..., Coroutine[Any, Any, list[Outcome]]]:
    """`txbox.testing.drain_async` for `txbox_app`."""
    from txbox.testing import drain_async

    return partial(drain_async, txbox_app)


@pytest.fixture
def txbox_clock() -> Generator[Clock]:
    """The database's clock, stopped at the start of the test: `txbox_clock.advance(timedelta(minutes=1))`."""
    from txbox.testing import frozen_clock

    with frozen_clock() as clock:
        yield clock


@pytest.fixture
def txbox_prove(txbox_app: App) -> Callable[..., Report]:
    """`txbox.testing.prove` for `txbox_app`: takes messages and `observe=`; `.check()` fails the test."""
    from txbox.testing import prove

    return partial(prove, txbox_app)


@pytest.fixture
def txbox_prove_async(txbox_app: App) -> Callable[..., Coroutine[Any, Any, Report]]:
    """`txbox.testing.prove_async` for `txbox_app`."""
    from txbox.testing import prove_async

    return partial(prove_async, txbox_app)


@pytest.fixture
def txbox_crash_everywhere(txbox_app: App) -> Callable[..., dict[str, Outcome]]:
    """`txbox.testing.crash_everywhere` for `txbox_app`: crashes a delivery at each point, and delivers it again."""
    from txbox.testing import crash_everywhere

    return partial(crash_everywhere, txbox_app)


@pytest.fixture
def txbox_crash_everywhere_async(
    txbox_app: App,
) -> Callable[..., Coroutine[Any, Any, dict[str, Outcome]]]:
    """`txbox.testing.crash_everywhere_async` for `txbox_app`."""
    from txbox.testing import crash_everywhere_async

    return partial(crash_everywhere_async, txbox_app)
