"""`txbox demo`: a payment service that sends receipts is killed again and again, once with txbox and once without."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from txbox.errors import TxboxError

_SETTLE_S = 60.0
_KILL_WITHIN_S = 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0 when txbox's books are right, 1 when they are not."""
    options = make_parser().parse_args(argv)
    if options.dir is None:
        directory = Path(tempfile.mkdtemp(prefix="txbox-demo-"))
    else:
        directory = Path(options.dir)
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            sys.stderr.write(f"{directory} is not empty: give --dir a new or empty directory.\n")
            return 2
    keep = True  # also when something goes wrong
    try:
        result = _race(directory, options, sys.stderr if options.json else sys.stdout)
        if options.json:
            json.dump(result, sys.stdout, indent=2)
            sys.stdout.write("\n")
        else:
            _report(result, options.keep, sys.stdout)
        keep = options.keep or not result["txbox"]["right"]
        return 0 if result["txbox"]["right"] else 1
    except TxboxError as error:
        sys.stderr.write(f"txbox demo: {error}\n")
        return 1
    finally:
        if not keep:
            shutil.rmtree(directory)


def make_parser() -> argparse.ArgumentParser:
    """The options of the demo."""
    parser = argparse.ArgumentParser(
        prog="txbox demo",
        description="A payment service consumes a stream with duplicates, and sends a receipt for each payment to a "
        "second consumer, while its process is killed with kill -9, next to a naive service on the same stream. "
        "Exit status 1 when txbox's books are wrong.",
    )
    parser.add_argument("--payments", type=int, default=400, help="distinct payments (default 400)")
    parser.add_argument(
        "--duplicates", type=float, default=0.1, help="share sent twice (default 0.1)"
    )
    parser.add_argument("--kills", type=int, default=12, help="of each process (default 12)")
    parser.add_argument("--seconds", type=float, default=16.0, help="the stream lasts (default 16)")
    parser.add_argument("--seed", type=int, default=None, help="for the same stream again")
    parser.add_argument(
        "--dir", default=None, help="where the databases go (default: a temporary directory)"
    )
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the databases to look at (default)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _race(directory: Path, options: argparse.Namespace, out: TextIO) -> dict[str, Any]:
    """Send the stream to both sides, kill both as often, wait until both are done, and judge."""
    from txbox.demo.business import build_stream
    from txbox.demo.killing import COMMITTED, SENDING, WRITTEN
    from txbox.demo.screen import screen
    from txbox.demo.sides import NaiveSide, TxboxSide

    seed = random.randrange(10**6) if options.seed is None else options.seed
    stream = build_stream(max(10, options.payments), duplicates=options.duplicates, seed=seed)
    total = len(stream.deliveries)
    naive, txbox = NaiveSide(directory), TxboxSide(directory)
    sides = (naive, txbox)
    # the moments take turns: after a commit, before receipts leave, at any moment, before a commit
    moments = [(COMMITTED, SENDING, None, WRITTEN)[number % 4] for number in range(options.kills)]
    due = [
        options.seconds * (number + 0.7) / max(1, options.kills) for number in range(options.kills)
    ]
    began = time.monotonic()
    try:
        for side in sides:
            side.start()
        with screen(out) as view:
            settled_by: float | None = None
            while True:
                passed_s = time.monotonic() - began
                while txbox.sent < total and txbox.sent < total * passed_s / options.seconds:
                    for side in sides:
                        side.send(stream.deliveries[side.sent])
                if due and passed_s >= due[0] and not any(side.dying for side in sides):
                    due.pop(0)
                    moment = moments.pop(0)
                    for side in sides:
                        side.kill_at(moment, within_s=_KILL_WITHIN_S) if moment else side.kill()
                for side in sides:
                    side.watch()
                looks = [side.look() for side in sides]
                sending = txbox.sent < total
                note = (
                    f"{txbox.sent} of {total} sent" if sending else "everything is sent; draining"
                )
                view.show(sides, len(stream.payments), note)
                if not sending and not due and not any(side.dying for side in sides):
                    settled_by = settled_by or time.monotonic() + _SETTLE_S
                    if all(looks) or time.monotonic() > settled_by:
                        break
                time.sleep(0.05)
    finally:
        for side in sides:
            side.close()
    return _result(directory, stream, naive, txbox, seed=seed, seconds=time.monotonic() - began)


