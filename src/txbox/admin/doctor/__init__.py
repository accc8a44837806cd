"""`txbox doctor`: what is wrong, the evidence and the remedy; and what could not be examined.

database.py examines the server, its tables and their rows, app.py an App and its brokers. Nothing there writes, and
nothing scans a table.

Source: docs/decisions/0035-doctor.md
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]
#: The worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

#: Every code: an error breaks a promise or stops work, a warning will, a note is good to know.
CODES: dict[str, Severity] = {
    # the tables
    "schema-missing": "error",
    "schema-version": "error",
    "schema-behind": "warning",
    "schema-drift": "error",
    "index-invalid": "error",
    "guard-off": "error",
    "guard-changed": "error",
    "foreign-create": "warning",
    "partitions-missing": "warning",
    # the server
    "session-setting": "error",
    "row-security": "error",
    "role-encoding": "warning",
    "server-encoding": "warning",
    "on-replica": "error",
    "isolation-level": "warning",
    "pooler-statement": "error",
    "pooler-prepared": "error",
    "pooler-transaction": "note",
    "pooler-listen": "warning",
    "durability-fsync": "error",
    "durability-torn-pages": "error",
    "durability-flush": "error",
    "durability-commit": "warning",
    "durability-journal": "error",
    "replication-lag": "warning",
    "replication-asynchronous": "note",
    "clock-skew": "warning",
    "autovacuum-off": "warning",
    "dead-tuples": "warning",
    "old-transaction": "warning",
    # time-outs, in the order in which they must grow
    "time-out-order": "error",
    "time-out-statement": "warning",
    "time-out-transaction": "warning",
    "time-out-lock-wait": "warning",
    "time-out-redelivery": "error",
    "time-out-grace": "note",
    # what the App says
    "topic-unhandled": "error",
    "order-not-kept": "error",
    "weak-ids": "note",
    # the brokers
    "topic-missing": "error",
    "auto-ack": "error",
    "not-durable": "error",
    "retention-too-short": "error",
    "replay-unbounded": "note",
    "broker-drops": "warning",
    "delivery-limit": "warning",
    "duplicate-window": "note",
    # rows
    "orphan-consumer": "warning",
    "orphan-messages": "warning",
    "orphan-route": "warning",
    "consumer-paused": "warning",
    "inbox-overdue": "warning",
    "outbox-overdue": "warning",
    "lease-expired": "warning",
    "dead-messages": "warning",
    "dead-outgoing": "warning",
    "quarantined-messages": "warning",
    "pruning-stopped": "warning",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or good to know.

    Args:
        code: a key of `CODES`.
        problem: one sentence, with the figures that prove it.
        remedy: the command, the statement or the setting that mends it.
    """

    code: str
    problem: str
    remedy: str

    @property
    def severity(self) -> Severity:
        return CODES[self.code]


@dataclass(frozen=True, slots=True)
class Unchecked:
    """What could not be examined, and why."""

    what: str
    why: str


@dataclass(slots=True)
class Diagnosis:
    """What was found, and what could not be examined."""

    findings: list[Finding] = field(default_factory=list[Finding])
    unchecked: list[Unchecked] = field(default_factory=list[Unchecked])

    def not_checked(self, what: str, why: str) -> None:
        self.unchecked.append(Unchecked(what, why))

    def at_least(self, severity: Severity) -> list[Finding]:
        """The findings of this severity or worse."""
        bad = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return [finding for finding in self.findings if finding.severity in bad]

    def sort(self) -> None:
        """The worst first; within a severity in the order of `CODES`."""
        order = {code: place for place, code in enumerate(CODES)}
        self.findings.sort(key=lambda one: (SEVERITIES.index(one.severity), order[one.code]))
