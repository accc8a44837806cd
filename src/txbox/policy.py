"""Policies: frozen values that say how long, how often and how much. Every limit has its default here."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Literal, cast

from txbox.boundaries import blamed
from txbox.errors import LONGEST, ConfigurationError
from txbox.message import parsed

#: How long a process that stops may drain: Kubernetes kills what has not ended 30 s after SIGTERM.
GRACE = timedelta(seconds=25)
# the largest INTEGER of the supported databases
_INTEGER_MAX = 2**31 - 1


def _check(condition: bool, policy: object, field: str, allowed: str) -> None:
    if not condition:
        value = getattr(policy, field)
        raise ConfigurationError(
            f"{type(policy).__name__}.{field} is {value!r}: it must be {allowed}."
        )


def _check_durations(policy: object, *fields: str, zero: bool = False) -> None:
    for field in fields:
        value = getattr(policy, field)
        fits = (
            isinstance(value, timedelta)
            and (value > timedelta(0) or (zero and not value))
            and value <= LONGEST
        )
        least = "of zero or more" if zero else "above zero"
        _check(fits, policy, field, f"a timedelta {least}, and at most ten years")


def _check_counts(policy: object, least: int, *fields: str, most: int | None = None) -> None:
    allowed = f"{least:,} or more" if most is None else f"between {least:,} and {most:,}"
    for field in fields:
        value = getattr(policy, field)
        fits = type(value) is int and least <= value and (most is None or value <= most)
        _check(fits, policy, field, allowed)


def _is_growth(factor: object) -> bool:
    # delay_s multiplies it with itself up to 64 times, which must not overflow a float
    return isinstance(factor, (int, float)) and 1.0 <= factor <= 1_000


def _are_utc_times(window: object) -> bool:
    match window:
        case (time() as begins, time() as ends):
            return begins != ends and begins.tzinfo is None and ends.tzinfo is None
        case _:
            return False


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed message is tried again, and when it is given up.

    Args:
        max_attempts: failures after which the message is dead, 1 or more.
        base: the longest wait after the first failure.
        factor: how much that bound grows with each failure, 1.0 to 1,000.
        cap: the bound never exceeds this.
        max_age: a failure this long after arrival is final; None for no limit.

    The wait is drawn uniformly between zero and the bound ("full jitter"), so that messages that
    failed together do not come back together.
    """

    max_attempts: int = 8
    base: timedelta = timedelta(seconds=30)
    factor: float = 2.0
    cap: timedelta = timedelta(hours=1)
    max_age: timedelta | None = None

    def __post_init__(self) -> None:
        _check_counts(self, 1, "max_attempts", most=_INTEGER_MAX)
        _check_durations(self, "base", "cap", zero=True)
        _check(_is_growth(self.factor), self, "factor", "between 1.0 and 1,000")
        if self.max_age is not None:
            _check_durations(self, "max_age")

    def delay_s(self, failures: int) -> float:
        """Draw the wait in seconds after this number of failures (1 or more)."""
        # the exponent is capped so that a huge max_attempts cannot overflow a float
        bound = self.base.total_seconds() * self.factor ** min(failures - 1, 64)
        return random.uniform(0.0, min(bound, self.cap.total_seconds()))  # jitter, not a secret


class Backoff:
    """Pauses between tries that grow: each is `factor` times the one before it, up to the longest.

    Args:
        first_s, longest_s: the shortest and the longest pause, in seconds.
        spread: bounds of the random factor of each pause, so that many do not try again together.
    """

    __slots__ = ("_factor", "_first_s", "_longest_s", "_spread", "pause_s")

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        *,
        factor: float = 2.0,
        spread: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._first_s = min(first_s, longest_s)
        self._longest_s = longest_s
        self._factor = factor
        self._spread = spread
        #: The next pause, before it is spread.
        self.pause_s = self._first_s

    @property
    def at_longest(self) -> bool:
        """Whether the next pause is the longest."""
        return self.pause_s >= self._longest_s

    def next_s(self) -> float:
        """Return the next pause in seconds; the one after it is longer."""
        pause_s = self.pause_s
        self.pause_s = min(pause_s * self._factor, self._longest_s)
        return pause_s * random.uniform(*self._spread)  # jitter, not a secret

    def reset(self) -> None:
        """Begin with the shortest pause again: a try has succeeded."""
        self.pause_s = self._first_s


