"""Policies: frozen values that say how long, how often and how much; every limit has its default here."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import time, timedelta

from txbox.errors import ConfigurationError


def _check(condition: bool, policy: object, field: str, allowed: str) -> None:
    if not condition:
        value = getattr(policy, field)
        raise ConfigurationError(
            f"{type(policy).__name__}.{field} is {value!r}: it must be {allowed}."
        )


def _check_durations(policy: object, *fields: str, zero: bool = False) -> None:
    for field in fields:
        value = getattr(policy, field)
        fits = isinstance(value, timedelta) and (value > timedelta(0) or (zero and not value))
        _check(fits, policy, field, f"a timedelta {'of zero or more' if zero else 'above zero'}")


def _check_counts(policy: object, least: int, *fields: str, most: int | None = None) -> None:
    allowed = f"{least:,} or more" if most is None else f"between {least:,} and {most:,}"
    for field in fields:
        value = getattr(policy, field)
        fits = type(value) is int and least <= value and (most is None or value <= most)
        _check(fits, policy, field, allowed)


def _is_growth(factor: object) -> bool:
    return isinstance(factor, (int, float)) and factor >= 1.0


def _are_utc_times(window: object) -> bool:
    match window:
        case (time() as begins, time() as ends):
            return begins != ends and begins.tzinfo is None and ends.tzinfo is None
        case _:
            return False


def _second_of_day(moment: time) -> float:
    return moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed message is tried again, and when it is given up.

    Args:
        max_attempts: failures before the message is dead, 1 or more.
        base: the longest wait after the first failure.
        factor: growth of that bound from failure to failure, 1.0 or more.
        cap: the bound never grows past this.
        max_age: a failure this long after arrival is final; None for no limit.

    The wait is drawn evenly between zero and the bound ("full jitter"), so that messages which
    failed together do not come back together.
    """

    max_attempts: int = 8
    base: timedelta = timedelta(seconds=30)
    factor: float = 2.0
    cap: timedelta = timedelta(hours=1)
    max_age: timedelta | None = None

    def __post_init__(self) -> None:
        _check_counts(self, 1, "max_attempts")
        _check_durations(self, "base", "cap", zero=True)
        _check(_is_growth(self.factor), self, "factor", "1.0 or more")
        if self.max_age is not None:
            _check_durations(self, "max_age")

    def delay_s(self, failures: int) -> float:
        """Draw the wait in seconds after the given number of failures (1 or more)."""
        # the exponent is bounded so that a huge max_attempts cannot overflow a float
        bound = self.base.total_seconds() * self.factor ** min(failures - 1, 64)
        return random.uniform(0.0, min(bound, self.cap.total_seconds()))  # jitter, not a secret


@dataclass(frozen=True, slots=True)
class Lease:
    """How rows are taken from the table.

    Args:
        duration: after this long without a heartbeat a row may be rescued.
        max_starts: runs that never ended before the message is dead ("killed its process").
        batch: rows leased together, 1 to 1,000; more where the next transaction takes more.
    """

    duration: timedelta = timedelta(minutes=5)
    max_starts: int = 3
    batch: int = 20

    def __post_init__(self) -> None:
        _check_durations(self, "duration")
        _check_counts(self, 1, "max_starts")
        _check_counts(self, 1, "batch", most=1000)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats: a third of the duration."""
        return self.duration.total_seconds() / 3


@dataclass(frozen=True, slots=True)
class Retention:
    """How long finished rows are kept.

    Args:
        processed: age by completion time after which processed and discarded rows may be pruned;
            it must be longer than the longest replay of any of your brokers.
        batch: most rows deleted in one transaction; it begins with fewer, and adapts to the time they take.
        every: pause between two prune runs of `txbox run`.
        window: from when to when, by the UTC clock of the database, `txbox run` and `txbox maintain` may
            prune: `(time(1), time(5))`, or over midnight; None for always.
        partition: the time that one partition holds, in a table that is partitioned by the time in its
            ids: a whole number of hours.
        ahead: how many partitions are made ahead, 1 to 100.
        quarantine: how long a quarantine row is kept after it was accepted or discarded; one that waits for a
            decision is never deleted.
        quarantine_bytes: of the payloads in the quarantine together; beyond it the oldest are dropped, and
            their rows stay.
    """

    processed: timedelta = timedelta(days=30)
    batch: int = 1000
    every: timedelta = timedelta(minutes=15)
    window: tuple[time, time] | None = None
    partition: timedelta = timedelta(days=1)
    ahead: int = 7
    quarantine: timedelta = timedelta(days=30)
    quarantine_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        _check_durations(self, "processed", "every", "partition", "quarantine")
        _check_counts(self, 1, "batch", most=100_000)
        _check_counts(self, 0, "quarantine_bytes")
        _check(
            self.window is None or _are_utc_times(self.window),
            self,
            "window",
            "two different times of the day, in UTC and without a time zone, or None",
        )
        _check(not self.partition % timedelta(hours=1), self, "partition", "whole hours")
        _check_counts(self, 1, "ahead", most=100)

    def open_at(self, second: float) -> bool:
        """Say whether pruning may run at this second of the database's UTC day."""
        if self.window is None:
            return True
        begins, ends = (_second_of_day(moment) for moment in self.window)
        if begins < ends:
            return begins <= second < ends
        return second >= begins or second < ends