def _result(
    directory: Path, stream: Any, naive: Any, txbox: Any, *, seed: int, seconds: float
) -> dict[str, Any]:
    from txbox.demo.verdict import judge

    books = {side.name: judge(side.database, stream, side.receipts) for side in (naive, txbox)}
    in_order = txbox.unfinished + txbox.behind == 0 and set(txbox.dead) == stream.poison
    return {
        "payments": len(stream.payments) + len(stream.poison),
        "deliveries": len(stream.deliveries),
        "poison": len(stream.poison),
        "customers": len(stream.expected),
        "seed": seed,
        "seconds": round(seconds, 1),
        "directory": str(directory),
        "database": f"sqlite:///{txbox.database}",
        "naive": {
            **asdict(books["naive"]),
            "right": books["naive"].right,
            "kills": naive.kills,
            "retries": naive.retries,
            "dropped": naive.dropped,
        },
        "txbox": {
            **asdict(books["txbox"]),
            "right": books["txbox"].right and in_order,
            "kills": txbox.kills,
            "retries": txbox.retries,
            "duplicates": txbox.duplicates,
            "dead": txbox.dead,
            "unfinished": txbox.unfinished,
        },
    }


def _report(result: dict[str, Any], kept: bool, out: TextIO) -> None:
    from txbox.demo.screen import print_table

    naive, txbox = result["naive"], result["txbox"]

    def row(label: str, name: str) -> tuple[str, str, str]:
        return label, str(naive[name] or "none"), str(txbox[name] or "none")

    out.write(
        f"\n{result['payments']} payments of {result['customers']} customers, delivered {result['deliveries']} times, "
        f"{result['seconds']:.0f} s.\nBalances compared with the sum of the payments, receipts with the payments:\n\n"
    )
    print_table(
        out,
        ("", "naive", "txbox"),
        [
            ("killed with kill -9", str(naive["kills"]), str(txbox["kills"])),
            ("1. payments are booked", "", ""),
            row("   customers charged too much", "customers_charged_too_much"),
            row("       EUR too much", "amount_too_much"),
            row("   payments booked more than once", "payments_doubled"),
            row("       because of a crash", "payments_doubled_by_crashes"),
            row("   customers charged too little", "customers_charged_too_little"),
            row("   payments lost", "payments_lost"),
            ("   duplicates recognised", "none", str(txbox["duplicates"])),
            ("   retries", str(naive["retries"]), str(txbox["retries"])),
            (
                "   the poison message",
                "dropped" if naive["dropped"] else "none",
                f"{len(txbox['dead'])} dead letter, kept",
            ),
            ("2. receipts go to the next consumer", "", ""),
            row("   payments without a receipt", "receipts_lost"),
            row("   receipts sent more than once", "receipts_doubled"),
        ],
    )
    out.write(
        "\ntxbox: every customer was charged once, and got one receipt for each payment.\n"
        if txbox["right"]
        else "\ntxbox's books are WRONG: please report this, with the directory below.\n"
    )
    if kept or not txbox["right"]:
        txbox_command, url = _command(), result["database"]
        out.write(
            f"\nLook further:\n  {txbox_command} status --database {url}\n"
            f"  {txbox_command} list --database {url} --status dead\n"
            f"  rm -r {result['directory']}\n"
        )


def _command() -> str:
    """How this command line was reached, so that the lines above can be pasted."""
    if shutil.which("txbox"):
        return "txbox"
    called = Path(sys.argv[0])
    return sys.argv[0] if called.name == "txbox" else f"{sys.executable} -m txbox"
