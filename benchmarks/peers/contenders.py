"""The peers of P16: driver, number of messages, bars."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spec:
    """One peer, driven one way.

    Args:
        driver: a file in drivers/, and its arguments.
        times: as many distinct messages as naive gets, so that a round takes seconds for everyone.
        pipelined, stored: bars: what txbox with `pipeline=True`, and with `mode="stored"` too, must
            reach, as a multiple of this peer's rate.
        logical: needs a server with `wal_level = logical`.
        from_memory: nothing to store, as with txbox: it is fed by a broker, or called.
        newer: needs Python 3.12.
    """

    name: str
    driver: tuple[str, ...]
    times: float
    pipelined: float | None = None
    stored: float | None = None
    logical: bool = False
    from_memory: bool = False
    newer: bool = False


OUTBOX = "pg_transactional_outbox.mjs"

PEERS = (
    Spec("pg-transactional-outbox, polling", (OUTBOX, "polling"), 1, 12, 7),
    Spec("pg-transactional-outbox, replication", (OUTBOX, "replication"), 1, 12, 7, logical=True),
    Spec("graphile-worker", ("graphile_worker.mjs",), 2, 10),
    Spec("graphile-worker, dedupe in the task", ("graphile_worker.mjs", "dedupe"), 2),
    Spec("pgqueuer", ("pgqueuer_.py",), 2, 7),
    Spec("pgqueuer, dedupe in the job", ("pgqueuer_.py", "dedupe"), 2),
    Spec("pg-boss", ("pg_boss.mjs",), 2, 4.5),
    Spec("procrastinate", ("procrastinate_.py",), 0.5, 35),
    Spec("procrastinate, dedupe in the task", ("procrastinate_.py", "dedupe"), 0.5),
    Spec("dbos", ("dbos_.py", "step"), 0.15, 80, from_memory=True),
    Spec("dbos, datasource", ("dbos_.py", "datasource"), 0.15, from_memory=True),
    Spec("omni-box", ("omni_box_.py",), 0.5, from_memory=True, newer=True),
    Spec("pactix", ("pactix_.py",), 0.5, newer=True),
    Spec("pactix, dedupe in the handler", ("pactix_.py", "dedupe"), 0.5, newer=True),
    Spec("FastStream, hand-written dedupe", ("faststream_.py",), 2, from_memory=True),
)
