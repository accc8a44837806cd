"""Chaos runs, one pair of database and broker after the other.

`python -m tests.chaos --minutes 60 --seed 7 --databases postgresql,sqlite --brokers redis,kafka`
"""

from __future__ import annotations

import argparse
import random
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial

from tests.chaos import page
from tests.chaos.brokers import NAMES
from tests.chaos.databases import DATABASES
from tests.chaos.harness import Result, StuckError, chaos
from tests.chaos.nemesis import KINDS
from tests.support.servers import ServerError, provision

#: What databases and brokers need, unless it is a server of the same name.
_SERVERS = {
    "sqlite": (), "webhook": (), "quorum": ("rabbitmq",), "postgresql": ("postgresql", "pgbouncer"),
    "galera": ("mariadb",),
}  # fmt: skip


def _names(allowed: Sequence[str], words: str) -> tuple[str, ...]:
    names = tuple(words.split(","))
    if unknown := [name for name in names if name not in allowed]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(allowed)}")
    return names


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of each pair")
    parser.add_argument(
        "--seed", type=int, help="of faults and messages; by default another one each time"
    )
    parser.add_argument(
        "--databases", type=partial(_names, tuple(DATABASES)), default=("postgresql",)
    )
    parser.add_argument("--brokers", type=partial(_names, NAMES), default=("redis",))
    parser.add_argument(
        "--without", type=partial(_names, tuple(KINDS)), default=(), help="kinds of fault"
    )
    parser.add_argument("--lanes", type=int, default=4, help="faults at once")
    parser.add_argument("--rate", type=float, default=600.0, help="messages a second, at most")
    parser.add_argument("--keep", action="store_true", help="keep the journals of green runs, too")
    parser.add_argument(
        "--elle", type=shlex.split, default=[], metavar="COMMAND", help="checks the history of the lists, as in "
        "'java -jar elle-cli.jar --model list-append': it gets a file, and ends what it prints with true or false",
    )  # fmt: skip
    parser.add_argument(
        "--impatient", action="store_true", help="give up a run without progress for 2 minutes"
    )
    parser.add_argument(
        "--write-page", action="store_true", help="keep the runs in docs/reliability/chaos.json"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    # servers and processes are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    names = (*arguments.databases, *arguments.brokers)
    provision.prepare(
        sorted({server for name in names for server in _SERVERS.get(name, (name,))}), throwaway=True
    )
    bad = 0
    for database in arguments.databases:
        for broker in arguments.brokers:
            print(f"{database} and {broker}, seed {seed}, {arguments.minutes:g} min", flush=True)
            try:
                result = chaos(
                    database, broker, seed=seed, minutes=arguments.minutes, impatient=arguments.impatient,
                    lanes=arguments.lanes, without=arguments.without, rate=arguments.rate, keep=arguments.keep,
                    elle_command=arguments.elle,
                    say=partial(print, flush=True),
                )  # fmt: skip
            except (ServerError, StuckError) as error:
                print(f"  GIVEN UP: {error}", flush=True)
                bad += 1
                continue
            _say(result)
            if arguments.write_page:
                # at once, green or red: what ends this command takes no run away
                page.keep(result)
            bad += bool(result.wrong)
    return 1 if bad else 0


def _say(result: Result) -> None:
    checked = result.checked
    print(
        f"  {checked.sent:,} sent, {checked.deliveries:,} deliveries, {checked.effects:,} effects, "
        f"{checked.dead} dead, {checked.quarantined} quarantined; "
        f"{sum(result.faults.values())} faults of {len(result.faults)} kinds; "
        f"{checked.lost} lost, {checked.doubled} doubled, {checked.disordered} out of order"
    )
    if result.elle:
        print(f"  Elle: {result.elle}")
    for wrong in result.wrong:
        print(f"  WRONG {wrong}")
    where = f", see {result.folder}" if result.folder.exists() else ""
    print(f"  {'RED' if result.wrong else 'green'}{where}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
