"""The alert that the outbox cannot carry: that the database is away."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.support.proxy import Proxy
from tests.support.recording import Recorder
from tests.support.shop import opened
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, Message
from txbox.alerts import Alerts
from txbox.errors import BrokerError
from txbox.worker import pulse

AFTER = timedelta(seconds=0.5)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 0.05)
    monkeypatch.setattr(pulse, "_WATCH_S", 0.02)


@pytest.mark.parametrize("kind", ["run", "relay"])
def test_a_database_that_does_not_answer_is_told_past_it_and_that_it_is_back(
    postgresql_url: str, kind: Any
) -> None:
    refused = [BrokerError("not now")]
    recorder = Recorder(lambda _message: refused.pop() if refused else None)
    with (
        Proxy(postgresql_url) as proxy,
        opened(postgresql_url),
        App(proxy.url, alerts=Alerts(recorder, after=AFTER)) as app,
    ):

        @app.handler("orders", consumer="billing")
        def handle(message: Message[Any], tx: Any) -> None: ...

        with running(worker(app, kind=kind)):
            eventually(lambda: app.pauses.wake is not None, "the pulse")
            proxy.hang()
            eventually(lambda: recorder.bodies, "the alert")
            proxy.go_on()
            eventually(lambda: len(recorder.bodies) > 1, "the end of it")
    # a busy machine may be slow enough to be told again
    away, back = recorder.bodies[:2]
    assert (away["code"], away["state"], back["state"]) == ("database-away", "open", "resolved")
    assert away["key"] == back["key"]
    assert "has not answered for" in away["summary"]
    assert len(recorder.calls) > len(recorder.bodies), "what was refused is tried again"
