"""Who takes part in P16, how many messages each gets, and the bars."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Server(Enum):
    """Which PostgreSQL; both have default durability."""

    SHARED = "shared"
    LOGICAL = "logical"  # of its own, wal_level = logical


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to consume the workload.

    Args:
        driver: a file in drivers/.
        share: of the messages asked for, so that a round takes seconds for everyone.
        bars: how many times its rate the named contenders must reach.
    """

    name: str
    driver: str
    share: float
    arguments: tuple[str, ...] = ()
    server: Server = Server.SHARED
    bars: dict[str, float] = field(default_factory=dict)


NAIVE = "naive"
PIPELINED = "txbox, pipeline=True"
STORED = "txbox, mode=stored, pipeline=True"

CONTENDERS = (
    Contender(NAIVE, "memory.py", 1.0, ("naive",)),
    Contender(PIPELINED, "memory.py", 8.0, ("pipelined",)),
    Contender(STORED, "memory.py", 4.0, ("stored",)),
    Contender(
        "pg-transactional-outbox, polling",
        "pg_transactional_outbox.mjs",
        1.0,
        ("polling",),
        bars={PIPELINED: 12, STORED: 7},
    ),
    Contender(
        "pg-transactional-outbox, replication",
        "pg_transactional_outbox.mjs",
        1.0,
        ("replication",),
        Server.LOGICAL,
        bars={PIPELINED: 12, STORED: 7},
    ),
    Contender("graphile-worker", "graphile_worker.mjs", 1.25, bars={PIPELINED: 10}),
    Contender("pgqueuer", "pgqueuer_.py", 2.0, bars={PIPELINED: 7}),
    Contender("pg-boss", "pg_boss.mjs", 2.0, bars={PIPELINED: 4.5}),
    Contender("procrastinate", "procrastinate_.py", 0.25, bars={PIPELINED: 35}),
    Contender("dbos", "dbos_.py", 0.15, ("step",), bars={PIPELINED: 80}),
    Contender("dbos, datasource", "dbos_.py", 0.15, ("datasource",)),
    Contender("FastStream, hand-written dedupe", "faststream_.py", 2.0),
)
