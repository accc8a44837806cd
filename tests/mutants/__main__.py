"""Deliberate defects of txbox, applied one at a time to a copy: what notices each, and after how long.

`python -m tests.mutants --by tests,machine no-fence ack-first`. Without names all of them are tried, and by every way
that can see them: the models, the state machine, the test that promises it, the crash sweep, and minutes of chaos.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from functools import partial

from tests.mutants import page
from tests.mutants.commands import OF_SOURCE, WAYS, Command
from tests.mutants.judge import Judge
from tests.mutants.table import MUTANTS
from tests.mutants.tree import Tree


def _names(allowed: Sequence[str], words: str) -> tuple[str, ...]:
    names = tuple(words.split(","))
    if unknown := [name for name in names if name not in allowed]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(allowed)}")
    return names


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("mutants", nargs="*", metavar="NAME", help=f"of {', '.join(MUTANTS)}")
    parser.add_argument(
        "--by", type=partial(_names, WAYS), default=WAYS, metavar="a,b", help=", ".join(WAYS)
    )
    parser.add_argument("--missing", action="store_true", help="only what has not been run yet")
    parser.add_argument("--dry", action="store_true", help="do not write the page")
    parser.add_argument(
        "--json", action="store_true", help="print the verdicts as JSON, at the end"
    )
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.mutants if name not in MUTANTS]:
        parser.error(f"there is no mutant {unknown[0]}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    # the copy and what runs in it are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say = partial(print, flush=True, file=sys.stderr if arguments.json else sys.stdout)
    rows = page.read() if arguments.missing else {}
    todo = [
        (way, name, how)
        for way in arguments.by
        for name in arguments.mutants or MUTANTS
        if not isinstance(how := MUTANTS[name].way(way), str) and way not in rows.get(name, {})
    ]
    verdicts: dict[str, dict[str, tuple[object, ...]]] = {}
    broken: list[str] = []
    with Tree() as tree:
        judge = Judge(tree)
        judge.look_ahead(how for _, _, how in todo if isinstance(how, Command))
        for number, (way, name, how) in enumerate(todo, 1):
            verdict = judge.verdict(MUTANTS[name], how)
            say(
                f"[{number}/{len(todo)}] {name} by {way}: {verdict.outcome}, {verdict.seconds:.1f} s  {verdict.by}"
            )
            verdicts.setdefault(name, {})[way] = tuple(verdict)
            if verdict.outcome == "broken":
                broken.append(f"{name} by {way}")
            elif not arguments.dry:
                page.keep(name, way, verdict)
    if arguments.json:
        print(json.dumps(verdicts, indent=1))
    kept = page.read()
    free = [
        name
        for name, by_way in verdicts.items()
        if not page.is_caught(kept, name)
        and not any(by_way.get(way, ("",))[0] == "caught" for way in OF_SOURCE)
    ]
    for name in free:
        say(f"nothing that was run has caught {name}")
    for name in broken:
        say(f"says nothing: {name}")
    return 1 if free or broken else 0


if __name__ == "__main__":
    sys.exit(main())
