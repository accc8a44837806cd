"""P16: the peers, each driven its own fastest documented way, beside naive and txbox on the same server."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import measure
from benchmarks.peers import toolchain
from benchmarks.peers.contenders import CONTENDERS, Contender, Server
from benchmarks.peers.servers import LogicalPostgres, database_on, redis
from benchmarks.servers import fresh_database
from benchmarks.workload import Verified, Work, create_tables, order_paid, verify
from tests.servers import ServerError

NUMBER = "P16"
TITLE = "Peers, each with its fastest documented settings"

_DRIVERS = Path(__file__).parent / "drivers"
_WARM = 400
#: delivered once more after everything has been processed: what a peer's deduplication has forgotten runs again
_LATE = 20
#: shorter than this, nothing was ingested: fed from memory
_NOTHING_S = 0.001


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one contender."""

    contender: str
    messages: int
    rate: float  # deliveries a second, duplicates included, of storing and processing together
    ingest_rate: float | None
    process_rate: float
    client_cpu_us: float  # a delivery, of the driver's process
    verified: Verified
    late_doubled: int  # of _LATE duplicates delivered after completion, how many ran again


class Driver:
    """A driver's process; it is given files of deliveries and answers with what they took."""

    def __init__(self, contender: Contender, url: str, scratch: Path, redis: str) -> None:
        self._name = contender.name
        self._scratch = scratch
        self._log = (scratch / "stderr").open("w+")
        self._process = subprocess.Popen(
            [*_interpreter(contender), str(_DRIVERS / contender.driver), *contender.arguments],
            cwd=measure.ROOT,
            env=os.environ
            | {"DATABASE_URL": url, "REDIS_URL": redis, "PYTHONPATH": str(measure.ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answer("ready")

    def consume(self, work: Work) -> dict[str, float]:
        path = self._scratch / "deliveries"
        with path.open("w") as file:
            for own in work.deliveries:
                file.write(json.dumps({"id": own.id, "body": json.loads(own.payload)}) + "\n")
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        took: dict[str, float] = json.loads(self._answer("{"))
        return took

    def _answer(self, start: str) -> str:
        assert self._process.stdout is not None
        # a peer may print too
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise ServerError(f"The driver of {self._name} ended early:\n{self._tail()}")

    def _tail(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-20:])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in each round of naive; the others get their share, see `CONTENDERS`.
    """
    toolchain.install()
    load = [os.getloadavg()[0]]
    done: list[Run] = []
    with ExitStack() as stack:
        logical = stack.enter_context(LogicalPostgres())
        redis_url = redis()
        for number in range(1, rounds + 1):
            # who goes first alternates
            for own in CONTENDERS[:: 1 if number % 2 else -1]:
                server = logical.url if own.server is Server.LOGICAL else None
                done.append(one_round(own, messages, number, server=server, redis_url=redis_url))
                print(f"  round {number}: {_sentence(done[-1])}", file=sys.stderr, flush=True)
            load.append(os.getloadavg()[0])
        with fresh_database("versions") as url:
            circumstances = measure.circumstances(url)
    circumstances["versions"] |= toolchain.versions()
    bars = _bars(done)
    worst = min(bars, key=lambda own: own["ratio"] / own["bar"])
    return {
        "phase": NUMBER,
        "title": TITLE,
        "method": f"{rounds} rounds in turns; distinct messages a round: "
        + ", ".join(f"{own.name} {int(messages * own.share):,}" for own in CONTENDERS)
        + ", plus 10 % duplicates; a fresh database and a process of its own for each, warmed up with "
        f"{_WARM} messages; rate: deliveries over the time to store them all and then to process them all. "
        "How each is driven: benchmarks/peers/README.md. The ratio is the worst of the bars, as a share of its bar",
        "bar": 1.0,
        "ratio": worst["ratio"] / worst["bar"],
        "ratios": [ratio / worst["bar"] for ratio in worst["ratios"]],
        "yardstick": f"{worst['bar']:g} times {worst['peer']}",
        "bars": bars,
        "load_1min": load,
        "contenders": _summary(done),
        "rounds": measure.as_json(done),
        **circumstances,
    }


def one_round(
    contender: Contender, messages: int, seed: int, *, server: str | None, redis_url: str
) -> Run:
    """One contender on a fresh database.

    Args:
        server: another server's URL than that of the durable one.
        redis_url: for those who are fed by it.
    """
    work = order_paid(int(messages * contender.share), seed=seed)
    with (
        database_on(server) as url,
        psycopg.connect(url, autocommit=True) as admin,
        tempfile.TemporaryDirectory() as scratch,
    ):
        create_tables(admin)
        driver = Driver(contender, url, Path(scratch), redis_url)
        try:
            driver.consume(order_paid(_WARM, seed=1_000_000))
            admin.execute("TRUNCATE orders")
            admin.execute("UPDATE account SET balance = 0")
            admin.execute("VACUUM account")
            admin.execute("CHECKPOINT")
            took = driver.consume(work)
            # what its own tables hold differs from peer to peer: effects are compared, not rows of an inbox
            verified = verify(admin, work, f"SELECT {work.distinct}")
            late = list({own.id: own for own in work.deliveries[: 2 * _LATE]}.values())
            driver.consume(replace(work, deliveries=late[:_LATE]))
            again = verify(admin, work, f"SELECT {work.distinct}")
        finally:
            driver.close()
    count = len(work.deliveries)
    return Run(
        contender=contender.name,
        messages=count,
        rate=count / (took["ingest_s"] + took["process_s"]),
        ingest_rate=count / took["ingest_s"] if took["ingest_s"] > _NOTHING_S else None,
        process_rate=count / took["process_s"],
        client_cpu_us=took["cpu_s"] / count * 1e6,
        verified=verified,
        late_doubled=again.doubled - verified.doubled,
    )


def _bars(done: Sequence[Run]) -> list[dict[str, Any]]:
    """Each bar with its ratios: rate of txbox over rate of the peer, round by round."""
    rates: dict[str, list[float]] = {}
    for own in done:
        rates.setdefault(own.contender, []).append(own.rate)
    found: list[dict[str, Any]] = []
    for peer in CONTENDERS:
        for ours, bar in peer.bars.items():
            pairs = zip(rates[ours], rates[peer.name], strict=True)
            ratios = [own / other for own, other in pairs]
            found.append(
                {
                    "name": f"{ours} / {peer.name}",
                    "ours": ours,
                    "peer": peer.name,
                    "bar": bar,
                    "ratio": statistics.median(ratios),
                    "ratios": ratios,
                }
            )
    return found


def _summary(done: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Medians over the rounds of each contender, and the sums of what went wrong."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(own.contender for own in done):
        mine = [own for own in done if own.contender == name]
        ingest = [own.ingest_rate for own in mine if own.ingest_rate is not None]
        found[name] = {
            "rounds": len(mine),
            "messages": mine[0].messages,
            "rate": statistics.median(own.rate for own in mine),
            "rate_min": min(own.rate for own in mine),
            "rate_max": max(own.rate for own in mine),
            "ingest_rate": statistics.median(ingest) if ingest else None,
            "process_rate": statistics.median(own.process_rate for own in mine),
            "client_cpu_us": statistics.median(own.client_cpu_us for own in mine),
            "lost": sum(own.verified.lost for own in mine),
            "doubled": sum(own.verified.doubled for own in mine),
            "late_doubled": sum(own.late_doubled for own in mine),
            "good": all(own.verified.good for own in mine),
        }
    return found


def _sentence(own: Run) -> str:
    ingest = f"{own.ingest_rate:,.0f}" if own.ingest_rate else "none"
    return (
        f"{own.contender}: {own.rate:,.0f} msg/s (ingest {ingest}, process {own.process_rate:,.0f}, "
        f"client {own.client_cpu_us:,.0f} us), {own.messages:,} deliveries, lost {own.verified.lost}, "
        f"doubled {own.verified.doubled}, late duplicates run again {own.late_doubled} of {_LATE}"
    )


def _interpreter(contender: Contender) -> list[str | Path]:
    if contender.driver == "memory.py":
        return [sys.executable]
    return [toolchain.NODE if contender.driver.endswith(".mjs") else toolchain.PYTHON]


def _main() -> None:
    """`python -m benchmarks.peers.p16 [PART OF A NAME …]`: one round of those, nothing stored."""
    toolchain.install()
    chosen = [own for own in CONTENDERS if any(part in own.name for part in sys.argv[1:] or [""])]
    with ExitStack() as stack:
        redis_url = redis()
        needed = any(own.server is Server.LOGICAL for own in chosen)
        logical = stack.enter_context(LogicalPostgres()) if needed else None
        for own in chosen:
            server = logical.url if logical and own.server is Server.LOGICAL else None
            done = one_round(own, 2000, 1, server=server, redis_url=redis_url)
            print(_sentence(done), flush=True)


if __name__ == "__main__":
    _main()
