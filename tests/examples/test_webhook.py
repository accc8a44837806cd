"""The example endpoint, as uvicorn serves it."""

from __future__ import annotations

import importlib.util
import sqlite3
from contextlib import closing

import pytest

from tests.support.servers import ROOT
from tests.support.webhook.senders import SECRET, github, serving


def test_webhook_service(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXBOX_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("WEBHOOK_SECRET", SECRET)
    path = sqlite_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE build (commit_id TEXT)")
    spec = importlib.util.spec_from_file_location(
        "webhook_service", ROOT / "examples" / "webhook_service.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    body = b'{"after": "abc123"}'
    with serving(module.hook) as endpoint:
        texts = [endpoint.post(github("d1", body), body).text for _ in range(2)]
        assert endpoint.post(github("d2", body, event="star"), body).text == "unmatched"
    assert texts == ["processed", "duplicate"]
    module.app.close()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT commit_id FROM build").fetchall() == [("abc123",)]
