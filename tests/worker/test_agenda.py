"""When the parts of a worker look for work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from tests.support.waiting import DEADLINE_S, eventually
from txbox import App
from txbox.events import ErrorContained, Event
from txbox.worker import agenda as module
from txbox.worker.agenda import Agenda, Run
from txbox.worker.driving import Driver


class Part:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def look(self) -> None:
        self.calls.append("look")

    def expect(self) -> None:
        self.calls.append("expect")

    def due(self) -> None:
        self.calls.append("due")


class Database:
    """Stands for the driver: answers the one query of an agenda, at first with this."""

    def __init__(self, *answer: tuple[str, float]) -> None:
        self._answers = [list(answer)]

    def perform(self, *_: Any, **__: Any) -> list[tuple[str, float]]:
        return self._answers.pop() if self._answers else []


@contextmanager
def at_work(app: App, part: Part, *answer: tuple[str, float]) -> Iterator[Agenda]:
    run = Run(app, lambda _error: None)
    agenda = run.agenda
    agenda._driver = cast("Driver", Database(*answer))
    agenda.parts["billing"] = part
    thread = threading.Thread(target=agenda.run, daemon=True)
    thread.start()
    try:
        yield agenda
    finally:
        run.stopping.set()
        agenda.end()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_now_is_in_this_thread_and_of_several_times_the_earliest_counts(sqlite_url: str) -> None:
    part = Part()
    with App(sqlite_url) as app, at_work(app, part) as agenda:
        agenda.look("billing", 3600.0)
        agenda.look("billing")
        assert part.calls == ["look"]
        agenda.look("of another worker")
        agenda.look("billing", 0.01)
        agenda.look("billing", 3600.0)
        eventually(lambda: part.calls == ["look", "expect"])


def test_what_the_database_says_is_due_is_looked_for_then(sqlite_url: str) -> None:
    part, lane = Part(), threading.Event()
    answer = [("billing", -1.0), ("of another release", -1.0), ("billing", 0.02)]
    with App(sqlite_url) as app, at_work(app, part, *answer) as agenda:
        eventually(lambda: part.calls == ["due", "due"])
        assert set(agenda.late()) <= {"billing", "of another release"}
        agenda.look(lane.set, 0.01)
        assert lane.wait(DEADLINE_S)


def test_what_raises_is_contained_and_called_again(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a lane that found no thread would keep its deliveries."""
    monkeypatch.setattr(module, "_IDLE_S", 0.02)
    events: list[Event] = []
    calls: list[bool] = []

    def wake() -> None:
        calls.append(True)
        if len(calls) == 1:
            raise RuntimeError("can't start new thread")

    with App(sqlite_url, observers=[events.append]) as app, at_work(app, Part()) as agenda:
        agenda.look(wake, 0.001)
        eventually(lambda: len(calls) == 2)
    (contained,) = events
    assert isinstance(contained, ErrorContained)
    assert contained.boundary == "poll"
