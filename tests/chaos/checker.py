"""What must be true once a run is at rest: I1 to I11 of the design, read from tables and journals without txbox."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.journal import facts
from tests.chaos.workload import (
    CHAINED,
    CONSUMERS,
    MAX_ATTEMPTS,
    message_of,
    number_of,
)
from tests.support.databases import Raw

#: A run names so many ids of each kind.
_NAMED = 8
Key = tuple[str, str]


@dataclass(frozen=True)
class Checked:
    """What a run did, and the invariants that it broke, with ids."""

    sent: int = 0
    deliveries: int = 0
    effects: int = 0
    dead: int = 0
    quarantined: int = 0
    lost: int = 0
    doubled: int = 0
    disordered: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Tables:
    """The tables at the end, in memory."""

    ledger: Counter[Key]
    amounts: Mapping[Key, int]
    inbox: Mapping[Key, tuple[str, int, str]]
    quarantine: Collection[Key]
    history: Counter[Key]
    books: Counter[str]
    appended: Mapping[str, list[tuple[int, int]]]
    counters: Mapping[str, int]
    balances: Mapping[int, int]


def _read(raw: Raw) -> _Tables:
    ledger, amounts = Counter[Key](), dict[Key, int]()
    for consumer, message_id, amount in raw.rows("SELECT consumer, message_id, amount FROM ledger"):
        ledger[text(consumer), text(message_id)] += 1
        amounts[text(consumer), text(message_id)] = amount
    appended: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, number, previous in raw.rows("SELECT name, n, previous FROM appended ORDER BY n"):
        appended[text(name)].append((number, previous))
    return _Tables(
        ledger,
        amounts,
        {
            (text(consumer), text(message_id)): (text(status), attempts, text(error or ""))
            for consumer, message_id, status, attempts, error in raw.rows(
                "SELECT consumer, message_id, status, attempts, error FROM txbox_inbox"
            )
        },
        {_key(row) for row in raw.rows("SELECT consumer, message_id FROM txbox_quarantine")},
        Counter(_key(row) for row in raw.rows("SELECT consumer, message_id FROM txbox_attempt")),
        Counter(text(cause) for (cause,) in raw.rows("SELECT cause FROM books")),
        dict(appended),
        {text(name): number for name, number in raw.rows("SELECT name, n FROM counter")},
        dict(raw.rows("SELECT name, balance FROM account")),
    )  # fmt: skip


def text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def keys_of(seed: int, number: int) -> set[Key]:
    """The consumers of a message, each with its id."""
    message = message_of(seed, number)
    return {(consumer, str(message.id)) for consumer in CONSUMERS[str(message.type)]}


def _key(row: tuple[Any, ...]) -> Key:
    return text(row[0]), text(row[1])


def check(raw: Raw, folder: Path, seed: int, *, broker: str) -> Checked:
    """Compare the tables with what the processes wrote down; writes `elle.json` beside the journals."""
    tables = _read(raw)
    confirmed, sending, others, delivered = set[int](), set[int](), set[int](), 0
    lost_until = max(
        (fact.at for fact in facts(folder, "fault") if fact.words[0] == "queue made again"), default=0.0
    )  # fmt: skip
    for fact in facts(folder, "sending", "sent", "received"):
        if fact.kind == "received":
            delivered += int(fact.words[0])
            continue
        plain = {int(word) for word in fact.words if word and word[-1] != "!"}
        (sending if fact.kind == "sending" else confirmed).update(plain)
        if fact.kind == "sent" and fact.at > lost_until:
            others.update(int(word[:-1]) for word in fact.words if word and word[-1] == "!")
    edited = {(fact.words[0], fact.words[1]) for fact in facts(folder, "edited")}
    accepted = {(fact.words[0], fact.words[1]) for fact in facts(folder, "accepted")}
    # the operator also replays what `inline` has accepted as `copy`
    accepted |= {("copy", message_id) for consumer, message_id in accepted if consumer == "inline"}

    found: dict[str, list[str]] = defaultdict(list)
    for name, what in _wrong_messages(tables, seed, confirmed, edited):
        found[name].append(what)
    if broker != "nats":
        # it drops what has the id of a message that it has just had
        for number in others & confirmed:
            message = message_of(seed, number)
            does = str(message.id).split("-")[1]
            for consumer in CONSUMERS[str(message.type)] if does == "ok" else ():
                if (consumer, str(message.id)) not in tables.quarantine:
                    found["I2 another payload is nowhere"].append(f"{consumer} {message.id}")
    for name, what in _wrong_tables(tables, seed, sending, accepted):
        found[name].append(what)
    for name, what in _wrong_events(tables, folder):
        found[name].append(what)
    _write_elle(tables.appended, folder / "elle.json")
    if any(found.values()):
        _write_tables(raw, folder)
    statuses = Counter(status for status, *_ in tables.inbox.values())
    return Checked(
        sent=len(confirmed),
        deliveries=delivered,
        effects=tables.ledger.total() + tables.books.total() + sum(map(len, tables.appended.values())),
        dead=statuses["dead"],
        quarantined=len(tables.quarantine),
        lost=sum(len(found[name]) for name in list(found) if name.startswith(("I2", "I6 lost"))),
        doubled=len(found["I1 doubled"]) + len(found["I6 doubled"]),
        disordered=len(found["I7 order"]),
        wrong=[
            f"{name}: {len(what)}: {'; '.join(sorted(what)[:_NAMED])}"
            for name, what in sorted(found.items())
            if what
        ],
    )  # fmt: skip


#: What a run that broke something keeps of its tables, for whoever has to find out why.
_KEPT = {
    "txbox_inbox": "consumer, message_id, status, attempts, starts, token, received_at, processed_at, updated_at",
    "txbox_outbox": "id, number, status, topic, route, cause_id, attempts, staged_at, available_at, sent_at, token",
    "txbox_quarantine": "consumer, message_id, status, received_at, reason",
    "ledger": "consumer, message_id",
    "books": "cause, message_id",
}


def _write_tables(raw: Raw, folder: Path) -> None:
    for table, columns in _KEPT.items():
        rows = raw.rows(f"SELECT {columns} FROM {table}")
        lines = [columns.replace(", ", "\t"), *("\t".join(map(text, row)) for row in rows)]
        (folder / f"{table}.tsv").write_text("\n".join(lines) + "\n")


def _wrong_messages(
    tables: _Tables, seed: int, confirmed: Collection[int], edited: Collection[Key]
) -> Iterator[tuple[str, str]]:
    """Each confirmed message has come to the end that belongs to it (I2, I4)."""
    for number in confirmed:
        message = message_of(seed, number)
        message_id, kind = str(message.id), str(message.type)
        does = message_id.split("-")[1]
        for consumer in CONSUMERS[kind]:
            key = (consumer, message_id)
            status, _, error = tables.inbox.get(key, ("", 0, ""))
            effects = tables.ledger[key]
            match "ok" if consumer == "copy" and does in ("poison", "late") else does:
                case "ok" | "slow" | "full":
                    good = status == "processed" and effects == 1
                case "poison" | "late":
                    good = (status == "dead" and not effects) or (
                        status == "processed" and effects == 1 and key in edited
                    )
                case "malformed":
                    good = status == "dead" and not effects
                case "oversize":
                    good = key in tables.quarantine and not effects
                case _:
                    good = status in ("dead", "processed")
            if good:
                continue
            if not status and key not in tables.quarantine:
                yield "I2 lost", f"{consumer} {message_id}"
            elif effects <= 1:
                what = f"{consumer} {message_id}: {status or 'quarantined'}, {effects} effects, {error[:200]}"
                yield "I2/I4 not what became of it", what


def _wrong_tables(
    tables: _Tables, seed: int, sending: Collection[int], accepted: Collection[Key]
) -> Iterator[tuple[str, str]]:
    for key, count in tables.ledger.items():
        consumer, message_id = key
        if consumer == "odd":
            continue
        if count > 1:
            yield "I1 doubled", f"{consumer} {message_id}: {count}"
        if tables.inbox.get(key, ("no row",))[0] != "processed":
            yield "I3 effect, not processed", f"{consumer} {message_id}: {tables.inbox.get(key)}"
        if number_of(message_id) not in sending or (
            message_id.startswith("accepted-") and key not in accepted
        ):
            yield "I11 nobody sent it", f"{consumer} {message_id}"
    for (consumer, message_id), (status, attempts, _) in tables.inbox.items():
        booked = consumer not in ("books", "list", "odd")
        if status == "processed" and booked and not tables.ledger[consumer, message_id]:
            yield "I3 processed, no effect", f"{consumer} {message_id}"
        kept = tables.history[consumer, message_id]
        if attempts > MAX_ATTEMPTS or kept < attempts:
            yield "I8 attempts", f"{consumer} {message_id}: {attempts}, {kept} kept"
    yield from _wrong_balances(tables, seed)
    causes = {message_id for consumer, message_id in tables.ledger if consumer in CHAINED}
    yield from (("I6 lost", cause) for cause in causes - tables.books.keys())
    yield from (("I6 nobody staged it", cause) for cause in tables.books.keys() - causes)
    yield from (("I6 doubled", cause) for cause, count in tables.books.items() if count > 1)
    for name, numbers in tables.appended.items():
        for at, (number, previous) in enumerate(numbers, 1):
            if (number, previous) != (at, at - 1):
                yield "I7 order", f"{name}: {number} after {previous}, in place {at}"
        if name.startswith("list-") and len(numbers) != tables.counters[name.removeprefix("list-")]:
            yield (
                "I7 order",
                f"{name}: {len(numbers)} of {tables.counters[name.removeprefix('list-')]}",
            )
    appends = sum(consumer == "append" for consumer, _ in tables.ledger.elements())
    staged = sum(number for name, number in tables.counters.items() if name.isdigit())
    if appends != staged:
        yield "I5 sums", f"{appends} appends, {staged} counted"


def _wrong_balances(tables: _Tables, seed: int) -> Iterator[tuple[str, str]]:
    expected = Counter[int]()
    for (consumer, message_id), count in tables.ledger.items():
        if consumer in ("copy", "odd"):
            continue
        body = json.loads(_whole(message_of(seed, number_of(message_id)).payload or b""))
        amount = tables.amounts[consumer, message_id] * count
        expected[body["from"]] -= amount
        expected[body["to"]] += amount
    for account, balance in tables.balances.items():
        if balance != expected[account]:
            yield "I5 sums", f"account {account} has {balance}, not {expected[account]}"


def _whole(payload: bytes) -> bytes:
    return payload if payload.endswith(b"}") else payload + b"}"


def _wrong_events(tables: _Tables, folder: Path) -> Iterator[tuple[str, str]]:
    failures = Counter[Key]()
    for fact in facts(folder, "MessageFailed", "MessageDead", "SequenceGap", "ErrorContained"):
        consumer, message_id, *why = fact.words
        match fact.kind:
            case "MessageFailed":
                failures[consumer, message_id] += 1
            case "SequenceGap":
                yield "I7 order", f"gap of {consumer} {message_id}"
            case "ErrorContained":
                yield (
                    "an error was contained",
                    f"{fact.process} {consumer} {message_id} {' '.join(why)[:300]}",
                )
            case _:
                pass
    for key, count in failures.items():
        if tables.history[key] < count:
            yield (
                "I8 attempts",
                f"{' '.join(key)}: {count} failures seen, {tables.history[key]} kept",
            )


def _write_elle(appended: Mapping[str, list[tuple[int, int]]], path: Path) -> None:
    """The lists as a history that `elle-cli --model list-append` checks: each append alone, then one read of all."""
    history: list[dict[str, Any]] = []

    def operation(process: int, value: list[list[Any]], result: list[list[Any]]) -> None:
        for kind, shown in (("invoke", value), ("ok", result)):
            history.append(
                {"index": len(history), "type": kind, "process": process, "f": "txn", "value": shown}
            )  # fmt: skip

    for process, (name, numbers) in enumerate(sorted(appended.items())):
        for number, previous in numbers:
            before = list(range(1, previous + 1)) if previous <= _NAMED else None
            reads = [["r", name, before]] if before is not None else []
            append = [["append", name, number]]
            operation(
                process, [*([["r", name, None]] if reads else []), *append], [*reads, *append]
            )
    names = sorted(appended)
    last = [["r", name, [number for number, _ in appended[name]]] for name in names]
    operation(len(names), [["r", name, None] for name in names], last)
    lines = ",\n".join(json.dumps(entry) for entry in history)
    path.write_text(f"[\n{lines}\n]\n")