@dataclass(frozen=True, slots=True)
class GapPolicy:
    """What a consumer with `sequence=` does about versions that are missing.

    Args:
        first: the version that a key begins with; smaller ones are never waited for. None takes
            whatever comes first as the beginning.
        wait: how long a message waits for the versions before it that have not arrived; then the
            event SequenceGap is raised, and it is processed.
    """

    first: int | None = 1
    wait: timedelta = timedelta(minutes=5)

    def __post_init__(self) -> None:
        _check(self.first is None or type(self.first) is int, self, "first", "an integer or None")
        _check_durations(self, "wait")


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """How staged messages leave the outbox.

    Args:
        batch: rows leased and published together, 1 to 10,000.
        lease: after this long the rows of a relay that went away may be sent by another.
        confirm_within: how long a batch waits for its confirmations, each 500 messages of a larger
            one; less than half of the lease.
        poll: the longest pause between two looks at an empty outbox.
        retry: when a message that was refused is sent again, and when it is given up.
        keep_sent: how long sent rows are kept; zero deletes them at once.
    """

    batch: int = 500
    lease: timedelta = timedelta(seconds=30)
    confirm_within: timedelta = timedelta(seconds=10)
    poll: timedelta = timedelta(seconds=1)
    retry: RetryPolicy = RetryPolicy(
        max_attempts=20, base=timedelta(seconds=1), cap=timedelta(minutes=5)
    )
    keep_sent: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        _check_counts(self, 1, "batch", most=10_000)
        _check_durations(self, "lease", "confirm_within", "poll")
        _check(
            self.confirm_within < self.lease / 2, self, "confirm_within", "under half of the lease"
        )
        _check(type(self.retry) is RetryPolicy, self, "retry", "a RetryPolicy")
        _check_durations(self, "keep_sent", zero=True)


@dataclass(frozen=True, slots=True)
class Batching:
    """How many deliveries a lane takes at once.

    Args:
        messages: deliveries, 1 to 10,000. In flight are at most three batches for each lane, and about
            a thousand deliveries where that is more than three batches.
        payload_bytes: sum of payloads after which a batch is closed; about twice that is in flight.
        duration: what a transaction of several messages may take; slower handlers get smaller batches.
    """

    messages: int = 100
    payload_bytes: int = 4 * 1024 * 1024
    duration: timedelta = timedelta(milliseconds=50)

    def __post_init__(self) -> None:
        _check_counts(self, 1, "messages", most=10_000)
        _check_counts(self, 1, "payload_bytes")
        _check_durations(self, "duration")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that keep one bad message from hurting the rest.

    Args:
        payload_bytes: a larger payload is quarantined.
        quarantined_bytes: a payload larger than even this is cut to it in the quarantine.
        headers_bytes: larger headers are quarantined.
        error_bytes: error text and traceback are cut to this.
        lock_timeout: the longest wait for another transaction that holds the same message id; an
            App that is given no Limits takes half of its lease where that is shorter.
        conflict_retries: immediate retries after a deadlock or serialization failure.
        unavailable_for: how long `process` waits for the database before it raises; a worker waits on.
        connections: how many lanes of one worker work in a transaction at a time, each on a connection; the
            others wait for their turn. None: 16, or the largest `concurrency` of a handler with a
            transaction where that is more. A worker needs a few beside: see docs/howto/service.md.
    """

    payload_bytes: int = 1024 * 1024
    quarantined_bytes: int = 4 * 1024 * 1024
    headers_bytes: int = 64 * 1024
    error_bytes: int = 8 * 1024
    lock_timeout: timedelta = timedelta(seconds=5)
    conflict_retries: int = 10
    unavailable_for: timedelta = timedelta(seconds=30)
    connections: int | None = None

    @classmethod
    def within(cls, lease: Lease) -> Limits:
        """The defaults, with a claim that gives up before a short lease runs out."""
        return cls(lock_timeout=min(cls().lock_timeout, lease.duration / 2))

    def __post_init__(self) -> None:
        _check_counts(self, 1, "payload_bytes", "quarantined_bytes", "headers_bytes")
        _check_counts(self, 256, "error_bytes")
        _check_counts(self, 0, "conflict_retries")
        _check_durations(self, "lock_timeout", "unavailable_for")
        if self.connections is not None:
            _check_counts(self, 1, "connections")


def check_policies(**given: tuple[object, type]) -> None:
    """Check that each argument is None or its policy, which stands beside it.

    Raises:
        ConfigurationError: one is something else.
    """
    for name, (value, policy) in given.items():
        if value is not None and not isinstance(value, policy):
            raise ConfigurationError(f"{name} is {value!r}: give a {policy.__name__}.")


def check_duration(name: str, given: object) -> None:
    """Check an argument that is a timedelta or None.

    Raises:
        ConfigurationError: it is something else.
    """
    if given is not None and not isinstance(given, timedelta):
        raise ConfigurationError(
            f"{name} is {given!r}: give a timedelta, such as timedelta(seconds=5)."
        )
