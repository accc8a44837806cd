"""What must be true after every crash (the invariants of the design), read with a plain driver connection."""

from __future__ import annotations

from dataclasses import dataclass

from tests.crash.service import AMOUNT, MAX_ATTEMPTS, Job
from tests.support.databases import Raw


@dataclass(frozen=True)
class Checked:
    """What was found of one job, and what is wrong with it."""

    effects: int
    status: str | None
    wrong: tuple[str, ...]


def check(raw: Raw, job: Job, *, unended: int, may_die: bool = False) -> Checked:
    """Compare the tables and the journal of a job with the invariants.

    Args:
        unended: the runs that never ended, of killed workers above all.
        may_die: a dead letter without an effect is a good end too.
    """
    of_each = [_check(raw, job, str(message.id), unended, may_die) for message in job.messages]
    effects = [count.effects for count in of_each]
    balance = raw.value("SELECT balance FROM account WHERE name = ?", (job.consumer,))
    notes = job.notes()
    failures = notes.count("outcome failed") + notes.count("outcome dead")
    attempts = raw.value(
        "SELECT coalesce(sum(attempts), 0) FROM txbox_inbox WHERE consumer = ?", (job.consumer,)
    )
    found = {
        "I5 balance": balance != sum(effects) * AMOUNT,
        "I8 failures": failures > attempts,
    }
    wrong = [name for count in of_each for name in count.wrong]
    wrong += [name for name, is_wrong in found.items() if is_wrong]
    odd = [number for number in effects if number != 1]
    return Checked((odd or effects)[0], of_each[0].status, tuple(dict.fromkeys(wrong)))


def _check(raw: Raw, job: Job, message_id: str, unended: int, may_die: bool) -> Checked:
    who = (job.consumer, message_id)
    effects = raw.value("SELECT count(*) FROM ledger WHERE consumer = ? AND message_id = ?", who)
    aside = raw.value("SELECT count(*) FROM txbox_quarantine WHERE consumer = ?", (job.consumer,))
    rows = raw.rows(
        "SELECT status, attempts, starts, lease_until FROM txbox_inbox"
        " WHERE consumer = ? AND message_id = ?",
        who,
    )
    status, attempts, starts, lease_until = rows[0] if rows else (None, 0, 0, None)
    history = raw.value(
        "SELECT count(*) FROM txbox_attempt WHERE consumer = ? AND message_id = ?", who
    )
    notes = job.notes()
    good_dead = may_die and status == "dead" and effects == 0
    found = {
        "I1 doubled": effects > 1,
        "I2 lost": job.acked and effects == 0 and not good_dead and not aside,
        "I2 never acknowledged": not job.acked,
        "I3 effect, not processed": effects > 0 and status != "processed",
        "I3 processed, no effect": effects == 0 and status == "processed",
        "I4 dead": status == "dead" and not good_dead,
        "I8 attempts": attempts > MAX_ATTEMPTS or history < attempts,
        "I8 starts": starts > unended,
        "I9 stuck": status not in ("processed", "dead", None)
        or (status == "processed" and lease_until is not None)
        or any(note.startswith("error TimeoutError") for note in notes),
        "error": any(note.startswith("error ") for note in notes),
    }
    return Checked(effects, status, tuple(name for name, wrong in found.items() if wrong))
