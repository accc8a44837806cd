"""`txbox demo`: a payment service that sends receipts is killed again and again, once with txbox and once without."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from txbox.errors import TxboxError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0 when txbox's books are right, 1 when they are not."""
    options = make_parser().parse_args(argv)
    directory = Path(options.dir or tempfile.mkdtemp(prefix="txbox-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        sys.stderr.write(f"{directory} is not empty: give --dir a new or empty directory.\n")
        return 2
    from txbox.demo.race import build_stream, race

    def show(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    seed = random.randrange(10**6) if options.seed is None else options.seed
    stream = build_stream(max(10, options.payments), duplicates=options.duplicates, seed=seed)
    try:
        result = race(directory, stream, kills=options.kills, seconds=options.seconds, show=show)
    except TxboxError as error:
        sys.stderr.write(f"txbox demo: {error}\n")
        return 1
    if options.json:
        found = {**result, "seed": seed, "directory": str(directory)}
        sys.stdout.write(f"{json.dumps(found, indent=2)}\n")
    else:
        _report(result, directory, show)
    return 0 if result["txbox"]["right"] else 1


def make_parser() -> argparse.ArgumentParser:
    """The options of the demo."""
    parser = argparse.ArgumentParser(
        prog="txbox demo",
        description="A payment service consumes a stream with duplicates, and sends a receipt for each payment to a "
        "second consumer, while its process is killed with kill -9, next to a naive service on the same stream. "
        "Exit status 1 when txbox's books are wrong.",
    )
    add = parser.add_argument
    add("--payments", type=int, default=400, help="distinct payments (default 400)")
    add("--duplicates", type=float, default=0.1, help="share sent twice (default 0.1)")
    add("--kills", type=int, default=12, help="of each process (default 12)")
    add("--seconds", type=float, default=16.0, help="the stream lasts (default 16)")
    add("--seed", type=int, help="for the same stream again")
    add("--dir", help="where the databases go (default: a temporary directory, which is kept)")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def _report(result: dict[str, Any], directory: Path, show: Callable[[str], None]) -> None:
    naive, txbox = result["naive"], result["txbox"]

    def row(label: str, left: object, right: object) -> None:
        show(f"{label:<36}{left or 'none':>10}{right or 'none':>25}")

    show(
        f"\n{result['payments']} payments of {result['customers']} customers, delivered {result['deliveries']} times, "
        f"{result['seconds']:.0f} s.\nBalances compared with the sum of the payments, receipts with the payments:\n"
    )
    row("", "naive", "txbox")
    row("killed with kill -9", naive["kills"], txbox["kills"])
    show("1. payments are booked")
    for label, name in (
        ("   customers charged too much", "customers_charged_too_much"),
        ("       EUR too much", "amount_too_much"),
        ("   payments booked more than once", "payments_doubled"),
        ("       because of a crash", "payments_doubled_by_crashes"),
        ("   customers charged too little", "customers_charged_too_little"),
        ("   payments lost", "payments_lost"),
    ):
        row(label, naive[name], txbox[name])
    row("   duplicates recognised", 0, txbox["duplicates"])
    row("   retries", naive["retries"], txbox["retries"])
    dead_letters = f"{len(txbox['dead'])} dead letter, kept"
    row("   the poison message", naive["dropped"] and "dropped", dead_letters)
    show("2. receipts go to the next consumer")
    row("   payments without a receipt", naive["receipts_lost"], txbox["receipts_lost"])
    row("   receipts sent more than once", naive["receipts_doubled"], txbox["receipts_doubled"])
    show(
        "\ntxbox: every customer was charged once, and got one receipt for each payment."
        if txbox["right"]
        else "\ntxbox's books are WRONG: please report this, with the directory below."
    )
    # by the name under which this command line was reached, so that the lines can be pasted
    command = "txbox" if shutil.which("txbox") else f"{sys.executable} -m txbox"
    url = f"sqlite:///{directory / 'txbox.db'}"
    show(f"\nLook further:\n  {command} status --database {url}")
    show(f"  {command} list --database {url} --status dead\n  rm -r {directory}")
