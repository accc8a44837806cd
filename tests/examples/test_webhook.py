"""The example endpoint, as uvicorn serves it."""

from __future__ import annotations

import importlib.util

import pytest

from tests.examples.programs import rows, tables
from tests.support.servers import ROOT
from tests.support.webhook.senders import SECRET, github, serving


def test_webhook_service(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXBOX_DATABASE_URL", postgresql_url)
    monkeypatch.setenv("WEBHOOK_SECRET", SECRET)
    tables(postgresql_url, "CREATE TABLE build (commit_id TEXT)")
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
    assert rows(postgresql_url, "SELECT commit_id FROM build") == [("abc123",)]
