"""txbox ui: it begins only when it knows who may look, and ends on SIGTERM."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.support.command import Command
from tests.support.waiting import DEADLINE_S

TOKEN = "a-token-of-the-tests-that-is-long-enough"


def test_it_does_not_start_without_knowing_who_may_look(command: Command, sqlite_url: str) -> None:
    ended = command("ui", "--database", sqlite_url, code=2)
    assert "TXBOX_UI_TOKEN" in ended.sentence
    short = command("ui", "--database", sqlite_url, env={"TXBOX_UI_TOKEN": "short"}, code=2)
    assert "24 bytes" in short.sentence
    missing = command("ui", "--database", sqlite_url, "--tokens", "nobody.txt", code=2)
    assert "nobody.txt" in missing.sentence
    command.file("tokens.txt", f"ann:{TOKEN}:all\n")
    wrong = command("ui", "--database", sqlite_url, "--tokens", "tokens.txt", code=2)
    assert "Line 1 of the tokens" in wrong.sentence
    assert TOKEN not in wrong.sentence
    two = command(
        "ui",
        "--database",
        sqlite_url,
        "--trust-header",
        "X-User",
        env={"TXBOX_UI_TOKEN": TOKEN},
        code=2,
    )
    assert "use one" in two.sentence


def test_it_serves_until_it_is_told_to_end(command: Command, sqlite_url: str) -> None:
    _is_served(command, "--database", sqlite_url)


def test_it_serves_an_app_on_an_engine_of_asyncpg(command: Command, postgresql_url: str) -> None:
    url = postgresql_url.replace("postgresql://", "postgresql+asyncpg://")
    command.file(
        "shop.py",
        "from sqlalchemy.ext.asyncio import create_async_engine\nfrom txbox import App\n"
        f"app = App(create_async_engine({url!r}))\n",
    )
    _is_served(command, "--app", "shop:app")


def _is_served(command: Command, *where: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "txbox", "ui", *where, "--port", "0"],
        cwd=command.directory, stderr=subprocess.PIPE, text=True,
        env={**command.environment, "TXBOX_UI_TOKEN": TOKEN},
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
            assert found
            asked = urllib.request.Request(found[0], headers={"Authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
                assert "Overview" in answer.read().decode()
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                urllib.request.urlopen(found[0], timeout=DEADLINE_S)
            refused.value.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
