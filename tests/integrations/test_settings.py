"""An App from environment variables: nested policies, secrets that are not shown, mistakes that end the program."""

from __future__ import annotations

from datetime import time, timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from txbox import ConfigurationError
from txbox.integrations.settings import Settings

URL = "postgresql://shop:s3cret@db/shop"


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("TXBOX_DATABASE_URL", URL)
    return monkeypatch


def _made() -> Settings:
    # its fields come from the environment
    return Settings()  # type: ignore[call-arg]


def test_policies_are_nested_names(env: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TXBOX_DATABASE_SCHEMA": "ops",
        "TXBOX_NOTIFY": "true",
        "TXBOX_UNMATCHED": "quarantine",
        "TXBOX_LEASE__DURATION": "PT10M",
        "TXBOX_RELAYING__RETRY__MAX_ATTEMPTS": "4",
        "TXBOX_RELAYING__POLL": "00:00:02",
        "TXBOX_RETENTION": '{"processed": "P7D", "window": ["01:00", "03:00"]}',
        "TXBOX_APP": "shop:app",  # the command line's
    }.items():
        env.setenv(name, value)
    app = _made().app()
    assert (app.database.schema, app.notify, app.unmatched) == ("ops", True, "quarantine")
    assert app.lease.duration == timedelta(minutes=10)
    assert (app.relaying.retry.max_attempts, app.relaying.poll) == (4, timedelta(seconds=2))
    assert app.retention.processed == timedelta(days=7)
    assert app.retention.window == (time(1), time(3))


def test_a_file_may_have_what_others_read(tmp_path: Path) -> None:
    """The command line and the dashboard have variables of the same prefix, and the program its own."""
    path = tmp_path / ".env"
    path.write_text(
        f"TXBOX_DATABASE_URL={URL}\nTXBOX_UI_TOKEN=secret\nTXBOX_APP=shop:app\nDEBUG=1\n"
    )
    made: Settings = Settings(_env_file=path)  # type: ignore[call-arg]
    assert made.database_url.get_secret_value() == URL
    path.write_text(f"TXBOX_DATABASE_URL={URL}\nTXBOX_LEASE__DURATOIN=PT1M\n")
    with pytest.raises(ValidationError, match="duratoin"):
        Settings(_env_file=path)  # type: ignore[call-arg]


def test_the_password_is_not_shown(env: pytest.MonkeyPatch) -> None:
    settings = _made()
    for shown in (repr(settings), str(settings), str(settings.model_dump()), repr(settings.app())):
        assert "s3cret" not in shown
    env.setenv("TXBOX_DATABASE_URL", "nosql://shop:s3cret@db")
    with pytest.raises(ConfigurationError) as raised:
        _made().app()
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TXBOX_LEASE__DURATOIN", "PT1M", "duratoin"),
        ("TXBOX_LEASE__DURATION", "5 minutes", "lease.duration"),
        ("TXBOX_LEASE__BATCH", "0", "Lease.batch is 0"),
        ("TXBOX_UNMATCHED", "drop", "unmatched"),
    ],
)
def test_a_mistake_ends_the_program(
    name: str, value: str, says: str, env: pytest.MonkeyPatch
) -> None:
    env.setenv(name, value)
    with pytest.raises((ValidationError, ConfigurationError), match=says):
        _made()


def test_a_prefix_files_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shop(Settings, env_prefix="SHOP_"):
        fee: int = 0

    monkeypatch.delenv("TXBOX_DATABASE_URL", raising=False)
    with pytest.raises(ValidationError, match="database_url"):
        _made()
    (tmp_path / "shop_database_url").write_text(f"sqlite:///{tmp_path}/shop.db\n")
    monkeypatch.setenv("SHOP_FEE", "3")
    settings = Shop(_secrets_dir=tmp_path)  # type: ignore[call-arg]
    app = settings.app(unmatched="quarantine")
    assert (settings.fee, app.unmatched, app.database.name) == (
        3, "quarantine", f"sqlite:///{tmp_path}/shop.db",
    )  # fmt: skip
