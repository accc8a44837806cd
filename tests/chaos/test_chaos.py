"""A short chaos run, what its checker must catch, and the page."""

from __future__ import annotations

import shutil
import signal
import socket
from dataclasses import replace
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.chaos import __main__, page, release, workload
from tests.chaos.brokers import ENTRIES, PAYMENTS, Endpoints
from tests.chaos.checker import Checked, check
from tests.chaos.databases import Disk
from tests.chaos.harness import Result, StuckError, chaos, prepare
from tests.chaos.journal import Journal, facts
from tests.chaos.nemesis import KINDS
from tests.chaos.workload import Plan, message_of, type_of
from tests.crash.brokers.feeds import RedisFeed
from tests.support.databases import Raw, require
from tests.support.servers import packages, provision
from tests.support.servers.process import ServerDirectory, throwaway_name
from tests.support.versions import NEXT
from tests.support.waiting import DEADLINE_S
from txbox import App, Outcome
from txbox.admin import Admin

SEED = 20261128


def test_nothing_is_lost_or_doubled_in_a_minute() -> None:
    """Whatever machine it is on, and however busy: it must come to rest, and has no number of messages to reach."""
    for server in ("postgresql", "redis"):
        require(None if packages.installed(server) else packages.what_is_missing(server))
    result = chaos(
        "postgresql", "redis", seed=SEED, minutes=1.0, rate=150.0, lanes=3,
        # these take seconds each
        without=("deploy", "release", "clock", "one connection", "disk full", "rebalance"),
    )  # fmt: skip
    assert not result.wrong, f"journals and logs are in {result.folder}"
    assert result.checked.effects > 0
    assert sum(result.faults.values()) > 0


