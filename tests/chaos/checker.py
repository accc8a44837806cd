"""What must be true once a run is at rest: I1 to I11 of the design, read from tables and journals without txbox.

And the lists as a history for Elle, which says whether there is an order of the transactions that explains it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.journal import facts, now
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
#: What costs an attempt: what handlers do, poison at COMMIT, and a process that died. No fault does (promise 2.8).
_ATTEMPT = re.compile(
    r"(?:Reject|TransactionBroken|ValueError|LeaseExpired) |DatabaseError .*\(TXB02\)"
    r"|(?:StoreError|IntegrityError) .*(?:\((?:23503|25P02)\)|FOREIGN KEY)"
)
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


class Read(NamedTuple):
    """Lists as one statement saw them: between which times, and by name."""

    began: float
    ended: float
    lists: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class _Tables:
    """The tables at the end, in memory."""

    ledger: Counter[Key]
    amounts: Mapping[Key, int]
    inbox: Mapping[Key, tuple[str, int, str]]
    quarantine: Collection[Key]
    history: Counter[Key]
    #: The attempts that a fault has cost, and not the message.
    outages: Mapping[Key, str]
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
        {
            _key(row): f"{row[2]} {text(row[3] or '')[:200]}"
            for row in raw.rows("SELECT consumer, message_id, error_type, error FROM txbox_attempt")
            if not _ATTEMPT.match(f"{text(row[2])} {text(row[3] or '')}")
        },
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


def check(raw: Raw, folder: Path, seed: int, *, broker: str, reads: Sequence[Read] = ()) -> Checked:
    """Compare the tables with what the processes wrote down; writes `elle.edn` beside the journals.

    Args:
        reads: of the lists, while the run went on.
    """
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
    _write_elle(tables.appended, [*reads, read_lists(raw, sorted(tables.appended))], folder)
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
    for (consumer, message_id), error in tables.outages.items():
        yield "I8 a fault cost an attempt", f"{consumer} {message_id}: {error}"
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


# -- the history for Elle -------------------------------------------------------------------------------

#: One in so many appends also says which list it saw; so do the first ones, and all that look wrong.
_SEEN_EVERY = 50


def read_lists(raw: Raw, names: Sequence[str]) -> Read:
    """Read some lists with one statement, each in the order in which its appends saw one another."""
    began = now()
    rows = defaultdict[str, list[tuple[int, int]]](list)
    if names:
        marks = ", ".join(f"'{name}'" for name in names)
        for name, number, previous in raw.rows(
            f"SELECT name, n, previous FROM appended WHERE name IN ({marks}) ORDER BY n"
        ):
            rows[text(name)].append((number, previous))
    return Read(began, now(), {name: _chained(rows[name]) for name in names})


def _chained(rows: Sequence[tuple[int, int]]) -> Sequence[int]:
    """The numbers in the order of the chain that they make; those that are in no chain at the end."""
    after = defaultdict[int, list[int]](list)
    for number, previous in rows:
        after[previous].append(number)
    chain, last = list[int](), [0]
    while last:
        last = [number for previous in last for number in after.pop(previous, ())]
        chain += last
    return [*chain, *(number for numbers in after.values() for number in numbers)]


def _write_elle(
    appended: Mapping[str, Sequence[tuple[int, int]]], reads: Sequence[Read], folder: Path
) -> None:
    """Write the history that Elle checks as `list-append`.

    An append begins with its first attempt, and ends when a process has seen its commit; where none has, because it
    was killed or the answer got lost, its end is not known (`:info`). Reads are those of the harness.
    """
    begun, message_of_append = dict[tuple[str, int], float](), dict[tuple[str, int], Key]()
    for fact in facts(folder, "append"):
        name, digits, consumer, message_id = fact.words
        append = (name, int(digits))
        begun[append] = min(fact.at, begun.get(append, fact.at))
        message_of_append[append] = (consumer, message_id)
    seen = dict[Key, float]()
    for fact in facts(folder, "MessageProcessed"):
        key = (fact.words[0], fact.words[1])
        seen[key] = min(fact.at, seen.get(key, fact.at))
    # an append that no journal has is one of the checker's own tests
    begun = {(name, number): 0.0 for name in appended for number, _ in appended[name]} | begun
    previous_of = {
        (name, number): previous for name in appended for number, previous in appended[name]
    }
    orders = {name: _chained(rows) for name, rows in appended.items()}

    events = list[tuple[float, int, int, str, str]]()
    for process, (append, began) in enumerate(sorted(begun.items())):
        name, number = append
        previous = previous_of.get(append, 0)
        seen_list = ""
        if previous and (previous <= _NAMED or previous != number - 1 or not number % _SEEN_EVERY):
            order = orders[name]
            seen_list = _edn(order[: order.index(previous) + 1]) if previous in order else ""
        does = f'[:append "{name}" {number}]'
        ended = seen.get(message_of_append.get(append, ("", "")))
        asked = f'[:r "{name}" nil] {does}' if seen_list else does
        told = f'[:r "{name}" {seen_list}] {does}' if seen_list else does
        events.append((began, 0, process, "invoke", f"[{asked}]"))
        if ended is not None:
            events.append((ended, 1, process, "ok", f"[{told}]"))
        elif append in previous_of:
            events.append((now(), 1, process, "info", f"[{asked}]"))
        else:
            events.append((now(), 1, process, "fail", f"[{asked}]"))
    for process, read in enumerate(reads, len(begun)):
        asked = " ".join(f'[:r "{name}" nil]' for name in read.lists)
        told = " ".join(f'[:r "{name}" {_edn(numbers)}]' for name, numbers in read.lists.items())
        events.append((read.began, 0, process, "invoke", f"[{asked}]"))
        events.append((read.ended, 1, process, "ok", f"[{told}]"))
    # what began when another ended may have been side by side with it
    with (folder / "elle.edn").open("w") as lines:
        for index, (at, _, process, kind, value) in enumerate(sorted(events)):
            lines.write(
                f"{{:index {index} :time {int(at * 1e9)} :type :{kind} :process {process} :f :txn :value {value}}}\n"
            )


def _edn(numbers: Sequence[int]) -> str:
    return f"[{' '.join(map(str, numbers))}]"


def elle(command: Sequence[str], folder: Path) -> str:
    """Have Elle check the history.

    Args:
        command: gets the path as its last argument, and ends what it prints with true or false, as elle-cli does.
    """
    ran = subprocess.run(
        [*command, str(folder / "elle.edn")], check=False, capture_output=True, text=True
    )
    (folder / "elle.txt").write_text(ran.stdout + ran.stderr)
    last = (ran.stdout.split() or [""])[-1]
    return {"true": "valid", "false": "not valid"}.get(last, "did not answer")
