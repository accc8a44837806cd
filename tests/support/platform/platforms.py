"""The delivery platform as processes: started, fed, killed at any moment, and looked at."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.message import Message as Mail
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.databases import Raw
from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm import Warm

sys.path.append(str(ROOT / "examples"))
from delivery_platform.mailbox import Mailbox  # type: ignore[import-not-found]

PACKAGES = 60
_UNFINISHED = (
    "SELECT count(*) FROM txbox_inbox WHERE status NOT IN ('processed', 'discarded', 'dead')"
)


@dataclass(frozen=True)
class Clean:
    """What an undisturbed run leaves: the packages, and the mails by receiver and subject."""

    packages: list[tuple[Any, ...]]
    mails: set[tuple[str, str]]


class Service:
    """One process under `txbox run`, started again whenever it was killed."""

    def __init__(self, name: str, app: str, env: Mapping[str, str], log: Path) -> None:
        self._command = ["txbox", "run", f"delivery_platform.{app}:app"]
        self._env = {**env, "INSTANCE": name}
        self._log = log
        self.name = name
        self.kills = 0
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = Warm(self._command, cwd=ROOT, env=self._env, stdout=log, stderr=log)
        self.since = time.monotonic()

    def kill(self) -> None:
        assert self.process.poll() is None, f"{self.name} ended by itself: see {self._log}"
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.kills += 1


class Platform:
    """One installation: databases, a broker or none, a mail server.

    Args:
        apps: what is run, by a name for each process.
        env: of the example's settings.
        urls: the databases.
    """

    def __init__(
        self,
        directory: Path,
        *,
        apps: Mapping[str, str],
        env: Mapping[str, str],
        urls: list[str],
        mailbox: Mailbox,
    ) -> None:
        self._directory = directory
        self._apps = apps
        self._urls = list(dict.fromkeys(urls))
        self._mailbox = mailbox
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
            "SMTP_ADDRESS": mailbox.address,
            "SCANS_DATABASE_URL": urls[0],
            "NOTIFICATIONS_DATABASE_URL": urls[-1],
            # short, so that what a killed process held is not waited for; and far more
            # kills than a message that kills its process would be forgiven
            "LEASE_S": "4",
            "MAX_STARTS": "50",
            **env,
        }
        self.services: list[Service] = []
        done = warm.run(["delivery_platform", "declare"], cwd=ROOT, env=self.env)
        assert done.returncode == 0, done.stderr

    def start(self, **env: str) -> None:
        self.services = [
            Service(name, app, self.env | env, self._directory / f"{name}.log")
            for name, app in self._apps.items()
        ]

    def stop(self) -> None:
        for service in self.services:
            service.process.kill()
            service.process.wait(DEADLINE_S)

    def fed(self, parts: int, pause_s: float, *more: str) -> Warm:
        feeder = "tests.support.platform.feeder"
        return Warm(
            [feeder, str(PACKAGES), str(parts), str(pause_s), *more], cwd=ROOT, env=self.env
        )

    def killed_again_and_again(self, feeder: Warm, each: int, seed: int) -> None:
        """SIGKILL at random moments until every process has died so often and all is sent."""
        draw = random.Random(seed)
        due = [service for service in self.services for _ in range(each)]
        draw.shuffle(due)
        for service in due:
            # it must have come to work before it dies; how far is left to chance
            until = service.since + draw.uniform(1.0, 2.5)
            while time.monotonic() < until:
                time.sleep(0.01)
            service.kill()
            service.start()
        assert feeder.wait(DEADLINE_S) == 0

    # -- what it left -------------------------------------------------------------------------

    @property
    def packages(self) -> list[tuple[Any, ...]]:
        with Raw(self._urls[0]) as raw:
            return raw.rows("SELECT name, version, status, at FROM package ORDER BY name")

    def mails(self) -> dict[tuple[str, str], list[Mail]]:
        found: dict[tuple[str, str], list[Mail]] = defaultdict(list)
        for mail in list(self._mailbox.mails):
            found[str(mail["To"]), str(mail["Subject"])].append(mail)
        return found

    def quiet(self) -> bool:
        """True when nothing is left to do in any database."""
        for url in self._urls:
            with Raw(url) as raw:
                if raw.value("SELECT count(*) FROM txbox_outbox") or raw.value(_UNFINISHED):
                    return False
        return True

    def complete(self, clean: Clean) -> bool:
        return self.packages == clean.packages and self.mails().keys() >= clean.mails

    def state(self) -> str:
        """For the message of a test that waited in vain."""
        said: list[str] = []
        for url in self._urls:
            with Raw(url) as raw:
                said.append(
                    f"{raw.rows('SELECT consumer, status, count(*) FROM txbox_inbox GROUP BY 1, 2')} "
                    f"{raw.rows('SELECT status, count(*) FROM txbox_outbox GROUP BY 1')}"
                )
        return f"{said}, {len(self.mails())} mails; logs in {self._directory}"

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition, as long as anything moves; a process that ended by itself ends the wait."""

        def holds() -> bool:
            for service in self.services:
                assert service.process.poll() is None, f"{service.name} ended: {self.state()}"
            return bool(condition())

        before = None
        while before != (before := self.state()):
            try:
                eventually(holds, what)
            except AssertionError:
                if any(service.process.poll() is not None for service in self.services):
                    raise
                continue
            return
        raise AssertionError(f"{what} did not come true, and nothing moves any more ({before})")

    def check(self, clean: Clean) -> None:
        """Wait until it is where the clean run ended, and check that it came there in order."""
        self.until(lambda: self.quiet() and self.complete(clean), "what the clean run left")
        assert self.mails().keys() == clean.mails
        for what, copies in self.mails().items():
            assert len({copy["X-Idempotency-Key"] for copy in copies}) == 1, what
            assert len({copy["Message-ID"] for copy in copies}) == 1, what
        keys = {copies[0]["X-Idempotency-Key"] for copies in self.mails().values()}
        assert len(keys) == len(clean.mails), "every status has a key of its own"
        for url in self._urls:
            with Raw(url) as raw:
                assert raw.rows("SELECT message_id, reason FROM txbox_quarantine") == []
                assert raw.rows("SELECT message_id FROM txbox_inbox WHERE status = 'dead'") == []


@contextmanager
def platform(
    directory: Path, *, apps: Mapping[str, str], env: Mapping[str, str], urls: list[str]
) -> Iterator[Platform]:
    """An installation with tables, topics and a mail server; its processes are gone afterwards."""
    with ExitStack() as stack:
        mailbox = stack.enter_context(Mailbox())
        services = Platform(directory, apps=apps, env=env, urls=urls, mailbox=mailbox)
        stack.callback(services.stop)
        yield services


def clean_run(directory: Path) -> Clean:
    """Each scan once, in order, and nobody dies."""
    url = f"sqlite:///{directory / 'clean.db'}"
    # a lease that ends on a busy machine would mean a second mail
    env = {"LEASE_S": "60"}
    with platform(directory, apps={"all": "monolith"}, env=env, urls=[url]) as services:
        assert services.fed(1, 0.0, "once").wait(DEADLINE_S) == 0
        services.start()
        services.until(services.quiet, "the end of the clean run")
        mails = services.mails()
        assert all(len(copies) == 1 for copies in mails.values())
        return Clean(services.packages, set(mails))
