"""Scenarios beside the sweep: the operator replays, the broker is killed, workers die again and again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.crash.brokers.checker import Checked
from tests.crash.brokers.results import SCENARIO, Result, result
from tests.crash.brokers.runs import Case, Run, job_of, workshop
from tests.crash.brokers.service import Job, messages
from tests.support.databases import Raw
from tests.support.servers.control import (
    ThrowawayElasticMQ,
    ThrowawayKafka,
    ThrowawayNats,
    ThrowawayRabbitMQ,
    ThrowawayRedis,
)

SEED = 20261120
KILLS = 20
_MID_BATCH = 60
_AWAY_S = 0.3
_AT_ONCE = 20
_PAUSE_S = 0.25
_AHEAD = 100
_POINTS = (
    "received", "before:begin", "after:begin", "before:handler", "between:writes", "after:handler",
    "before:commit", "after:commit", "before:ack", "after:ack",
)  # fmt: skip
#: the kind of feed on the server that is killed
_SERVERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "kafka": ("kafka-dynamic", ThrowawayKafka),
    "kafka-share": ("kafka-share", ThrowawayKafka),
    "rabbitmq": ("rabbitmq", ThrowawayRabbitMQ),
    "sqs": ("sqs", ThrowawayElasticMQ),
    "nats": ("nats", ThrowawayNats),
    "redis": ("redis", ThrowawayRedis),
}
_WITHIN_S = 60.0


def operator_replays_topic(case: Case) -> Result:
    """All is done; everything comes again from the start, and a worker is killed amid that too."""
    with _run(case) as the_run:
        sent = messages()
        the_run.publish(sent)
        left = the_run.finish()
        the_run.apart(lambda: the_run.job.feed.replay(sent))
        again = the_run.left()
        the_run.ended(the_run.worker(("received", 9)))
        left += the_run.finish()
        checked = the_run.checked(left)
        if again < len(sent):
            # the replay must have been one
            checked = replace(checked, wrong=(*checked.wrong, f"only {again} replayed"))
        return _result(case, operator_replays_topic, the_run, checked)


def broker_killed_mid_batch(case: Case) -> Result:
    """The broker dies by SIGKILL with a batch in work, twice, and comes back each time."""
    kind, make = _SERVERS[case.broker]
    with (
        make() as server,
        _run(replace(case, broker=kind, broker_url=server.url), handle_s=0.02) as the_run,
    ):
        sent = messages(distinct=_MID_BATCH)
        the_run.publish(sent)
        worker = the_run.worker()
        for share in (0.2, 0.6):
            _wait_for_effects(the_run.job, int(share * _MID_BATCH))
            server.stop(immediate=True)
            time.sleep(_AWAY_S)
            server.start()
        the_run.ended(worker)
        return _result(case, broker_killed_mid_batch, the_run, the_run.checked(the_run.finish()))


def workers_killed_under_load(case: Case) -> Result:
    """While messages keep coming, two workers die again and again: at random points, or at any moment."""
    chance = random.Random(f"{SEED} {case.broker} {case.database}")
    with _run(case, handle_s=0.005, concurrency=2, workers=2) as the_run:
        the_run.job.feeding.touch()
        publisher = the_run.start(lambda: _publish_while_feeding(the_run))
        workers = [the_run.worker(member=member) for member in range(2)]
        while the_run.kills < KILLS:
            member = the_run.kills % 2
            _kill_after(workers[member], chance.uniform(0.2, 1.5))
            the_run.ended(workers[member])
            crash = (chance.choice(_POINTS), chance.randint(1, 30))
            workers[member] = the_run.worker(
                crash if the_run.kills < KILLS - 2 else None, member=member
            )
        the_run.job.feeding.unlink()
        the_run.ended(publisher)
        for worker in workers:
            the_run.ended(worker)
        return _result(case, workers_killed_under_load, the_run, the_run.checked(the_run.finish()))


def names(broker: str) -> list[str]:
    """The scenarios that a broker can have."""
    return [each for each in ALL if broker in _SERVERS or each != broker_killed_mid_batch.__name__]


def run(name: str, case: Case) -> Result:
    return ALL[name](case)


@contextmanager
def _run(case: Case, **more: Any) -> Iterator[Run]:
    with workshop().folder() as folder, Run(replace(job_of(case, folder), **more)) as the_run:
        yield the_run


def _result(
    case: Case, scenario: Callable[[Case], Result], the_run: Run, checked: Checked
) -> Result:
    where = (case.broker, case.database, SCENARIO, scenario.__name__)
    if checked.wrong:
        print("\n".join([*the_run.job.notes()[-40:], *the_run.errors()]), flush=True)
    return result(where, the_run.kills, checked)


def _publish_while_feeding(the_run: Run) -> None:
    first = 0
    while the_run.job.feeding.exists():
        sent = messages(first, _AT_ONCE)
        the_run.job.feed.publish(sent)
        the_run.confirm(sent)
        first += _AT_ONCE
        time.sleep(_PAUSE_S)
        # a producer that runs far ahead would only make the end longer
        while the_run.job.feeding.exists() and the_run.job.feed.left(the_run.job.workers) > _AHEAD:
            time.sleep(_PAUSE_S)


def _kill_after(pid: int, seconds: float) -> None:
    """Kill a process then, unless it has done so itself by then; it is still to be waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)


def _wait_for_effects(job: Job, count: int) -> None:
    deadline = time.monotonic() + _WITHIN_S
    with Raw(job.database_url) as raw:
        while int(raw.value("SELECT count(*) FROM ledger")) < count:
            if time.monotonic() > deadline:
                job.note(f"error no {count} effects within {_WITHIN_S:g} s")
                return
            time.sleep(0.02)


ALL: dict[str, Callable[[Case], Result]] = {
    each.__name__: each
    for each in (operator_replays_topic, broker_killed_mid_batch, workers_killed_under_load)
}
