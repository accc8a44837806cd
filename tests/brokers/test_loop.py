"""The event loop for async clients: answers, timeouts, and a close that leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.support.waiting import DEADLINE_S
from txbox.brokers.loop import EventLoop


async def answer() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def forever() -> None:
    await asyncio.Event().wait()


async def stubborn() -> None:
    try:
        await forever()
    finally:
        await asyncio.sleep(0.2)


async def cancelled_by_its_client() -> None:
    raise asyncio.CancelledError


async def in_the_background(ended: list[str]) -> None:
    try:
        await forever()
    except asyncio.CancelledError:
        ended.append("ended")
        raise


async def started(ended: list[str], tasks: list[asyncio.Task[None]]) -> None:
    tasks.append(asyncio.get_running_loop().create_task(in_the_background(ended)))
    await asyncio.sleep(0)


def test_a_call_runs_in_the_thread_of_the_loop() -> None:
    loop = EventLoop("txbox-a-loop")
    assert loop.call(answer(), DEADLINE_S) == "txbox-a-loop"
    loop.close()
    assert "txbox-a-loop" not in {thread.name for thread in threading.enumerate()}


def test_what_takes_longer_is_cancelled() -> None:
    loop = EventLoop("txbox-a-loop")
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        loop.call(forever(), 0.05)
    before = time.monotonic()
    with pytest.raises(TimeoutError):
        loop.call(stubborn(), 0.05, clean_up_s=DEADLINE_S)
    assert time.monotonic() - before >= 0.2, "it was waited for"
    assert loop.call(answer(), DEADLINE_S)
    loop.close()


def test_a_call_that_its_client_cancels_is_a_connection_that_ended() -> None:
    loop = EventLoop("txbox-a-loop")
    with pytest.raises(TimeoutError, match="connection ended"):
        loop.call(cancelled_by_its_client(), 5)
    loop.close()


def test_the_end_cancels_what_still_runs() -> None:
    loop, ended = EventLoop("txbox-a-loop"), list[str]()
    tasks: list[asyncio.Task[None]] = []
    loop.call(started(ended, tasks), 5)
    loop.close()
    assert ended == ["ended"]
    assert all(task.done() for task in tasks)