@pytest.fixture(scope="module")
def bank_at_rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bank to which twenty messages were sent, and that has booked each once."""
    folder = tmp_path_factory.mktemp("bank")
    url = f"sqlite:///{folder}/chaos.db"
    payments, entries = RedisFeed("redis://", PAYMENTS), RedisFeed("redis://", ENTRIES)
    journal = Journal(folder, "bank-1", timed=workload.LISTS)
    numbers = [
        number
        for number in range(200)
        if type_of(number) in ("inline", "version") and "-ok-" in str(message_of(SEED, number).id)
    ][:20]
    plan = Plan("bank", "bank-1", folder, SEED, url, payments, entries)
    with workload.bank(plan, journal) as app, Raw(url) as raw:
        prepare(app, raw)
        for number in numbers:
            message = message_of(SEED, number, PAYMENTS)
            for consumer in workload.CONSUMERS[str(message.type)]:
                assert app.process(message, consumer=consumer) is Outcome.PROCESSED
        journal.write("sending", *numbers)
        journal.write("sent", *numbers)
        raw.execute(
            "INSERT INTO books (cause, message_id) SELECT message_id, 'e' FROM ledger WHERE consumer = 'inline'"
        )
    return folder


def _wrong(bank: Path, folder: Path, *mutations: str) -> list[str]:
    """What the checker says of a copy in which somebody has changed something."""
    shutil.copytree(bank, folder, dirs_exist_ok=True)
    with Raw(f"sqlite:///{folder}/chaos.db") as raw:
        for mutation in mutations:
            raw.execute(mutation)
        return check(raw, folder, SEED, broker="redis").wrong


def test_the_checker_has_nothing_to_say_of_a_good_run(bank_at_rest: Path, tmp_path: Path) -> None:
    assert _wrong(bank_at_rest, tmp_path) == []
    # versions as they were appended, and as they are read at the end
    history = (tmp_path / "elle.edn").read_text()
    assert ":type :ok" in history
    assert '[:append "version-' in history
    assert history.splitlines()[-1].count("[1]") > 1


_OUTAGE = (
    "INSERT INTO txbox_attempt (consumer, message_id, attempt, status, error_type) "
    "VALUES ('inline', 'inline-ok-1', 1, 'failed', 'OperationalError')"
)
_FIRST = "(SELECT min(message_id) FROM ledger WHERE consumer = 'inline')"


@pytest.mark.parametrize(
    ("mutations", "invariant"),
    [
        ([f"DELETE FROM ledger WHERE consumer = 'inline' AND message_id = {_FIRST}"], "I3 processed, no effect"),
        ([f"INSERT INTO ledger SELECT * FROM ledger WHERE consumer = 'inline' AND message_id = {_FIRST}"], "I1"),
        (["DELETE FROM txbox_inbox WHERE consumer = 'copy'", "DELETE FROM ledger WHERE consumer = 'copy'"], "I2 lost"),
        (["UPDATE txbox_inbox SET status = 'dead' WHERE consumer = 'copy'"], "I3 effect, not processed"),
        (["UPDATE account SET balance = balance + 1 WHERE name = 7"], "I5"),
        ([f"DELETE FROM books WHERE cause = {_FIRST}"], "I6 lost"),
        ([f"INSERT INTO books SELECT * FROM books WHERE cause = {_FIRST}"], "I6 doubled"),
        (["UPDATE appended SET previous = 5"], "I7"),
        (["UPDATE txbox_inbox SET attempts = 99"], "I8"),
        ([_OUTAGE], "I8 a fault cost an attempt"),
        (["INSERT INTO ledger VALUES ('inline', 'inline-ok-999', 0)"], "I11"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_checker_catches(
    bank_at_rest: Path, tmp_path: Path, mutations: list[str], invariant: str
) -> None:
    assert any(line.startswith(invariant) for line in _wrong(bank_at_rest, tmp_path, *mutations))
    # for whoever has to find out why
    assert "inline-ok" in (tmp_path / "txbox_inbox.tsv").read_text()


def test_messages_are_the_same_for_a_seed_and_versions_have_no_gaps() -> None:
    assert message_of(1, 8) == message_of(1, 8)
    assert message_of(1, 8).payload != message_of(2, 8).payload
    versions: dict[str, int] = {}
    for number in range(4000):
        if type_of(number) == "version":
            message = message_of(1, number)
            versions[str(message.key)] = versions.get(str(message.key), 0) + 1
            assert f'"n": {versions[str(message.key)]},'.encode() in (message.payload or b"")


def test_a_release_that_follows_brings_its_tables_and_the_running_one_works_with_them(
    bank_at_rest: Path, tmp_path: Path
) -> None:
    shutil.copy(bank_at_rest / "chaos.db", tmp_path)
    url = f"sqlite:///{tmp_path}/chaos.db"
    release.migrate(release.build(tmp_path / "release"), url)
    with Raw(url) as raw, App(url) as app:
        assert raw.value("SELECT max(version) FROM txbox_schema") == NEXT
        app.init()
        with Admin(app) as admin:
            assert admin.status()


def test_senders_of_webhooks_reach_a_worker_that_listens() -> None:
    with Endpoints() as endpoints:
        ports = [endpoints.lend_port(PAYMENTS) for _ in range(2)]
        assert len({*ports, endpoints.lend_port(ENTRIES)}) == 3
        balancer = urlsplit(endpoints.payments().url)
        address = (str(balancer.hostname), int(balancer.port or 0))
        # the first one has been killed
        with socket.create_server(("127.0.0.1", ports[1])) as listener:
            listener.settimeout(DEADLINE_S)
            for _ in range(2):
                with socket.create_connection(address) as sender:
                    worker, _ = listener.accept()
                    with worker:
                        sender.sendall(b"x")
                        assert worker.recv(1) == b"x"
        endpoints.take_back(ports[1])
        with socket.create_connection(address) as sender:
            assert sender.recv(1) == b""


def test_a_server_of_a_killed_run_goes_with_its_disk() -> None:
    server = ServerDirectory(throwaway_name("chaos", 1))
    server.directory.mkdir(parents=True)
    disk = Disk(server.directory / "data")
    (disk.directory / "file").write_text("data")
    server.remove()
    assert not server.directory.exists()


def test_a_line_that_was_cut_off_is_no_fact(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "one")
    journal.write("sent", 1, "a\tb\n")
    with (tmp_path / "one.journal").open("a") as lines:
        lines.write("17.0\tsent\t2")
    assert [fact.words for fact in facts(tmp_path, "sent")] == [("1", "a b ")]


def test_a_run_is_kept_by_its_seed_and_pair(tmp_path: Path) -> None:
    file, shown = tmp_path / "chaos.json", tmp_path / "chaos.md"
    shown.write_text(f"before\n{page.BEGIN}\n{page.END}\nafter\n")
    checked = Checked(sent=10, deliveries=20, effects=10)
    result = Result("sqlite", "redis", 7, 1.0, "SQLite 3", {"kill": 3}, checked, [], tmp_path)
    for kept in (result, replace(result, seed=8), replace(result, wrong=["I1 doubled: 1: a"])):
        page.keep(kept, file, shown)
    assert [(row["seed"], row["wrong"]) for row in page.read(file)] == [(7, ["I1 doubled: 1: a"]), (8, [])]  # fmt: skip
    text = shown.read_text()
    assert "| kill | 6 |" in text
    assert "**1 broken**" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    # a red row stays beside the green one that follows, with what was written about it by hand
    page.keep(result, file, shown)
    (red, *rest) = page.read(file)
    assert [(row["seed"], row["wrong"]) for row in rest] == [(7, []), (8, [])]
    assert "    - mended" in list(page.tables([{**red, "remark": "mended", "elle": "valid"}]))


def test_the_command_runs_each_pair_and_keeps_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[tuple[str, str]] = []
    kept: list[Result] = []

    def run(database: str, broker: str, *, seed: int, minutes: float, **_: object) -> Result:
        runs.append((database, broker))
        if broker == "nats":
            raise StuckError("no progress")
        wrong = ["I1 doubled"] if broker == "kafka" else []
        return Result(database, broker, seed, minutes, "", {}, Checked(), wrong, tmp_path)

    monkeypatch.setattr(__main__, "chaos", run)
    monkeypatch.setattr(page, "keep", kept.append)
    monkeypatch.setattr(provision, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    words = [
        "--databases",
        "sqlite,postgresql",
        "--brokers",
        "nats,kafka,redis",
        "--seed",
        "3",
        "--write-page",
    ]
    assert __main__.main(words) == 1
    assert runs == list(product(("sqlite", "postgresql"), ("nats", "kafka", "redis")))
    pairs = [(result.database, result.broker) for result in kept]
    assert pairs == list(product(("sqlite", "postgresql"), ("kafka", "redis")))
    assert capsys.readouterr().out.count("GIVEN UP") == 2


def test_the_page_shows_what_is_kept() -> None:
    rows = page.read()
    assert "\n".join(page.tables(rows)) in page.PAGE.read_text()
    assert len(KINDS) >= 16
