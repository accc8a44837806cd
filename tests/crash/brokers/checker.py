"""What must be true when everything is quiet (the invariants of the design), read by a plain driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from tests.crash.brokers.service import AMOUNT, FAILS, MAX_ATTEMPTS, Job, unfinished
from tests.support.databases import Raw


@dataclass(frozen=True)
class Checked:
    """What was found, and the invariants that are broken."""

    sent: int
    effects: int
    lost: int
    doubled: int
    wrong: tuple[str, ...]


def check(raw: Raw, job: Job, confirmed: Collection[str], *, kills: int, left: int) -> Checked:
    """Compare the tables with what the broker had confirmed to the producer."""
    ids = set(confirmed)
    effects = Counter(_text(value) for (value,) in raw.rows("SELECT payment FROM ledger"))
    rows = {
        _text(value): more
        for value, *more in raw.rows(
            "SELECT message_id, status, attempts, starts, lease_until FROM txbox_inbox"
        )
    }
    history = Counter(_text(value) for (value,) in raw.rows("SELECT message_id FROM txbox_attempt"))
    aside = raw.value("SELECT count(*) FROM txbox_quarantine")
    balance = raw.value("SELECT balance FROM account")
    notes = job.notes()
    failures = Counter(note.removeprefix("failed ") for note in notes if note.startswith("failed "))
    expired = Counter(
        note.removeprefix("expired ") for note in notes if note.startswith("expired ")
    )
    lost = [message_id for message_id in ids if not effects[message_id]]
    doubled = [effect for effect, count in effects.items() if count > 1]
    found = {
        "I1 doubled": doubled,
        "I2 lost": lost,
        "I2 nobody sent it": set(effects) - ids,
        "I3 processed, no effect": any(
            status == "processed" and not effects[value] for value, (status, *_) in rows.items()
        ),
        "I3 effect, not processed": any(
            effect not in rows or rows[effect][0] != "processed" for effect in effects
        ),
        "I4 dead": any(status == "dead" for status, *_ in rows.values()),
        "I5 balance": balance != AMOUNT * effects.total(),
        "I8 attempts": any(
            not failures[value] <= attempts <= MAX_ATTEMPTS
            # a lease that expired stands in the history, and is no attempt
            or history[value] < attempts
            or bool(attempts) != (value == FAILS)
            for value, (_, attempts, *_) in rows.items()
        ),
        "I8 starts": any(
            # on a busy machine a lease may run out under a run that lives
            starts > kills + expired[value]
            for value, (_, _, starts, _) in rows.items()
        ),
        "I9 stuck": unfinished(raw) or any(until is not None for *_, until in rows.values()),
        "I9 not acknowledged": left,
        "quarantined": aside,
        "error": any(note.startswith("error ") for note in notes),
    }
    return Checked(
        len(ids), effects.total(), len(lost), len(doubled),
        tuple(name for name, wrong in found.items() if wrong),
    )  # fmt: skip


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
