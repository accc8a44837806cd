"""The page that shows what was found, between two marks; the rest of it is written by hand."""

from __future__ import annotations

import platform
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from tests.crash.brokers.results import SCENARIO, WRONG, Result, Results
from tests.support.databases import Raw
from tests.support.servers import ROOT, server_urls

PAGE = ROOT / "docs" / "reliability" / "crashes.md"
BEGIN = "<!-- written by `make crash-brokers` from crashes.json: do not edit -->"
END = "<!-- end of what is written -->"

_CLIENTS = ("confluent-kafka", "aio-pika", "boto3", "nats-py", "redis", "uvicorn")
_ORDER = ("kafka", "kafka-share", "rabbitmq", "sqs", "nats", "redis", "webhook")
_NONE = "\N{EN DASH}"
_DATABASES = ("postgresql", "mariadb", "sqlite")


def about(databases: Sequence[str]) -> dict[str, str]:
    """When, of which commit and with which versions a run on these databases was made."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    clients = ", ".join(f"{client} {version(client)}" for client in _CLIENTS)
    line = f"{datetime.now(UTC):%Y-%m-%d}, commit `{commit}`, Python {platform.python_version()}, {clients}"
    return {database: f"{_version(database)}; {line}" for database in databases}


def _version(database: str) -> str:
    if database == "sqlite":
        return f"SQLite {sqlite3.sqlite_version}"
    with Raw(server_urls()[database]) as raw:
        said = str(raw.value("SELECT version()")).removeprefix("PostgreSQL ").split()[0]
    return f"{'MariaDB' if database == 'mariadb' else 'PostgreSQL'} {said}"


def write(results: Results) -> None:
    """Put the tables between the marks of the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, "", *tables(results), "", END + after]))


def tables(results: Results) -> Iterator[str]:
    swept = [result for result in results if result.path not in (SCENARIO, WRONG)]
    yield "## The sweep"
    yield ""
    yield from _summary(swept)
    yield ""
    yield "### Each point on each broker"
    yield ""
    yield (
        "Workers killed there / lost / doubled, over all databases and the three ways of a message: inline, "
        "stored, and redelivered after an earlier kill."
    )
    yield ""
    yield from _points(swept)
    if missed := [sweep for sweep in swept if sweep.unpassed]:
        yield ""
        yield (
            "Not passed by the worker that was to die there, and so not counted as kills: "
            f"{len(missed)} of {len(swept)} cases ("
            + ", ".join(
                f"{each.broker} {each.database} {each.path} `{each.point}`" for each in missed
            )
            + ")."
        )
    yield ""
    yield "## The scenarios"
    yield ""
    yield from _scenarios(results.of(SCENARIO))
    yield ""
    yield "## Wrong consumers"
    yield ""
    yield "The same check must catch a consumer that is wrong, or it checks nothing."
    yield ""
    yield from _wrong(results.of(WRONG))
    yield ""
    yield "## Versions"
    yield ""
    for result in results.about.values():
        yield f"- {result}"


def _cell(found: Sequence[Result]) -> str:
    if not found:
        return _NONE
    kills = sum(not row.unpassed for row in found)
    lost, doubled = sum(row.lost for row in found), sum(row.doubled for row in found)
    broken = sorted({name for row in found for name in row.wrong})
    return f"{kills} / {lost} / {doubled}" + (f" **{', '.join(broken)}**" if broken else "")


def _brokers(found: Sequence[Result]) -> list[str]:
    return [each for each in _ORDER if any(one.broker == each for one in found)]


def _summary(swept: Sequence[Result]) -> Iterator[str]:
    yield "| broker | database | points | kills | messages | effects | lost | doubled | other invariants broken |"
    yield "|---|---|---|---|---|---|---|---|---|"
    totals = [0] * 5
    for broker in _brokers(swept):
        for database in _DATABASES:
            found = [
                sweep for sweep in swept if (sweep.broker, sweep.database) == (broker, database)
            ]
            if not found:
                continue
            sums = [
                sum(getattr(row, name) for row in found)
                for name in ("kills", "sent", "effects", "lost", "doubled")
            ]
            totals = [total + more for total, more in zip(totals, sums, strict=True)]
            others = sum(bool(row.wrong) for row in found)
            cells = " | ".join(f"{each:,}" for each in (len(found), *sums, others))
            yield f"| {broker} | {database} | {cells} |"
    cells = " | ".join(f"**{total:,}**" for total in (len(swept), *totals))
    yield f"| **all** | | {cells} | **{sum(bool(sweep.wrong) for sweep in swept)}** |"


def _points(swept: Sequence[Result]) -> Iterator[str]:
    brokers = _brokers(swept)
    yield "| point | " + " | ".join(brokers) + " |"
    yield "|---|" + "---|" * len(brokers)
    points = {sweep.point for sweep in swept if sweep.point != "none"}
    for point in sorted(points, key=lambda point: (_place(point), point)):
        cells = [
            _cell([sweep for sweep in swept if (sweep.broker, sweep.point) == (broker, point)])
            for broker in brokers
        ]
        yield f"| `{point}` | " + " | ".join(cells) + " |"


_WAY = (
    "received", "store", "lease_stored", "lease", "begin", "claim", "claim_leased", "arm",
    "savepoint_claim", "classify",
    "handler", "between:writes", "close", "commit", "record", "rescue", "heartbeat", "ack",
)  # fmt: skip


def _place(point: str) -> tuple[int, str, bool]:
    """Where a point stands on the way of a message; before comes before after."""
    when, _, name = point.rpartition(":")
    known = next(
        (at for at, each in enumerate(_WAY) if point == each or name == each), None
    ) or next((at for at, each in enumerate(_WAY) if name.startswith(each)), len(_WAY) - 4)
    return known, name, when == "after"


def _scenarios(found: Sequence[Result]) -> Iterator[str]:
    names = list(dict.fromkeys(each.point for each in found))
    yield (
        "| broker | database | " + " | ".join(f"{name.replace('_', ' ')}" for name in names) + " |"
    )
    yield "|---|---|" + "---|" * len(names)
    for broker in _brokers(found):
        for database in _DATABASES:
            row = [each for each in found if (each.broker, each.database) == (broker, database)]
            if row:
                cells = [_told([each for each in row if each.point == name]) for name in names]
                yield f"| {broker} | {database} | " + " | ".join(cells) + " |"


def _told(found: Sequence[Result]) -> str:
    if not found:
        return _NONE
    (made,) = found
    broken = f" **{', '.join(made.wrong)}**" if made.wrong else ""
    return (
        f"{made.kills} kills, {made.effects:,} of {made.sent:,} effects, "
        f"{made.lost} lost, {made.doubled} doubled{broken}"
    )


def _wrong(found: Sequence[Result]) -> Iterator[str]:
    names = list(dict.fromkeys(row.point for row in found))
    yield "| broker | " + " | ".join(f"`{each}`" for each in names) + " |"
    yield "|---|" + "---|" * len(names)
    for broker in _brokers(found):
        cells: list[str] = []
        for name in names:
            cases = [row for row in found if (row.broker, row.point) == (broker, name)]
            caught = sum(bool(case.wrong) for case in cases)
            lost, doubled = sum(case.lost for case in cases), sum(case.doubled for case in cases)
            cells.append(
                f"caught {caught} of {len(cases)}: {lost} lost, {doubled} doubled"
                if cases
                else _NONE
            )
        yield f"| {broker} | " + " | ".join(cells) + " |"
