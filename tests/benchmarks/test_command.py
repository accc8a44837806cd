"""`python -m benchmarks --database URL`: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from benchmarks.__main__ import main
from benchmarks.place import SCHEMAS


def _schemas(url: str) -> set[str]:
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute("SELECT nspname FROM pg_namespace").fetchall()
    return {name for (name,) in rows} & set(SCHEMAS)


def _bench(url: str, *more: str) -> int:
    return main([*more, "--database", url, "--messages", "60", "--rounds", "1", "--yes"])


def test_json_has_every_phase_with_bars_contenders_and_circumstances(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # a bar may be missed on a busy machine; nothing else may go wrong
    assert _bench(url, "P3", "P13", "--json") in (0, 1)

    documents: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [document["phase"] for document in documents] == ["P3", "P13"]
    for document in documents:
        assert {"title", "method", "date", "machine", "versions", "server", "rounds"} <= set(
            document
        )
        assert all(bar["text"] and len(bar["pairs"]) == 1 for bar in document["bars"])
    naive = documents[0]["contenders"]["naive"]
    assert naive["messages"] == 66
    assert naive["p99_ms"] >= naive["p50_ms"] > 0
    assert naive["client_cpu_us"] > 0
    assert naive["wal_bytes"] > 100
    assert _schemas(url) == set()


def test_the_table_shows_rates_and_verdicts(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench(url, "P3") in (0, 1)

    out = capsys.readouterr().out
    assert "naive" in out
    assert "| lost | doubled |" in out
    assert "- at least 12 times naive: **" in out
    assert "fsync=" in out
    assert "at least at least" not in out


def test_a_schema_of_somebody_else_is_left_alone(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA txbox_bench")
        connection.execute("CREATE TABLE txbox_bench.mine (id int)")

    with pytest.raises(SystemExit, match="2"):
        _bench(url, "P3")

    assert "was not made by the benchmarks" in capsys.readouterr().err
    with psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute("SELECT count(*) FROM txbox_bench.mine").fetchone() == (0,)


def test_what_an_aborted_run_left_behind_is_made_anew(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA txbox_bench")
        connection.execute(
            "COMMENT ON SCHEMA txbox_bench IS 'made by the benchmarks of txbox, which drop it'"
        )
        connection.execute("CREATE TABLE txbox_bench.orders (id int)")

    assert _bench(url, "P3") in (0, 1)

    assert _schemas(url) == set()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--database", "sqlite:///x.db", "--yes"], "must be PostgreSQL, and this is sqlite"),
        (["--database", "postgresql://u@127.0.0.1:1/d", "--yes"], "cannot be reached"),
        (["--database", "postgresql://u@127.0.0.1:1/d"], "add --yes"),
        (["P99"], "no phase P99"),
        (["P99", "--database", "postgresql://u@127.0.0.1:1/d"], "no phase P99"),
        (["P14", "--database", "postgresql://u@127.0.0.1:1/d", "--yes"], "no phase P14"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_what_it_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err
