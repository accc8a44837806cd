"""One peer as a contender: a fresh database and a process of its own for every round."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from benchmarks.peers import toolchain
from benchmarks.peers.contenders import Spec
from benchmarks.peers.servers import database_on
from benchmarks.place import Gauges, Place, checkpoint
from benchmarks.result import Round, Verified
from benchmarks.workload import Work, create_tables, order_paid, verify
from tests.support.servers import ServerError

#: Delivered once more after all has been processed: what a peer's deduplication has forgotten runs again.
LATE = 20
WARM = 400

_DRIVERS = Path(__file__).parent / "drivers"
_WAIT_S = 300.0
_END_S = 5.0


class Driver:
    """A driver's process: it is given files of deliveries, and answers with what they took.

    Raises:
        ServerError: the driver ended, or took too long; with the end of what it wrote.
    """

    def __init__(self, spec: Spec, url: str, redis: str, scratch: Path) -> None:
        self._name = spec.name
        self._scratch = scratch
        self._log = scratch / "stderr"
        file, *arguments = spec.driver
        python = toolchain.NEWER if spec.newer else toolchain.PYTHON
        interpreter = toolchain.NODE if file.endswith(".mjs") else python
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(interpreter), str(_DRIVERS / file), *arguments],
                cwd=scratch,
                env=os.environ | {"DATABASE_URL": url, "REDIS_URL": redis},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._read("ready")

    def consume(self, work: Work) -> dict[str, float]:
        """Returns `ingest_s`, `process_s` and `cpu_s`; `gave_up` where not all was done."""
        path = self._scratch / "deliveries"
        lines = (
            f'{{"id": "{delivery.id}", "body": {delivery.payload.decode()}}}'
            for delivery in work.deliveries
        )
        path.write_text("\n".join(lines))
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        took: dict[str, float] = json.loads(self._read("{"))
        return took

    def _read(self, start: str) -> str:
        assert self._process.stdout is not None
        watchdog = threading.Timer(_WAIT_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith(start):  # the peer may print too
                    return line
        finally:
            watchdog.cancel()
        tail = "\n".join(self._log.read_text().splitlines()[-20:])
        raise ServerError(f"The driver of {self._name} did not finish:\n{tail}")

    def close(self) -> None:
        """Give it time to clear away what it keeps outside its database."""
        try:
            self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


class Peer:
    """A contender of `Setting.interleaved`.

    Args:
        server: the URL of the server, None for the durable one.
        redis: what feeds FastStream.
    """

    def __init__(self, spec: Spec, server: str | None, redis: str) -> None:
        self.name = spec.name
        self.spec = spec
        self._server = server
        self._redis = redis

    def round(self, work: Work) -> Round:
        """What goes wrong with one peer is its own failure; the others' rounds stay worth having."""
        try:
            return self._round(work)
        except ServerError as error:
            said = str(error).strip().splitlines()
            failure = f"{said[0]} {said[-1]}"
            return Round(self.name, 0, None, None, None, None, Verified(0, 0), failure=failure)

    def _round(self, work: Work) -> Round:
        with (
            database_on(self._server) as url,
            tempfile.TemporaryDirectory() as scratch,
            Place(url).connect() as admin,
        ):
            create_tables(admin)
            driver = Driver(self.spec, url, self._redis, Path(scratch))
            gauges = Gauges(url)
            try:
                driver.consume(order_paid(WARM, seed=1_000_000))
                admin.execute("TRUNCATE orders")
                admin.execute("UPDATE account SET balance = 0")
                admin.execute("VACUUM ANALYZE account")
                checkpoint(admin)
                began = gauges.read()
                took = driver.consume(work)
                ended = gauges.read()
                verified = verify(admin, work)
                dead = Place(url).dead_tuples()
                once = list(
                    {delivery.id: delivery for delivery in work.deliveries[: 2 * LATE]}.values()
                )
                driver.consume(replace(work, deliveries=once[:LATE]))
                again = verify(admin, work)
            finally:
                gauges.close()
                driver.close()
        count = len(work.deliveries)
        more = {
            "processed, 1,000/s": count / took["process_s"] / 1e3,
            "late duplicates run again, %": 100 * (again.doubled - verified.doubled) / LATE,
        }
        if not self.spec.from_memory:
            more = {"stored, 1,000/s": count / took["ingest_s"] / 1e3, **more}
        server_cpu_s = None
        if began.server_cpu_s is not None and ended.server_cpu_s is not None:
            server_cpu_s = ended.server_cpu_s - began.server_cpu_s
        wal = None
        if began.wal_bytes is not None and ended.wal_bytes is not None:
            wal = (ended.wal_bytes - began.wal_bytes) / count
        spent_s = took["process_s"] + (0.0 if self.spec.from_memory else took["ingest_s"])
        return Round(
            contender=self.name,
            messages=count,
            rate=count / spent_s,
            p50_ms=None,
            p99_ms=None,
            client_cpu_us=took["cpu_s"] / count * 1e6,
            server_cpu_us=None if server_cpu_s is None else server_cpu_s / count * 1e6,
            wal_bytes=wal,
            dead_tuples=dead,
            verified=verified,
            failure="not done after a minute" if took.get("gave_up") else None,
            more=more,
        )
