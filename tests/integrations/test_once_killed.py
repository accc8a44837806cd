"""A worker is killed between a task's COMMIT and the queue's own bookkeeping; what waits for the result goes on."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from celery import chain, chord

from tests.integrations.conftest import Rows
from tests.support.servers import ROOT
from tests.support.task_queues import CeleryShop, DramatiqShop, Setting, TaskiqShop
from tests.support.waiting import DEADLINE_S

WAIT = {"timeout": DEADLINE_S}


@pytest.fixture
def setting(database: Path, tmp_path: Path, rabbitmq_url: str, redis_url: str) -> Setting:
    deadly = tmp_path / "deadly"
    deadly.touch()
    return Setting(str(database), f"t-{secrets.token_hex(4)}", str(deadly), rabbitmq_url, redis_url)


@contextmanager
def working(queue: str, setting: Setting) -> Iterator[None]:
    """A worker that dies behind its first COMMIT, and the one that takes over."""

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.task_queues", queue],
            cwd=ROOT, env={**os.environ, **setting.environment},
        )  # fmt: skip

    with start() as first:
        try:
            assert first.wait(DEADLINE_S) == -signal.SIGKILL
        finally:
            first.kill()
    with start() as second:
        try:
            yield
        finally:
            second.kill()


def test_a_chain_and_a_chord_of_celery_go_on(setting: Setting, rows: Rows) -> None:
    shop = CeleryShop(setting)
    chained: Any = chain(shop.pay.s(5), shop.total.s()).apply_async()
    with working("celery", setting):
        assert chained.get(**WAIT) == 10
        Path(setting.deadly).touch()
    together: Any = chord([shop.pay.s(1), shop.pay.s(2)], shop.total.s()).apply_async()
    with working("celery", setting):
        assert together.get(**WAIT) == 6
    assert rows("SELECT amount FROM ledger ORDER BY 1") == [(1,), (2,), (5,)]


def test_a_pipeline_of_dramatiq_goes_on_with_the_result(setting: Setting, rows: Rows) -> None:
    shop = DramatiqShop(setting)
    paid, total = shop.pay.message(5), shop.total.message()
    pipeline: Any = dramatiq.pipeline([paid, total], broker=shop.broker)
    pipeline.run()
    with working("dramatiq", setting):
        for message in (paid, total):
            result = message.get_result(
                backend=shop.backend, block=True, timeout=int(DEADLINE_S * 1000)
            )
            assert result == 10
    assert rows("SELECT amount FROM ledger ORDER BY 1") == [(5,), (10,)]


def test_who_waits_for_a_task_of_taskiq_gets_its_result(setting: Setting, rows: Rows) -> None:
    async def waited() -> Any:
        shop = TaskiqShop(setting)
        task = await shop.pay.kiq(5)
        with working("taskiq", setting):
            answer = await task.wait_result(check_interval=0.05, timeout=DEADLINE_S)
        await shop.broker.shutdown()
        return answer.return_value

    assert asyncio.run(waited()) == 10
    assert rows("SELECT amount FROM ledger") == [(5,)]
