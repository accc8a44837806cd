"""A rolling deploy from one language to another: workers of both on one inbox, killed again and again."""

from __future__ import annotations

import base64
import random
import shlex
import shutil
import signal
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.databases import NewDatabase, Raw
from tests.support.effect import CONSUMER, TOPIC
from tests.support.sources import event_line
from tests.support.waiting import eventually
from tests.support.workers import Process
from txbox import App, Lease
from txbox.maintenance import Task, run_once
from txbox.testing.conformance import Program

_NODE = Path(__file__).parents[2] / "examples" / "node"
_IN_NODE = shlex.join(["node", str(_NODE / "conformance.mjs")])
_PAGE = shlex.join([sys.executable, "-m", "tests.support.conformance_program"])
#: What a killed process held is rescued after that.
_LEASE_S = 0.5
#: The points of workers in Python at which they die, and at which passing.
_KILLS = [
    ("after:handler", 5), ("during:commit", 2), ("after:claim", 4), ("after:commit", 3), ("before:ack", 2),
]  # fmt: skip
#: The bytes of `data` in each line of the file: both languages take the same payload.
_PAYLOAD = base64.b64encode(b'{"cents": 1}').decode()

# the program writes conformance_effect, and the worker in Python effect: one table, where a second effect would show
_EFFECTS = (
    "CREATE TABLE conformance_effect (consumer text, message_id text, writer text, follows bigint)",
    "CREATE VIEW effect AS SELECT message_id, writer AS note FROM conformance_effect",
)


class OtherLanguage:
    """A program of `txbox conformance`, and what a broker and a poll loop have it do.

    Until it has lost its lives it is killed now and then over what it does. That was not acknowledged, and comes again.
    """

    def __init__(self, command: str, url: str, seed: int, lives: int) -> None:
        self._program = Program(shlex.split(command), url)
        self._random = random.Random(seed)
        self.killed, self._lives = 0, lives
        # commands since it was killed
        self._since = 0

    def _ask(self, do: str, **named: Any) -> dict[str, Any] | None:
        """The answer; None if it was killed instead."""
        known: dict[str, Any] = {"consumer": CONSUMER, "handler": "ok", "max_attempts": 50,
                                 "retry_s": 0, "lock_timeout_ms": 200}  # fmt: skip
        self._since += 1
        if self._since > 5 and self.killed < self._lives:
            # a duplicate, or a lease, passes no point: the next command may
            named["pause"] = ("claimed", "handled", "committed")[self.killed % 3]
        answer = self._program.ask(do, **known | named)
        if "at" not in answer:
            return answer
        if self._random.random() < 0.5:
            # it dies somewhere behind the point instead
            self._program.tell("go")
        self._program.kill()
        self.killed, self._since = self.killed + 1, 0
        return None

    def deliver(self, ids: list[str]) -> None:
        """Deliver until each is acknowledged. A fifth of them fail, and then run from the table, in either language."""
        waiting = deque(ids)
        while waiting:
            message_id = waiting.popleft()
            handler = "fail" if self._random.random() < 0.2 else "ok"
            answer = self._ask("deliver", topic=TOPIC, id=message_id, payload=_PAYLOAD, handler=handler)  # fmt: skip
            if answer is None or answer["outcome"] == "in_progress":
                waiting.append(message_id)
            else:
                assert answer["outcome"] in ("processed", "duplicate", "failed", "deferred"), answer

    def work(self) -> None:
        """Lease what is due in the table, and run it."""
        leased = self._ask("lease", limit=5, lease_s=_LEASE_S)
        assert leased is not None, "a lease has no points"
        for message_id in leased["ids"]:
            if self._ask("finish", token=leased["token"], id=message_id) is None:
                return

    def close(self) -> None:
        self._program.kill()


@pytest.mark.parametrize(
    ("command", "count", "kills"),
    [
        pytest.param(_PAGE, 30, _KILLS[:2], id="page"),
        pytest.param(_IN_NODE, 400, _KILLS * 4, id="node", marks=pytest.mark.slow),
    ],
)
def test_a_rolling_deploy_between_languages_loses_and_doubles_nothing(
    new_database: NewDatabase,
    tmp_path: Path,
    command: str,
    count: int,
    kills: list[tuple[str, int]],
) -> None:
    if command == _IN_NODE and not (shutil.which("node") and (_NODE / "node_modules").is_dir()):
        pytest.skip("Node or its driver is missing: make test-contract")
    url, events = new_database("postgresql"), tmp_path / "events.jsonl"
    names = [f"m{number}" for number in range(count)]
    ids = [f"/test {name}" for name in names]
    # every message comes twice to either language, in another order
    lines, deliveries, chance = [event_line(name) for name in names * 2], ids * 2, random.Random(7)
    chance.shuffle(lines)
    chance.shuffle(deliveries)
    plan: dict[str, Any] = {"url": url, "file": str(events), "once": True, "lease_s": _LEASE_S,
                            "max_starts": 100, "maintenance": True}  # fmt: skip
    dead = 0
    with ExitStack() as stack:
        raw = stack.enter_context(Raw(url))
        for statement in _EFFECTS:
            raw.execute(statement)
        other = OtherLanguage(command, url, seed=7, lives=2 * len(kills))
        stack.callback(other.close)
        new = stack.enter_context(ThreadPoolExecutor(1))
        # first there is Python alone, then both; each part of the file ends with a killed worker
        size = len(lines) // len(kills)
        delivering = None
        for number, crash in enumerate(kills):
            with events.open("a") as file:
                file.writelines(lines[number * size : (number + 1) * size])
            with Process(crash=crash, **plan) as process:
                if number == len(kills) // 2:
                    delivering = new.submit(other.deliver, deliveries)
                dead += process.ended() == -signal.SIGKILL
        # and then the other language alone, with what only comes now, beside `txbox maintain`
        assert delivering is not None
        delivering.result()
        later = [f"/test later{number}" for number in range(count // 2)]
        other.deliver(later * 2)
        app = stack.enter_context(App(url, lease=Lease(max_starts=100)))

        def settled() -> bool:
            run_once(app, "rescue", Task(consumer=CONSUMER))
            other.work()
            return not raw.value("SELECT count(*) FROM txbox_inbox WHERE status <> 'processed'")

        eventually(settled, "everything is processed")
        assert min(dead, other.killed) > 0, f"nothing was killed: {dead}, {other.killed}"
        effects = raw.rows("SELECT message_id, count(*) FROM effect GROUP BY message_id ORDER BY 1")
        assert effects == [(message_id, 1) for message_id in sorted(ids + later)]
        assert raw.value("SELECT count(*) FROM txbox_inbox") == len(ids + later)
        assert raw.value("SELECT count(*) FROM txbox_quarantine") == 0
        writers = raw.rows("SELECT (note = 'program'), count(*) FROM effect GROUP BY 1 ORDER BY 1")
        assert [ours for ours, _ in writers] == [False, True], (
            f"one language has done it all: {writers}"
        )
