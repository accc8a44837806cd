"""workers, pause, resume and top on the command line."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.command import Command
from tests.support.databases import Raw
from tests.support.shop import as_id
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm import Warm
from txbox.admin.activity import Rates, Snapshot, WorkerStatus
from txbox.cli import workers
from txbox.cli.output import clipped
from txbox.store.activity import Trouble

HOSTILE = "b\x1b[31m\u202e<script>\x07 " + "x" * 100


def test_a_pause_and_its_end(shop: Command) -> None:
    dry = shop("pause", "billing", "--dry-run")
    assert dry.out == "billing would be paused; 0 workers would stop running it.\n"
    assert shop("pause", "billing", "--json", "--actor", "anna", "--reason", "bank").json == {
        "action": "pause", "consumer": "billing", "dry_run": False, "changed": True,
    }  # fmt: skip
    again = shop("pause", "billing").out
    assert again.startswith("billing is paused already, since ")
    assert again.endswith("by anna: bank.\n")
    for name in ("status", "workers"):
        lines = shop(name).out.splitlines()
        place = lines.index("Paused:")
        assert lines[place + 2].split()[0] == "billing"
        assert lines[place + 2].endswith("anna  bank")
        (found,) = shop(name, "--json").json["paused"]
        assert (found["consumer"], found["actor"], found["reason"]) == ("billing", "anna", "bank")
    resumed = shop("resume", "billing", "--reason", "it is back").out
    assert resumed.startswith("billing is resumed; it was paused since ")
    assert shop("resume", "billing").out == "billing is not paused.\n"
    assert shop("workers", "--json").json["paused"] == []


def test_status_says_what_no_worker_runs(shop: Command) -> None:
    shop("send", "orders", "--id", "m", "--data", "{}")
    shop("pause", "ledger")
    with Raw(shop.environment["SHOP_URL"]) as raw:
        raw.execute("UPDATE txbox_inbox SET next_attempt_at = '2026-01-01 00:00:00'")
    said = shop("status").out
    assert "billing has 1 message overdue by up to " in said
    assert "no running worker has this consumer." in said
    assert "ledger has 1 message" not in said
    found = {one["code"]: one["problem"] for one in shop("status", "--json").json["findings"]}
    assert set(found) == {"consumer-unserved", "consumer-paused"}
    assert found["consumer-paused"].endswith("; 1 message is waiting.")


def test_a_retry_says_who_is_missing_and_what_cannot_be_retried(shop: Command) -> None:
    for name in ("a", "b"):
        shop("send", "orders", "--id", name, "--data", "{}")
    with Raw(shop.environment["SHOP_URL"]) as raw:
        raw.execute(
            "UPDATE txbox_inbox SET status = 'dead' WHERE consumer = ?", (as_id(raw, "billing"),)
        )
        raw.execute(
            "UPDATE txbox_inbox SET payload = NULL, has_payload = FALSE"
            " WHERE status = 'dead' AND message_id = ?",
            (as_id(raw, "a"),),
        )
    done = shop("retry", "--all", "--yes")
    assert "1 message retried." in done.out
    assert "1 message without a payload cannot be retried: send" in done.out
    assert "warning: No running worker has the consumer 'billing'" in done.err
    assert shop("retry", "--all", "--yes", "--json").json["without_payload"] == 1


def test_a_pause_of_a_name_that_nobody_has_says_so(shop: Command) -> None:
    assert "No consumer of that name is known" in shop("pause", "bilingg", "--dry-run").out
    assert "No consumer of that name is known" in shop("pause", "bilingg").out
    assert "known" not in shop("pause", "ledger").out


def test_a_paused_consumer_does_not_run_and_a_resumed_one_does(shop: Command) -> None:
    shop("pause", "billing")
    shop("send", "orders", "--id", "m", "--data", "{}")
    shop("run", "--once")
    found = {
        each["consumer"]: each["counts"] for each in shop("status", "--json").json["consumers"]
    }
    assert found == {"billing": {"pending": 1}, "ledger": {"processed": 1}}
    shop("resume", "billing")
    shop("run", "--once")
    assert shop("show", "billing", "m", "--json").json["message"]["status"] == "processed"


def test_a_name_that_nobody_can_have_is_refused(shop: Command) -> None:
    assert "invalid consumer name ''" in shop("pause", "", code=2).sentence


def test_workers_and_top_of_a_service_that_runs(shop: Command) -> None:
    with Warm(
        ["txbox", "run", "--app", "shop:app"],
        cwd=shop.directory, env=shop.environment, stderr=subprocess.PIPE,
    ) as service:  # fmt: skip
        try:
            (found,) = eventually(lambda: shop("workers", "--json").json["workers"])
            assert (found["pid"], found["kind"], found["app"]) == (service.pid, "run", "shop:app")
            assert found["consumers"] == ["billing", "ledger"]
            shop("send", "orders", "--id", "m", "--data", "{}")

            def processed() -> list[Any]:
                seen = shop("top", "--once", "--json").json
                return [each for each in seen["consumers"] if each["processed_per_s"] > 0]

            assert len(eventually(lambda: len(processed()) == 2 and processed())) == 2
            lines = shop("top", "--once").out.splitlines()
            assert max(map(len, lines)) <= 80
            assert any(line.startswith("billing ") for line in lines)
            assert any(f":{service.pid} " in line for line in lines)
            assert "stops running it within a few seconds" in shop("pause", "billing").out
            # heard without a restart
            eventually(lambda: shop("workers", "--json").json["workers"][0]["paused"])
        finally:
            service.send_signal(signal.SIGTERM)
            assert service.wait(DEADLINE_S) == 0
    assert shop("workers").out.startswith("No process of `txbox run`")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_ends_cleanly_on_a_signal_and_gives_the_terminal_back(
    shop: Command, number: signal.Signals
) -> None:
    main, terminal = pty.openpty()
    with Warm(
        ["txbox", "top", "--app", "shop:app", "--interval", "50ms"],
        cwd=shop.directory, env=shop.environment, stdout=terminal, stderr=subprocess.PIPE,
    ) as top:  # fmt: skip
        os.close(terminal)
        seen = bytearray()

        def read() -> None:
            try:
                while part := os.read(main, 4096):
                    seen.extend(part)
            except OSError:
                # Linux ends a pseudo-terminal so
                return

        reader = threading.Thread(target=read)
        reader.start()
        # a second look: it is on the screen
        eventually(lambda: seen.count(b"txbox top") > 1)
        top.send_signal(number)
        assert top.wait(DEADLINE_S) == 0
        assert top.stderr is not None
        assert top.stderr.read() == b""
        reader.join(DEADLINE_S)
    os.close(main)
    assert seen.startswith(b"\x1b[?1049h\x1b[?25l")
    assert seen.endswith(b"\x1b[?25h\x1b[?1049l")


def test_top_as_json_looks_once(shop: Command) -> None:
    assert "add --once" in shop("top", "--json", code=2).sentence


def test_top_shows_nothing_that_steers_a_terminal_and_fits_80_columns() -> None:
    now = datetime.now(UTC)
    rates: dict[str, Any] = {
        "received_per_s": 123456.0, "processed_per_s": 99.95, "duplicate_per_s": 0.0, "failed": 1_234_567, "dead": 0,
        "quarantined": 9_999, "p50_s": 0.0004, "p95_s": 0.9996, "p99_s": 99.96, "oldest_s": 10_000_000.0,
    }  # fmt: skip
    consumer = Rates(kind="consumer", name=HOSTILE, paused=True, **rates)
    route = Rates(kind="route", name=HOSTILE, paused=False, **rates)
    trouble = Trouble(kind="route", name=HOSTILE, since_s=0, error=HOSTILE)
    worker = WorkerStatus(
        worker="w", kind="maintain", state="draining", host=HOSTILE, pid=4194304, version="10.20.30.dev1", app=HOSTILE,
        consumers=(HOSTILE,), paused=(), sources={}, routes=(), lanes=10_000, busy=10_000, leases=123_456,
        in_flight=99_999, troubles=(trouble,), started_at=now - timedelta(days=1000), seen_at=now,
    )  # fmt: skip
    lines = workers._screen(
        Snapshot(
            at=now,
            over_s=61.5,
            consumers=(consumer,),
            routes=(route,),
            workers=(worker,),
            paused=(),
        )
    )
    for line in lines:
        assert line.isprintable()
        assert len(line) <= 80
    assert "\\x1b[31m" in "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "width", "right", "shown"),
    [
        ("billing", 9, False, "billing  "),
        ("12", 4, True, "  12"),
        ("billing-service", 8, False, "billing…"),
        ("漢字漢字", 5, False, "漢字…"),
        ("漢字漢字", 4, False, "漢…  "),
        ("e\u0301e", 3, False, "e\u0301e "),
    ],
)
def test_a_cell_has_exactly_its_columns(text: str, width: int, right: bool, shown: str) -> None:
    assert clipped(text, width, right=right).rstrip() == shown.rstrip()


def test_the_table_of_workers_escapes_what_hosts_are_called(shop: Command) -> None:
    url = shop.environment["SHOP_URL"]
    with Raw(url) as raw:
        raw.execute(
            "INSERT INTO txbox_worker (worker, kind, host, pid, version, app, consumers, sources, routes, lanes, state,"
            " busy, leases, in_flight) VALUES ('w', 'run', ?, 1, '1', ?, '[]', '{}', '[]', 1, 'running', 0, 0, 0)",
            (HOSTILE, HOSTILE),
        )
    for name in ("workers", "top"):
        said = shop(name, *(["--once"] if name == "top" else [])).out
        assert "\x1b" not in said
        assert "\u202e" not in said