@dataclass(frozen=True, slots=True)
class Lease:
    """How rows are leased from the table.

    Args:
        duration: a row without a heartbeat for this long may be rescued.
        max_starts: starts without an end after which the message is dead ("killed its process").
        batch: rows leased together, 1 to 1,000; raised if the next transaction takes more.
    """

    duration: timedelta = timedelta(minutes=5)
    max_starts: int = 3
    batch: int = 20

    def __post_init__(self) -> None:
        _check_durations(self, "duration")
        _check_counts(self, 1, "max_starts", most=_INTEGER_MAX)
        _check_counts(self, 1, "batch", most=1000)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats: a third of the duration."""
        return self.duration.total_seconds() / 3


@dataclass(frozen=True, slots=True)
class Retention:
    """How long finished rows are kept.

    Args:
        processed: processed and discarded rows may be pruned this long after they finished. It must
            exceed the longest replay any of your brokers can make.
        batch: most rows deleted in one transaction. Pruning starts with fewer and adapts to how long they take.
        every: pause between two prune runs of `txbox run`.
        window: when `txbox run` and `txbox maintain` may prune, by the database's clock in UTC:
            `(time(1), time(5))`. It may span midnight; None for always.
        partition: the time one partition covers, if the table is partitioned by the time in its
            ids; a whole number of hours.
        ahead: how many partitions are created in advance, 1 to 100.
        quarantine: how long a quarantine row is kept after it was accepted or discarded. A row that
            awaits a decision is never deleted.
        quarantine_bytes: limit for all payloads in the quarantine together. Beyond it the oldest are
            dropped; their rows stay.
        activity: how long counts are kept, by longer steps as they grow old; an hour or more.
    """

    processed: timedelta = timedelta(days=30)
    batch: int = 1000
    every: timedelta = timedelta(minutes=15)
    window: tuple[time, time] | None = None
    partition: timedelta = timedelta(days=1)
    ahead: int = 7
    quarantine: timedelta = timedelta(days=30)
    quarantine_bytes: int = 256 * 1024 * 1024
    activity: timedelta = timedelta(days=7)

    def __post_init__(self) -> None:
        _check_durations(self, "processed", "every", "partition", "quarantine")
        _check_counts(self, 1, "batch", most=100_000)
        _check_counts(self, 0, "quarantine_bytes")
        _check_durations(self, "activity")
        _check(self.activity >= timedelta(hours=1), self, "activity", "an hour or more")
        _check(
            self.window is None or _are_utc_times(self.window),
            self,
            "window",
            "two different times of the day, in UTC and without a time zone, or None",
        )
        _check(not self.partition % timedelta(hours=1), self, "partition", "whole hours")
        _check_counts(self, 1, "ahead", most=100)

    def open_at(self, second: float) -> bool:
        """Whether pruning may run at this second of the database's UTC day."""
        if self.window is None:
            return True
        begins, ends = self.window
        moment = datetime.fromtimestamp(second, UTC).time()
        if begins < ends:
            return begins <= moment < ends
        return moment >= begins or moment < ends


@dataclass(frozen=True, slots=True)
class GapPolicy:
    """What a consumer with `sequence=` does about missing versions.

    Args:
        first: the version a key starts with; smaller ones are never waited for. None starts with
            whatever arrives first.
        wait: how long a message waits for missing earlier versions. After that, the event
            SequenceGap is raised and the message is processed.
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
        lease: rows of a relay that went away may be sent by another after this long.
        confirm_within: how long a batch waits for its confirmations, for each 500 messages of a
            larger one; less than half the lease.
        poll: the longest pause between two polls of an empty outbox.
        retry: when a refused message is sent again, and when it is given up.
        keep_sent: how long sent rows are kept; zero deletes them at once.
    """

    batch: int = 500
    lease: timedelta = timedelta(seconds=30)
    confirm_within: timedelta = timedelta(seconds=10)
    poll: timedelta = timedelta(seconds=2.5)
    retry: RetryPolicy = RetryPolicy(
        max_attempts=20, base=timedelta(seconds=1), cap=timedelta(minutes=5)
    )
    keep_sent: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        _check_counts(self, 1, "batch", most=10_000)
        _check_durations(self, "lease", "confirm_within", "poll")
        _check(self.confirm_within < self.lease / 2, self, "confirm_within", "under half the lease")
        _check(type(self.retry) is RetryPolicy, self, "retry", "a RetryPolicy")
        _check_durations(self, "keep_sent", zero=True)


