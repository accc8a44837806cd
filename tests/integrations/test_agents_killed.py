"""An agent is killed at every kind of moment, and started again: each refund once, and the same answers."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_process import LIMIT, Plan
from tests.support.databases import NewDatabase, Raw
from tests.support.servers import ROOT
from tests.support.shop import create_effects
from tests.support.waiting import DEADLINE_S
from tests.support.warm import Warm
from txbox.admin import Admin
from txbox.admin.tables import QuarantineFilter
from txbox.integrations.agents import APPROVAL

SEED = 20261129


class Agent:
    """One run after another of an agent, each of which dies as often as it takes."""

    def __init__(self, url: str, folder: Path, raw: Raw, rng: random.Random) -> None:
        self._url, self._folder, self._raw, self.rng = url, folder, raw, rng
        self.kills = 0
        self._runs = 0

    def run(self, refunds: list[tuple[int, int]], *, has_calls: bool, kills: int) -> None:
        """Play a plan to its end, with so many deaths if it lasts so long, and compare what came of it."""
        self._runs += 1
        before = self._effects()
        folder = self._folder / str(self._runs)
        folder.mkdir()
        files = {name: folder / name for name in ("conversation", "answers")}
        for file in files.values():
            file.touch()
        names: Any = {name: str(file) for name, file in files.items()}
        plan = Plan(f"ticket-{self._runs}", refunds, has_calls, **names)
        while True:
            # up to 6 moments a call, and a repeat has 5 of them
            plan.dies_at = self.rng.randint(1, 6 * len(refunds)) if self.kills < kills else 0
            plan.save(folder / "plan")
            code = self._life(folder / "plan")
            if code == 0:
                break
            assert code == -signal.SIGKILL, code
            self.kills += 1
        answers: defaultdict[int, list[Any]] = defaultdict(list)
        for line in files["answers"].read_text().splitlines():
            number, answer = json.loads(line)
            answers[number].append(answer)
        assert sorted(answers) == list(range(len(refunds)))
        for number, (order, _) in enumerate(refunds):
            assert all(answer == answers[number][0] for answer in answers[number]), "another answer"
            assert answers[number][0] == "refused" or answers[number][0]["order"] == order
        receipts = [each[0]["receipt"] for each in answers.values() if each[0] != "refused"]
        assert len(set(receipts)) == len(receipts), "two calls have one answer"
        done = [refund for number, refund in enumerate(refunds) if answers[number][0] != "refused"]
        expected = Counter((str(order), str(cents)) for order, cents in done)
        assert self._effects() - before == expected

    def _life(self, plan: Path) -> int:
        words = ["tests.support.agent_process", "agent", self._url, str(plan)]
        process = Warm(words, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            return process.wait(DEADLINE_S)
        finally:
            process.kill()

    def _effects(self) -> Counter[tuple[str, str]]:
        rows = self._raw.rows("SELECT message_id, note FROM effect")
        return Counter(
            (row[0] if isinstance(row[0], str) else row[0].decode(), row[1]) for row in rows
        )


def plan(rng: random.Random) -> list[tuple[int, int]]:
    """Some refunds, of which two are the same and both are meant."""
    refunds = [(rng.randint(1, 10**6), rng.randint(1, LIMIT)) for _ in range(rng.randint(2, 5))]
    refunds.insert(rng.randint(0, len(refunds)), rng.choice(refunds))
    return refunds


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def database_url(request: pytest.FixtureRequest, new_database: NewDatabase) -> str:
    return new_database(request.param)


@pytest.fixture
def agent(database_url: str, tmp_path: Path, raw: Any) -> Agent:
    looking: Raw = raw(database_url)
    create_effects(looking)
    return Agent(database_url, tmp_path, looking, random.Random(SEED))


KILLS = [5, pytest.param(100, marks=pytest.mark.slow)]


@pytest.mark.parametrize("has_calls", [True, False], ids=["calls", "arguments"])
@pytest.mark.parametrize("kills", KILLS)
def test_an_agent_that_is_killed_refunds_once(agent: Agent, kills: int, has_calls: bool) -> None:
    while agent.kills < kills:
        agent.run(plan(agent.rng), has_calls=has_calls, kills=kills)


@contextmanager
def deciding(url: str) -> Iterator[None]:
    """A person who approves every call but those of orders that can be divided by 3."""
    over = threading.Event()
    waiting: Any = {"consumer": "refund", "reason": APPROVAL, "status": "quarantined"}

    def decide() -> None:
        with Admin(url) as admin:
            while not over.wait(0.02):
                for row in admin.list(QuarantineFilter(**waiting)):
                    where = QuarantineFilter(
                        consumer="refund", message_id=row.message_id, hash=row.hash
                    )
                    (shown,) = admin.show(where, reveal=True)
                    refused = json.loads(shown.payload or b"")["order"] % 3 == 0
                    (admin.discard if refused else admin.accept)(where, reason="decided")

    person = threading.Thread(target=decide)
    person.start()
    try:
        yield
    finally:
        over.set()
        person.join()


@contextmanager
def working(url: str, rng: random.Random, kills: int) -> Iterator[None]:
    """A worker that is killed now and then."""
    over = threading.Event()

    def work() -> None:
        left = kills
        while not over.is_set():
            words = ["tests.support.agent_process", "worker", url]
            process = Warm(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                over.wait(rng.uniform(0.1, 1.0) if left else None)
                left -= 1
            finally:
                process.kill()
                process.wait(DEADLINE_S)

    machine = threading.Thread(target=work)
    machine.start()
    try:
        yield
    finally:
        over.set()
        machine.join()


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_what_a_person_approves_is_done_once_and_what_they_refuse_never(
    agent: Agent, database_url: str, kills: int
) -> None:
    rng = agent.rng
    with deciding(database_url), working(database_url, random.Random(SEED), kills):
        while agent.kills < kills:
            dear = [(order, LIMIT + cents) for order, cents in plan(rng)]
            agent.run([(3, LIMIT + 1), *dear, (1, 1)], has_calls=True, kills=kills)
