"""The page that shows what was found, between two marks; the rest of it is written by hand."""

from __future__ import annotations

import platform
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from tests.brokers.crashes.results import SCENARIO, WRONG, Result, Results
from tests.databases import Raw
from tests.servers import ROOT, server_urls

PAGE = ROOT / "docs" / "reliability" / "crashes.md"
BEGIN = "<!-- written by `make crash-brokers` from crashes.json: do not edit -->"
END = "<!-- end of what is written -->"

_CLIENTS = ("confluent-kafka", "aio-pika", "boto3", "nats-py", "redis", "uvicorn")
_ORDER = ("kafka", "rabbitmq", "sqs", "nats", "redis", "webhook")
_NONE = "\N{EN DASH}"
_DATABASES = ("postgresql", "mariadb", "sqlite")


def about(databases: Sequence[str]) -> dict[str, str]:
    """When, of which commit and with which versions a run on these databases was made."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    clients = ", ".join(f"{own} {version(own)}" for own in _CLIENTS)
    line = f"{datetime.now(UTC):%Y-%m-%d}, commit `{commit}`, Python {platform.python_version()}, {clients}"
    return {own: f"{_version(own)}; {line}" for own in databases}


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
    swept = [own for own in results if own.path not in (SCENARIO, WRONG)]
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
    if missed := [own for own in swept if own.unpassed]:
        yield ""
        yield (
            "Not passed by the worker that was to die there, and so not counted as kills: "
            f"{len(missed)} of {len(swept)} cases ("
            + ", ".join(f"{own.broker} {own.database} {own.path} `{own.point}`" for own in missed)
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
    for own in results.about.values():
        yield f"- {own}"


def _cell(found: Sequence[Result]) -> str:
    if not found:
        return _NONE
    kills = sum(not own.unpassed for own in found)
    lost, doubled = sum(own.lost for own in found), sum(own.doubled for own in found)
    broken = sorted({name for own in found for name in own.wrong})
    return f"{kills} / {lost} / {doubled}" + (f" **{', '.join(broken)}**" if broken else "")


def _brokers(found: Sequence[Result]) -> list[str]:
    return [own for own in _ORDER if any(one.broker == own for one in found)]


def _summary(swept: Sequence[Result]) -> Iterator[str]:
    yield "| broker | database | points | kills | messages | effects | lost | doubled | other invariants broken |"
    yield "|---|---|---|---|---|---|---|---|---|"
    totals = [0] * 5
    for broker in _brokers(swept):
        for database in _DATABASES:
            found = [own for own in swept if (own.broker, own.database) == (broker, database)]
            if not found:
                continue
            sums = [
                sum(getattr(own, name) for own in found)
                for name in ("kills", "sent", "effects", "lost", "doubled")
            ]
            totals = [own + more for own, more in zip(totals, sums, strict=True)]
            others = sum(bool(own.wrong) for own in found)
            cells = " | ".join(f"{own:,}" for own in (len(found), *sums, others))
            yield f"| {broker} | {database} | {cells} |"
    cells = " | ".join(f"**{own:,}**" for own in (len(swept), *totals))
    yield f"| **all** | | {cells} | **{sum(bool(own.wrong) for own in swept)}** |"


def _points(swept: Sequence[Result]) -> Iterator[str]:
    brokers = _brokers(swept)
    yield "| point | " + " | ".join(brokers) + " |"
    yield "|---|" + "---|" * len(brokers)
    for point in sorted({own.point for own in swept if own.point != "none"}, key=_place):
        cells = [
            _cell([own for own in swept if (own.broker, own.point) == (broker, point)])
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
    known = next((at for at, own in enumerate(_WAY) if point == own or name == own), None) or next(
        (at for at, own in enumerate(_WAY) if name.startswith(own)), len(_WAY) - 4
    )
    return known, name, when == "after"


def _scenarios(found: Sequence[Result]) -> Iterator[str]:
    names = list(dict.fromkeys(own.point for own in found))
    yield "| broker | database | " + " | ".join(f"{own.replace('_', ' ')}" for own in names) + " |"
    yield "|---|---|" + "---|" * len(names)
    for broker in _brokers(found):
        for database in _DATABASES:
            row = [own for own in found if (own.broker, own.database) == (broker, database)]
            if row:
                cells = [_told([own for own in row if own.point == name]) for name in names]
                yield f"| {broker} | {database} | " + " | ".join(cells) + " |"


def _told(found: Sequence[Result]) -> str:
    if not found:
        return _NONE
    (own,) = found
    broken = f" **{', '.join(own.wrong)}**" if own.wrong else ""
    return (
        f"{own.kills} kills, {own.effects:,} of {own.sent:,} effects, "
        f"{own.lost} lost, {own.doubled} doubled{broken}"
    )


def _wrong(found: Sequence[Result]) -> Iterator[str]:
    names = list(dict.fromkeys(own.point for own in found))
    yield "| broker | " + " | ".join(f"`{own}`" for own in names) + " |"
    yield "|---|" + "---|" * len(names)
    for broker in _brokers(found):
        cells: list[str] = []
        for name in names:
            cases = [own for own in found if (own.broker, own.point) == (broker, name)]
            caught = sum(bool(own.wrong) for own in cases)
            lost, doubled = sum(own.lost for own in cases), sum(own.doubled for own in cases)
            cells.append(
                f"caught {caught} of {len(cases)}: {lost} lost, {doubled} doubled"
                if cases
                else _NONE
            )
        yield f"| {broker} | " + " | ".join(cells) + " |"
