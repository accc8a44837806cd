"""Exceptions that end programs are the failure of the handler that raises them; a worker's end stays its end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.blocked import acquired
from tests.support.databases import NewDatabase
from tests.support.servers import ROOT
from tests.support.shop import CONSUMER, TOPIC, Shop, add_effect, opened, paid, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S
from tests.support.workers import worker
from txbox import Message, Outcome, RetryPolicy

TWICE = RetryPolicy(max_attempts=2, base=timedelta(0))


class Stop(BaseException):
    """As some libraries have them."""


ENDS: dict[str, Callable[[], BaseException]] = {
    "cancelled": asyncio.CancelledError,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "generator": GeneratorExit,
    "other": Stop,
}
MODES: dict[str, dict[str, Any]] = {
    "inline": {},
    "batch": {"batch": True},
    "pipelined": {"pipeline": True},
    "stored": {"mode": "stored"},
    "untransactional": {"transactional": False},
    "effect": {},
}
every_mode = pytest.mark.parametrize("mode", MODES)
IDS = [*(f"m{number}" for number in range(5)), *ENDS, *(f"m{number}" for number in range(5, 10))]


def raises(message: Message[Any]) -> None:
    """Effects have ids of their own: the body says which it is."""
    if message.body in ENDS:
        error = ENDS[message.body]()
        raise error


async def raises_inside(message: Message[Any]) -> None:
    """By a task of the handler's where it can: the loop itself ends by what some of them raise."""

    async def inner() -> None:
        raises(message)

    if message.body == "cancelled":
        task = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(task.cancel)
        await task
    elif message.body in ("exit", "interrupt"):
        await asyncio.create_task(inner())
    else:
        raises(message)


def run(shop: Shop, mode: str, function: Any) -> None:
    """Have a worker run all messages, and look at what became of them."""
    app = shop.app
    if mode == "effect":
        app.effect("mail", retry=TWICE)(function)
        connection = acquired(app._any_sync())
        connection.begin(())
        for message_id in IDS:
            app.effects.stage(connection.native, "mail", message_id)
        connection.commit(())
        connection.discard()
    else:
        register: Any = app.handler(TOPIC, consumer=CONSUMER, retry=TWICE, **MODES[mode])
        register(function)
        app.consume(Memory([paid(message_id, f'"{message_id}"'.encode()) for message_id in IDS]))
    assert worker(app, once=True).run() == 0
    rows = shop.raw.rows("SELECT attempts, error_type FROM txbox_inbox WHERE status = 'dead'")
    assert sorted(rows) == sorted((2, type(end()).__name__) for end in ENDS.values())
    assert statuses(shop.raw) == {"dead": len(ENDS), "processed": 10}
    assert shop.effects() == (0 if mode in ("untransactional", "effect") else 10)


@every_mode
def test_what_ends_programs_is_the_failure_of_its_message(shop: Shop, mode: str) -> None:
    def handle(message: Message[Any], tx: Any) -> None:
        add_effect(tx, message.id)
        raises(message)

    def handle_all(messages: list[Message[Any]], tx: Any) -> None:
        for message in messages:
            handle(message, tx)

    run(
        shop,
        mode,
        {"batch": handle_all, "untransactional": raises, "effect": raises}.get(mode, handle),
    )


@every_mode
def test_what_ends_programs_is_the_failure_of_its_message_on_a_loop(
    new_database: NewDatabase, mode: str
) -> None:
    async def handle(message: Message[Any], tx: Any) -> None:
        await tx.execute("INSERT INTO effect (message_id) VALUES (%s)", (str(message.id),))
        await raises_inside(message)

    async def handle_all(messages: list[Message[Any]], tx: Any) -> None:
        for message in messages:
            await handle(message, tx)

    functions = {"batch": handle_all, "untransactional": raises_inside, "effect": raises_inside}
    with opened(new_database("postgresql")) as shop:
        run(shop, mode, functions.get(mode, handle))


def test_process_outside_of_the_main_thread_records_an_interrupt(shop: Shop) -> None:
    """No signal is raised there: the handler itself has raised it."""
    shop.handler(lambda message, tx: raises(message), retry=TWICE)
    outcomes: list[Outcome] = []
    message = paid("a", b'"interrupt"')
    thread = threading.Thread(target=lambda: outcomes.append(shop.deliver(message)))
    thread.start()
    thread.join(DEADLINE_S)
    assert outcomes == [Outcome.FAILED]
    assert shop.row("a").error_type == "KeyboardInterrupt"


@pytest.mark.parametrize("how", ["cancel", "timeout", "close"])
def test_process_async_that_is_ended_from_outside_records_nothing(
    postgresql_url: str, how: str
) -> None:
    async def ended(shop: Shop) -> None:
        inside, limit = asyncio.Event(), asyncio.timeout(None)

        @shop.app.handler(TOPIC, consumer=CONSUMER)
        async def waits(message: Message[Any], tx: Any) -> None:
            inside.set()
            if how == "timeout":
                limit.reschedule(0.0)
            await asyncio.Event().wait()

        work = shop.app.process_async(paid("a"))
        if how == "timeout":
            with pytest.raises(TimeoutError):
                async with limit:
                    await work
            return
        task = asyncio.create_task(work)
        await inside.wait()
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return
        # as a loop that ends leaves it to the garbage collector
        work.close()
        task.cancel()
        await asyncio.wait([task])

    with opened(postgresql_url) as shop:
        asyncio.run(ended(shop))
        assert statuses(shop.raw) == {}


_SCRIPT = """
import asyncio, signal, sys
from txbox import App, Message

url, how = sys.argv[1:]
# what a shell starts in the background inherits an ignored SIGINT
signal.signal(signal.SIGINT, signal.default_int_handler)
app = App(url)
if how == "exit":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
message = Message(topic="orders", id="a", payload=b"{}")

def busy():
    print("inside", flush=True)
    while True:
        pass

if how == "loop":
    @app.handler("orders", consumer="billing")
    async def handle(message, tx):
        print("inside", flush=True)
        await asyncio.Event().wait()

    asyncio.run(app.process_async(message))
else:
    @app.handler("orders", consumer="billing")
    def handle(message, tx):
        busy()

    app.process(message)
"""


@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("interrupt", signal.SIGINT, -signal.SIGINT),
        ("exit", signal.SIGTERM, 7),
        ("loop", signal.SIGINT, -signal.SIGINT),
    ],
)
def test_a_signal_ends_the_process_that_runs_a_handler(
    postgresql_url: str, how: str, number: signal.Signals, code: int
) -> None:
    with opened(postgresql_url) as shop:
        command = [sys.executable, "-c", _SCRIPT, postgresql_url, how]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"inside\n"
                process.send_signal(number)
                assert process.wait(DEADLINE_S) == code
            finally:
                process.kill()
        assert statuses(shop.raw) == {}
