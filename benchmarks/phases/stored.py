"""P10, and stored mode while another session holds an old snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg

from benchmarks.beside import Contender
from benchmarks.result import Bar, Round, ratios
from benchmarks.setting import Setting
from benchmarks.workload import Work, in_sets, writes

_STORED: dict[str, Any] = {"mode": "stored", "until_processed": True}


def p10(on: Setting) -> dict[str, Any]:
    one = on.txbox("stored, pipeline=True", writes, pipeline=True, **_STORED)
    sets = on.txbox("stored, batch=True", in_sets, batch=True, **_STORED)
    work = on.work(4)
    rounds = on.interleaved(
        [(on.naive(), on.work()), (one, work), (sets, work), (on.limit(), work)]
    )
    return on.result(
        "P10",
        "mode='stored': acknowledged once the payload is stored, processed from the table",
        "the whole workload waiting from the start, one worker with one lane; timed from the first message received to "
        "the last one processed, latency likewise",
        [
            Bar(f"{one.name}: at least 7 times naive", 7.0, ratios(rounds, one.name, "naive")),
            Bar(f"{sets.name}: at least 8 times naive", 8.0, ratios(rounds, sets.name, "naive")),
        ],
        rounds,
    )


class Snapshot:
    """A contender while another session holds a snapshot from before its round."""

    def __init__(self, on: Setting, inner: Contender) -> None:
        self.name = f"{inner.name}, snapshot held"
        self._url, self._inner = on.url, inner

    def round(self, work: Work) -> Round:
        with psycopg.connect(self._url) as other:
            other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            other.execute("SELECT count(*) FROM pg_class")
            return replace(self._inner.round(work), contender=self.name)


def snapshot(on: Setting) -> dict[str, Any]:
    plain = on.txbox("stored, pipeline=True", writes, pipeline=True, **_STORED)
    held = Snapshot(on, plain)
    work = on.work(10)
    naive = Snapshot(on, on.naive())
    rounds = on.interleaved([(naive, on.work()), (plain, work), (held, work)])
    return on.result(
        "SNAPSHOT",
        "mode='stored' while another session holds an old snapshot",
        "the handler of P10; the other session is in a REPEATABLE READ transaction that began before the round, so "
        "that nothing that dies in it can be removed",
        [
            Bar(
                "at least 0.5 times the rate without",
                0.5,
                ratios(rounds, held.name, plain.name),
                stretch=True,
            )
        ],
        rounds,
    )