@dataclass(frozen=True, slots=True)
class Batching:
    """How many deliveries a lane takes at once.

    Args:
        messages: deliveries, 1 to 10,000. At most three batches per lane are in flight, or about a
            thousand deliveries if that is more.
        payload_bytes: a batch is closed when its payloads exceed this; about twice as much is in flight.
        duration: how long a transaction of several messages may take; slower handlers get smaller batches.
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
        quarantined_bytes: a payload larger than this is truncated in the quarantine.
        headers_bytes: a message with larger headers is quarantined.
        error_bytes: error text and traceback are truncated to this.
        lock_timeout: the longest wait for another transaction that holds the same message id. By
            default an App uses half its lease if that is shorter.
        conflict_retries: immediate retries after a deadlock or serialization failure.
        unavailable_for: how long `process` waits for the database before it raises; a worker keeps waiting.
        connections: how many lanes of one worker may be in a transaction at a time, each on its own
            connection; the others wait. None: 16, or the largest `concurrency` of a transactional
            handler if that is more. A worker needs a few more: see docs/howto/service.md.
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
        """The defaults, with a lock timeout short enough that a claim gives up before a short lease expires."""
        return cls(lock_timeout=min(cls().lock_timeout, lease.duration / 2))

    def __post_init__(self) -> None:
        _check_counts(self, 1, "payload_bytes", "quarantined_bytes", "headers_bytes")
        _check_counts(self, 256, "error_bytes")
        _check_counts(self, 0, "conflict_retries")
        _check_durations(self, "lock_timeout", "unavailable_for")
        if self.connections is not None:
            _check_counts(self, 1, "connections")


#: Headers that HTTP, gateways and webhooks authenticate with. No row keeps them and no relay forwards them.
#: Matched by exact name: a `page-token` is harmless.
CREDENTIAL_HEADERS = frozenset(
    {
        "authorization", "proxy-authorization", "x-authorization", "x-forwarded-authorization", "cookie", "cookie2",
        "set-cookie", "set-cookie2", "x-api-key", "api-key", "apikey", "x-apikey", "ocp-apim-subscription-key",
        "x-auth-token", "x-access-token", "access-token", "x-id-token", "x-refresh-token", "x-session-token",
        "x-csrf-token", "x-xsrf-token", "x-functions-key", "x-goog-api-key", "x-goog-iap-jwt-assertion",
        "x-amz-security-token", "x-amzn-oidc-accesstoken", "x-amzn-oidc-data", "x-vault-token",
        "x-ms-token-aad-access-token", "x-ms-token-aad-id-token", "x-ms-token-aad-refresh-token",
        "x-forwarded-access-token", "cf-access-jwt-assertion",
        "cf-access-client-secret", "private-token", "job-token", "x-gitlab-token", "x-github-token", "x-secret",
        "x-webhook-secret", "x-webhook-token", "x-telegram-bot-api-secret-token", "x-slack-signature",
        "x-hub-signature", "x-hub-signature-256", "stripe-signature", "webhook-signature", "svix-signature",
        "x-shopify-hmac-sha256", "x-twilio-signature", "x-signature", "x-webhook-signature", "password",
    }
)  # fmt: skip
#: Shown instead of what a rule hides.
HIDDEN = "***"
_ERROR_CHARACTERS = 8 * 1024
_WITHHELD_ERROR = "(withheld: a rule of App(redact=…) failed on this text)"
_WITHHELD_JSON = b'"(withheld: App(redact=...) names fields in it, but it is not valid JSON)"'


@dataclass(frozen=True, slots=True)
class Redaction:
    """What operators, logs and stored error texts never show. Handlers, hashes and brokers see everything.

    Args:
        headers: headers whose values are hidden, in addition to credentials, which are always hidden.
        fields: JSON paths to hide: "body.card.number" in payloads, "result.token" in what handlers
            returned. A path applies to every element of a list; "*" matches any name. Everything below
            the path is hidden. A payload that is not JSON is hidden entirely.
        errors: what to hide in error texts, tracebacks and reasons: regular expressions, or a callable
            from text to text. The callable may be applied to its own result.

    If a rule fails, the whole text is withheld.
    """

    headers: Sequence[str] = ()
    fields: Sequence[str] = ()
    errors: Callable[[str], str] | Sequence[str | re.Pattern[str]] = ()

    def __post_init__(self) -> None:
        for name in ("headers", "fields"):
            value = getattr(self, name)
            _check(_are_texts(value), self, name, "a sequence of texts")
        for path in self.fields:
            root, *names = path.split(".")
            fits = root in ("body", "result") and all(names)
            _check(fits, self, "fields", "paths such as 'body.card.number' or 'result.token'")
        if not callable(self.errors):
            _check(not isinstance(self.errors, str), self, "errors", "a callable or a sequence")
            try:
                compiled = tuple(re.compile(pattern) for pattern in self.errors)
            except (TypeError, re.error) as error:
                raise ConfigurationError(
                    f"invalid regular expression in Redaction.errors {self.errors!r}: {error}."
                ) from None
            object.__setattr__(self, "errors", compiled)

    def header(self, name: str, value: str | None) -> str | None:
        """Return the value of a header as it may be shown."""
        lower = name.lower()
        hidden = lower in CREDENTIAL_HEADERS or any(lower == rule.lower() for rule in self.headers)
        return HIDDEN if hidden and value is not None else value

    def error(self, text: str, limit: int = _ERROR_CHARACTERS) -> str:
        """Return an error text as it may be stored, logged and shown.

        Args:
            limit: rules see twice as many characters of a longer text, since a pattern may take quadratic time. As
                many are then dropped from the end, where half a secret matches no rule.
        """
        if not self.errors:
            return text
        whole, text = len(text) <= 2 * limit, text[: 2 * limit]
        shown = self._error(text)
        return shown if whole or shown == _WITHHELD_ERROR else f"{shown[:-limit]} …"

    def _error(self, text: str) -> str:
        try:
            if callable(self.errors):
                shown = self.errors(text)
                return shown if isinstance(cast("object", shown), str) else _WITHHELD_ERROR
            for pattern in self.errors:
                text = cast("re.Pattern[str]", pattern).sub(HIDDEN, text)
        except BaseException as error:  # noqa: BLE001
            # a rule is user code: withhold the text, and still record the failure
            blamed(error)
            return _WITHHELD_ERROR
        return text

    def json(self, what: Literal["body", "result"], data: bytes) -> tuple[bytes, bool]:
        """Return a payload or result as it may be shown, and whether anything in it is hidden."""
        paths = self._paths(what)
        if not paths:
            return data, False
        if [] in paths:
            return json.dumps(HIDDEN).encode(), True
        try:
            value, hidden = parsed(data), False
            for path in paths:
                for inside, name in _at(value, path):
                    inside[name], hidden = HIDDEN, True
            # encoded again: of duplicate names only the checked value remains
            return json.dumps(value, ensure_ascii=False).encode(), hidden
        except (ValueError, RecursionError):
            return _WITHHELD_JSON, True

    def was_shown(self, payload: bytes) -> bool:
        """Whether a payload was copied from a redacted view: something that a rule hides is hidden in it."""
        paths = self._paths("body")
        if not paths:
            return False
        try:
            value = parsed(payload)
            return value in (HIDDEN, json.loads(_WITHHELD_JSON)) or any(
                inside[name] == HIDDEN for path in paths for inside, name in _at(value, path)
            )
        except (ValueError, RecursionError):
            return False

    def _paths(self, what: Literal["body", "result"]) -> list[list[str]]:
        return [path.split(".")[1:] for path in self.fields if path.partition(".")[0] == what]


def _at(value: object, path: Sequence[str]) -> Iterator[tuple[dict[str, object], str]]:
    """Yield what a path leads to: the objects, and the names in them."""
    if isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _at(item, path)
    elif isinstance(value, dict) and path:
        mapping = cast("dict[str, object]", value)
        wanted, *rest = path
        for name in mapping if wanted == "*" else mapping.keys() & {wanted}:
            if rest:
                yield from _at(mapping[name], rest)
            else:
                yield mapping, name


def _are_texts(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(item, str) and item for item in cast("Sequence[object]", value))
    )


def check_policies(**policies: tuple[object, type]) -> None:
    """Check that each argument is None or an instance of the policy beside it.

    Raises:
        ConfigurationError: an argument is something else.
    """
    for name, (value, policy) in policies.items():
        if value is not None and not isinstance(value, policy):
            raise ConfigurationError(f"{name} is {value!r}: give a {policy.__name__}.")
