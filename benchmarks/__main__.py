"""`python -m benchmarks [P1 …] [--rounds N] [--messages N] [--dry]`; exit status 1 when a bar is missed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import p01_one_at_a_time, p14_kafka, relay, report
from tests.servers import ServerError

# one line a phase
PHASES: dict[str, Callable[..., dict[str, Any]]] = {
    p01_one_at_a_time.NUMBER: p01_one_at_a_time.run,
    p14_kafka.NUMBER: p14_kafka.run,
    relay.NUMBER: relay.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "phases", nargs="*", metavar="PHASE", help=f"of {', '.join(PHASES)}; all without"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of each contender (default 7)")
    parser.add_argument(
        "--messages", type=int, default=4000, help="distinct, a round (default 4000)"
    )
    parser.add_argument("--dry", action="store_true", help="print only; store nothing")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.phases if name not in PHASES]:
        parser.error(f"no phase {', '.join(unknown)}; there are {', '.join(PHASES)}")
    failed = False
    for name in arguments.phases or PHASES:
        try:
            result = PHASES[name](rounds=arguments.rounds, messages=arguments.messages)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{name}: {result['title']}\n{result['method']}\n")
        print("\n".join(report.lines(result)), flush=True)
        failed = failed or not report.passed(result)
        if not arguments.dry:
            print(f"\nstored: {report.store(result)}")
    if not arguments.dry:
        print(f"rendered: {report.write_page(list(PHASES))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
