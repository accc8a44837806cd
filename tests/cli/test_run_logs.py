"""What a process that stays writes to standard error: whoever says it, it is a line of the formatter's."""

from __future__ import annotations

import json

import pytest

from tests.support import warm
from tests.support.command import Command

#: An App whose module lets everything speak that may, and then one handler's task on the loop.
SHOP = """
import asyncio, gc, logging, os, threading, warnings
from txbox import App, Message
from txbox.brokers.local import Local

app = App(os.environ["SHOP_URL"])
{setup}

@app.handler("orders", consumer="billing")
async def bill(message: Message[dict], tx):
    logging.getLogger("shop").warning("from the application")
    logging.getLogger("aiormq.connection").error("a try of a client library")
    warnings.warn("a warning of Python")
    thread = threading.Thread(target=lambda: 1 / 0, name="left-behind")
    thread.start()
    thread.join()
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    keep.append(asyncio.create_task(asyncio.sleep(3600)))
    await asyncio.sleep(0)

keep = []
app.consume(Local())
"""


def _lines(
    command: Command, url: str, *words: str, setup: str = "", verb: str = "run"
) -> list[str]:
    """Standard error of a command that runs to its end, on an inbox with one message; tracebacks are allowed."""
    command.file("shop.py", SHOP.format(setup=setup))
    named = {**command.environment, "TXBOX_APP": "shop:app", "SHOP_URL": url}
    command("send", "orders", "--id", "m1", "--data", "{}", env=named)
    ended = warm.run(
        ["txbox", verb, "--once", "--log-json", *words], cwd=command.directory, env=named
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr.decode().splitlines()


def test_whatever_is_said_is_a_line_of_json(command: Command, sqlite_url: str) -> None:
    lines = [json.loads(line) for line in _lines(command, sqlite_url)]
    said = " ".join(str(line.get("message")) for line in lines)
    others = sorted(line["logger"] for line in lines if "logger" in line)
    assert others == ["asyncio", "py.warnings", "shop"], lines
    for text in ("from the application", "The thread left-behind failed."):
        assert said.count(text) == 1, lines
    assert "a try of a client library" not in said
    # a task that a handler leaves running is ended, not destroyed
    assert "Task was destroyed" not in said
    (failed,) = [line for line in lines if "left-behind" in str(line.get("message"))]
    assert "ZeroDivisionError" in failed["exception"]


def test_verbose_shows_what_client_libraries_say(command: Command, sqlite_url: str) -> None:
    lines = [json.loads(line) for line in _lines(command, sqlite_url, "--verbose")]
    (said,) = [line for line in lines if line.get("logger") == "aiormq.connection"]
    assert (said["level"], said["message"]) == ("error", "a try of a client library")


def test_an_application_with_a_log_of_its_own_keeps_it(command: Command, sqlite_url: str) -> None:
    setup = "logging.basicConfig(format='MINE %(message)s')"
    lines = _lines(command, sqlite_url, setup=setup)
    assert "MINE from the application" in lines
    assert sum("from the application" in line for line in lines) == 1


@pytest.mark.parametrize("verb", ["run", "maintain", "relay"])
def test_what_is_said_while_the_app_is_imported(
    verb: str, command: Command, sqlite_url: str
) -> None:
    setup = "warnings.warn('early'); logging.getLogger('shop').warning('early')"
    lines = [json.loads(line) for line in _lines(command, sqlite_url, setup=setup, verb=verb)]
    early = [line["logger"] for line in lines if "early" in line.get("message", "")]
    assert early == ["py.warnings", "shop"], lines
