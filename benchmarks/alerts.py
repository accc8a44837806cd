"""What a message's death costs with alerts and without: the same deaths in turns, on an empty database.

python -m benchmarks.alerts --database URL [--rounds 20]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.pages import Work
from tests.support.databases import Raw
from tests.support.recording import Recorder
from txbox import App, Message, Outcome, Reject

_BLOCK = 50


def _rejects(_message: Message[Any], _tx: Any) -> None:
    raise Reject("never")


def _block(app: App, view: Raw, prefix: str) -> tuple[float, float]:
    """Wall time and work of a death, in ms."""
    work, began = Work(view, app.database.dialect.name), time.perf_counter()
    for number in range(_BLOCK):
        message = Message(id=f"{prefix}-{number}", topic="orders", payload=b'{"order": 1}')
        if app.process(message) is not Outcome.DEAD:
            raise RuntimeError(f"{message.id} did not die")
    return (time.perf_counter() - began) * 1000 / _BLOCK, work.ms() / _BLOCK


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(given)
    # a line for each death costs more than what is measured
    logging.disable(logging.CRITICAL)
    with (
        App(args.database) as off,
        App(args.database, alerts=Recorder()) as on,
        Raw(args.database) as view,
    ):
        apps = {"off": off, "on": on}
        off.init()
        for name, app in apps.items():
            app.handler("orders", consumer=name)(_rejects)
            _block(app, view, "warm")
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in apps}
        for number in range(args.rounds):
            # in turns, and each of them first in half of them
            for name in ("off", "on") if number % 2 else ("on", "off"):
                spent[name].append(_block(apps[name], view, f"m{number}"))
        alerts = view.value("SELECT count(*) FROM txbox_outbox")
    for index, what in enumerate(("wall", "work")):
        without, with_alerts = ([one[index] for one in spent[name]] for name in ("off", "on"))
        ratio = statistics.median(b / a for a, b in zip(without, with_alerts, strict=True))
        print(
            f"{what}: {statistics.median(without):.2f} ms without, {statistics.median(with_alerts):.2f} ms with alerts,"
            f" {ratio:.2f} times as much in the median pair"
        )
    print(f"{_BLOCK * (args.rounds + 1)} deaths with alerts, {alerts} staged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
