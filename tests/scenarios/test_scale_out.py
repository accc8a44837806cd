"""What the page about several machines says: processes of one group, a database for each shard, a replica to read."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.cli.test_run_ui import TOKEN
from tests.docs.pages import ROOT, page
from tests.support.command import Command, command
from tests.support.databases import Raw
from tests.support.servers.control import ThrowawayPostgres
from tests.support.servers.postgresql import PASSWORD
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App
from txbox.cli import main

__all__ = ["command"]

_PAGE = page("docs/howto/scale-out.md")
_ORDERS = "CREATE TABLE orders (number bigint, account integer, amount integer)"


class Standby(ThrowawayPostgres):
    """A streaming replica."""

    def __init__(self, primary: ThrowawayPostgres) -> None:
        super().__init__()
        self._primary = primary

    def initialise(self) -> None:
        url = urlsplit(self._primary.url)
        self.run(
            self._bin / "pg_basebackup", "-R", "-X", "stream", "-c", "fast", "-D", self._data,
            "-d", f"host=127.0.0.1 port={url.port} user=txbox password={PASSWORD}",
        )  # fmt: skip


@pytest.fixture
def shards() -> Iterator[list[ThrowawayPostgres]]:
    with ExitStack() as stack:
        servers = [stack.enter_context(ThrowawayPostgres()) for _ in range(2)]
        for server in servers:
            with App(server.url) as app, Raw(server.url) as raw:
                app.init()
                raw.execute(_ORDERS)
        yield servers


@pytest.mark.slow
@pytest.mark.brokers
def test_groups_shards_and_a_replica(
    shards: list[ThrowawayPostgres], kafka_bootstrap: str, command: Command, tmp_path: Path
) -> None:
    """Two processes for each of two shards; one of them is killed; the dashboard of a replica shows it."""
    (code, *_) = (block.text for block in _PAGE.blocks() if block.language == "python")
    run = os.urandom(4).hex()
    code = code.replace("orders-{", f"orders-{run}-{{").replace("billing-{", f"billing-{run}-{{")
    code = code.replace("seconds=30", "seconds=6")  # a killed worker's rows come sooner
    command.file("shop.py", code)
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    topics = [f"orders-{run}-{shard}" for shard in range(2)]
    for made in admin.create_topics([NewTopic(topic, 4, 1) for topic in topics]).values():
        made.result(DEADLINE_S)
    there = {"KAFKA": kafka_bootstrap}
    there |= {f"SHARD_{shard}_URL": server.url for shard, server in enumerate(shards)}
    space: dict[str, Any] = {"__name__": "shop"}
    exec(compile(code.partition("shard = ")[0], "page", "exec"), space)  # noqa: S102  # the page's own code

    workers: list[subprocess.Popen[bytes]] = []
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "acks": "all"})
    numbers = itertools.count()

    def produce(count: int) -> None:
        for number in itertools.islice(numbers, count):
            for _ in range(1 + (number % 10 == 0)):
                producer.produce(
                    space["topic_of"](str(number)), json.dumps({"order": number}).encode(),
                    key=str(number), headers={"message-id": f"m{number}"},
                )  # fmt: skip
        assert producer.flush(20) == 0

    def seen(raw: Raw) -> int:
        return int(raw.rows("SELECT count(*) FROM orders")[0][0])

    with ExitStack() as stack:
        first, second = (stack.enter_context(Raw(server.url)) for server in shards)
        for shard in ("0", "1", "0", "1"):
            log = stack.enter_context((tmp_path / f"log-{len(workers)}").open("wb"))
            worker = subprocess.Popen(
                [sys.executable, "-m", "txbox", "run", "shop:app"],
                cwd=command.directory, env={**command.environment, **there, "SHARD": shard}, stderr=log,
            )  # fmt: skip
            stack.callback(worker.wait, 30)
            stack.callback(worker.kill)
            workers.append(worker)
        produce(1000)
        eventually(lambda: seen(first) and seen(second))
        workers[0].send_signal(signal.SIGKILL)
        produce(1000)
        eventually(lambda: seen(first) + seen(second) >= 2000)
        rows = [raw.rows("SELECT number FROM orders") for raw in (first, second)]
        found = [{int(number) for (number,) in each} for each in rows]
        assert [len(each) for each in rows] == [len(each) for each in found], "each effect once"
        assert found[0] | found[1] == set(range(2000))
        for topic, held in zip(topics, found, strict=True):
            assert {space["topic_of"](str(number)) for number in held} == {topic}

        with Standby(shards[0]) as replica:
            counts = ["status", "--json", "--database"]
            eventually(
                lambda: command(*counts, replica.url).json == command(*counts, shards[0].url).json
            )
            ui = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "txbox", "ui", "--database", replica.url, "--port", "0"],
                    cwd=command.directory, env={**command.environment, "TXBOX_UI_TOKEN": TOKEN},
                    stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
            try:
                assert ui.stderr is not None
                at = re.search(r"http://127\.0\.0\.1:\d+", ui.stderr.readline())
                assert at
                for path in ("/", "/messages", "/failures", "/outbox", "/quarantine", "/database"):
                    asked = urllib.request.Request(
                        at[0] + path, headers={"Authorization": f"Bearer {TOKEN}"}
                    )
                    with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
                        assert answer.status == 200
            finally:
                ui.kill()


def _median(phase: str, contender: str, what: str) -> float:
    stored = json.loads((ROOT / f"benchmarks/results/{phase}.json").read_text())
    found = [each[what] for each in stored["rounds"] if each["contender"] == contender]
    return float(statistics.median(value for value in found if value))


@pytest.mark.parametrize(
    ("row", "phase", "contender"),
    [
        ("one message at a time, no backlog", "p1", "txbox, ordinary handler"),
        ("ordinary, with a backlog", "p2", "txbox, ordinary handler"),
        ("`pipeline=True`", "p3", "txbox, pipeline=True"),
        ("`batch=True`", "p4", "txbox, batch=True"),
    ],
)
def test_the_capacity_model_is_what_was_measured(row: str, phase: str, contender: str) -> None:
    names = ("client_cpu_us", "server_cpu_us", "wal_bytes", "rate")
    client, server, wal, rate = (_median(phase, contender, name) for name in names)
    shown = f"| {row} | {client:.0f} s | {server:.0f} s | {wal:.0f} MB | {rate:,.0f} a second |"
    assert shown in _PAGE.text
    assert 0.75 <= rate * (client + server) / 1e6 <= 1.5


def test_bytes_of_a_row_are_what_was_measured() -> None:
    stored = json.loads((ROOT / "benchmarks/results/p8.json").read_text())
    of_ten_million = {
        each["contender"]: each["more"]
        for each in stored["rounds"]
        if each["contender"].endswith("ids, 10,000,000 rows")
    }
    ordered, random = (
        of_ten_million[f"{kind} ids, 10,000,000 rows"] for kind in ("time-ordered", "random")
    )
    text = " ".join(_PAGE.text.split())
    assert (
        f"{ordered['table_mb'] / 10:.0f} MB and {ordered['index_mb'] / 10:.0f} MB of index" in text
    )
    assert f"{random['index_mb'] / 10:.0f} MB with random ones" in text


def test_the_manifests_ask_for_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    documents = list(yaml.safe_load_all((ROOT / "ops/kubernetes.yaml").read_text()))
    kinds = [each["kind"] for each in documents]
    assert kinds == ["Job", "Deployment", "PodDisruptionBudget", "ScaledObject"]
    pod = documents[1]["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    probes = {
        name: worker[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "liveness", "readiness")
    }
    assert probes == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    words = worker["command"]
    grace_s = int(words[words.index("--grace") + 1].removesuffix("s"))
    assert grace_s < pod["terminationGracePeriodSeconds"]
    assert str(worker["ports"][0]["containerPort"]) == words[words.index("--health-port") + 1]
    commands = [
        words,
        pod["initContainers"][0]["command"],
        documents[0]["spec"]["template"]["spec"]["containers"][0]["command"],
    ]
    for each in commands:
        (program, *arguments) = each
        assert program == "txbox"
        verbs = list(
            itertools.takewhile(
                lambda word: not word.startswith("-") and ":" not in word, arguments
            )
        )
        main([*verbs, "--help"])
        said = capsys.readouterr().out
        assert {word for word in arguments if word.startswith("--")} <= set(
            re.findall(r"--[a-z-]+", said)
        )
