"""Real processes: drained, ended at once, killed, supervised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.databases import NewDatabase
from tests.support.proxy import Proxy
from tests.support.servers import ROOT
from tests.support.shop import CONSUMER, Shop, effects, opened, paid, statuses
from tests.support.sources import event_line, write_events
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import Process


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "orders.jsonl"
    write_events(path, range(3))
    return path


def _register(shop: Shop) -> None:
    """The parent only sends: its handler is never run."""
    shop.handler(consumer=CONSUMER)


def test_sigterm_drains(shop: Shop, orders: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    orders.write_text(event_line("m1", type="hold") + event_line("m2"))
    with Process(url=shop.url, file=str(orders), follow=True, gate=str(gate)) as process:
        process.says("handling /test m1")
        process.process.send_signal(signal.SIGTERM)
        process.says("draining")
        # only the gate can end the handler, and with it the drain
        assert process.process.poll() is None
        gate.touch()
        assert process.ended() == 0
    assert effects(shop.raw) == 1
    assert statuses(shop.raw) == {"processed": 1}
    with Process(url=shop.url, file=str(orders), once=True, gate=str(gate)) as process:
        assert process.ended() == 0
        assert not [line for line in process.lines if line.startswith("handling /test m1")]
    assert effects(shop.raw) == 2


def test_a_second_sigterm_ends_it_at_once(shop: Shop, orders: Path, tmp_path: Path) -> None:
    orders.write_text(event_line("m1", type="hold"))
    with Process(url=shop.url, file=str(orders), gate=str(tmp_path / "gate")) as process:
        process.says("handling")
        process.process.send_signal(signal.SIGTERM)
        process.process.send_signal(signal.SIGINT)
        assert process.ended() == 1
    assert eventually(lambda: effects(shop.raw) == 0)
    assert statuses(shop.raw) == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_ends_at_once(shop: Shop, orders: Path, number: signal.Signals) -> None:
    with Process(url=shop.url, file=str(orders), follow=True) as process:
        process.says("handled", 3)
        process.process.send_signal(number)
        assert process.ended() == 0
        assert process.errors == ""
    assert effects(shop.raw) == 3


def test_leased_rows_that_were_not_started_go_back(shop: Shop, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    _register(shop)
    shop.app.send(paid("m0", type="hold"))
    for number in range(1, 6):
        shop.app.send(paid(f"m{number}"))
    with Process(url=shop.url, gate=str(gate)) as process:
        process.says("handling m0")
        process.process.send_signal(signal.SIGTERM)
        process.says("draining")
        gate.touch()
        assert process.ended() == 0
    assert statuses(shop.raw) == {"processed": 1, "pending": 5}
    assert shop.raw.value("SELECT max(starts) FROM txbox_inbox") == 0


def test_a_killed_worker_loses_nothing(shop: Shop, orders: Path, tmp_path: Path) -> None:
    write_events(orders, range(20))
    with orders.open("a") as file:
        file.write(event_line("held", type="hold"))
    gate = tmp_path / "gate"
    with Process(url=shop.url, file=str(orders), gate=str(gate)) as process:
        process.says("handling /test held")
        process.process.kill()
        assert process.ended() == -signal.SIGKILL
    gate.touch()
    with Process(url=shop.url, file=str(orders), gate=str(gate), once=True) as process:
        assert process.ended() == 0
    assert effects(shop.raw) == 21
    assert statuses(shop.raw) == {"processed": 21}


def test_a_message_that_kills_its_process_runs_out_of_starts(shop: Shop) -> None:
    _register(shop)
    shop.app.send(paid("bad", type="die"))
    for number in range(4):
        shop.app.send(paid(f"m{number}"))
    for _ in range(3):
        plan: dict[str, Any] = {"url": shop.url, "lease_s": 0.3, "maintenance": True}
        with Process(**plan) as process:
            assert process.ended() == -signal.SIGKILL
    with Process(url=shop.url, lease_s=0.3, maintenance=True, once=True) as process:
        assert process.ended() == 0
    row = shop.row("bad")
    assert (row.status, row.error_type) == ("dead", "KilledItsProcess")
    assert statuses(shop.raw) == {"dead": 1, "processed": 4}
    assert effects(shop.raw) == 4


# -- several processes ------------------------------------------------------------------------


@pytest.fixture
def postgresql_shop(postgresql_url: str) -> Iterator[Shop]:
    with opened(postgresql_url) as shop:
        _register(shop)
        yield shop


def _pids(process: Process, times: int) -> list[int]:
    return [int(line.split()[1]) for line in process.says("started", times)]


def test_two_processes_share_the_work_and_drain_together(
    postgresql_shop: Shop, orders: Path
) -> None:
    shop = postgresql_shop
    write_events(orders, range(20))
    plan: dict[str, Any] = {"url": shop.url, "file": str(orders), "follow": True, "processes": 2}
    with Process(**plan) as process:
        first, second = _pids(process, 2)
        assert first != second
        eventually(lambda: effects(shop.raw) == 20)
        process.process.send_signal(signal.SIGTERM)
        assert process.ended() == 0
    assert shop.raw.value("SELECT token FROM txbox_job") is None


def test_two_processes_end_when_idle(postgresql_shop: Shop, orders: Path) -> None:
    shop = postgresql_shop
    for number in range(30):
        shop.app.send(paid(f"m{number}"))
    with Process(url=shop.url, file=str(orders), once=True, processes=2) as process:
        assert process.ended() == 0
    assert statuses(shop.raw) == {"processed": 33}


def test_a_child_that_dies_is_started_again(postgresql_shop: Shop) -> None:
    with Process(url=postgresql_shop.url, processes=2) as process:
        first, _ = _pids(process, 2)
        os.kill(first, signal.SIGKILL)
        _pids(process, 3)
        process.process.send_signal(signal.SIGTERM)
        assert process.ended() == 0
        assert "ended with status -9" in process.errors


def test_a_wrong_configuration_stops_all_processes(new_database: NewDatabase) -> None:
    with Process(url=new_database("postgresql", schema=False), processes=2) as process:
        assert process.ended() == 2
        assert "txbox init" in process.errors


def test_a_child_that_is_started_again_waits_until_the_database_is_back(
    postgresql_shop: Shop,
) -> None:
    with (
        Proxy(postgresql_shop.url) as proxy,
        Process(url=proxy.url, processes=2) as process,
    ):
        first, second = _pids(process, 2)
        proxy.refuse()
        os.kill(first, signal.SIGKILL)
        # the one in its place waits for the database, as the other one does
        eventually(lambda: "is started again" in process.errors)
        eventually(lambda: "ConsumptionPaused" in process.errors)
        assert process.process.poll() is None
        assert Path(f"/proc/{second}").exists()
        proxy.go_on()
        _pids(process, 3)
        process.process.send_signal(signal.SIGTERM)
        assert process.ended() == 0


def test_a_child_that_cannot_start_beside_one_that_has_is_started_again(tmp_path: Path) -> None:
    child = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "here = Path(sys.argv[1])\n"
        "try: (here / 'first').touch(exist_ok=False)\n"
        "except FileExistsError:\n"
        "    while not (here / 'consuming').exists(): time.sleep(0.01)\n"
        "    try: (here / 'failed').touch(exist_ok=False)\n"
        "    except FileExistsError: (here / 'again').touch()\n"
        "    else: sys.exit(2)\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "from txbox.worker.supervisor import tell_parent\n"
        "tell_parent()\n"
        "(here / 'consuming').touch()\n"
        "while True: time.sleep(1)\n"
    )
    script = (
        "import sys\n"
        "from txbox.worker import supervise\n"
        f"sys.exit(supervise([sys.executable, '-c', {child!r}, {str(tmp_path)!r}], 2))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as parent:
        try:
            eventually((tmp_path / "again").exists)
        finally:
            parent.terminate()
        assert parent.wait(DEADLINE_S) == 0


def test_children_drain_when_their_parent_is_killed(postgresql_shop: Shop) -> None:
    with Process(url=postgresql_shop.url, processes=2) as process:
        pids = _pids(process, 2)
        process.process.kill()
        process.ended()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_the_readers_of_one_file_take_turns(postgresql_shop: Shop, orders: Path) -> None:
    shop = postgresql_shop
    plan: dict[str, Any] = {"url": shop.url, "file": str(orders), "follow": True}
    with Process(**plan) as first:
        first.says("handled", 3)
        with Process(**plan) as second:
            second.says("started")
            first.process.kill()
            first.ended()
            with orders.open("a") as file:
                file.write(event_line("later"))
            second.says("handled /test later")
            second.process.send_signal(signal.SIGTERM)
            assert second.ended() == 0
    assert effects(shop.raw) == 4
