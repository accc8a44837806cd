"""Every error txbox raises: one root, four families, and the exceptions handlers may raise."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import cast

# user:password@ in a URL, up to the last @ of the word, because an unencoded password may contain any other delimiter;
# and the value of options such as password=, sslpassword=, passwd=, SharedAccessToken=. A quote that is not closed
# hides the rest. Linear, whatever the text: it comes from a server, which may quote a customer.
_SECRET = re.compile(
    r"(://)(?=[^:\s]*:)"
    r"|((?<![\w-])(?=[\w-]*?(?:pass|pwd|secret|token))[\w-]++\s*+=\s*+)(?:'(?:[^'\\]|\\.?)*+(?:'|\Z)|[^\s&]++)",
    re.IGNORECASE,
)
_WORD = re.compile(r"\S*")


def redacted(text: str) -> str:
    """Return the text with passwords masked, as they appear in URLs and connection strings."""
    parts = list[str]()
    shown = at = word = host = 0
    while secret := _SECRET.search(text, at):
        at = secret.end()
        if secret[1] is None:
            begin, end = secret.end(2), at
        else:
            if at >= word:
                # once for each word, which may contain any number of ://
                word = cast("re.Match[str]", _WORD.match(text, at)).end()
                host = text.rfind("@", at, word)
            begin, end = text.index(":", at) + 1, host
            if host < begin:
                continue
        parts += text[shown:begin], "***"
        shown = at = end
    return "".join([*parts, text[shown:]])


class TxboxError(Exception):
    """The root of all errors raised by txbox: a `problem`, and its `remedy` after a colon, if separate."""

    def __init__(self, problem: object = "", remedy: str = "") -> None:
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem, self.remedy = str(problem), remedy


class ConfigurationError(TxboxError):
    """The program is wrong. Raised at registration, at start-up or by the call, before anything is consumed."""


@contextmanager
def installed(extra: str, what: str) -> Generator[None]:
    """Around imports: say what to install if a library is missing.

    Args:
        what: begins the sentence, with what needs the library.

    Raises:
        ConfigurationError: it is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{what} needs {error.name}: run pip install 'txbox[{extra}]'."
        ) from error


class SchemaError(TxboxError):
    """The tables do not fit this version; the message contains the command to run."""


class Fault(StrEnum):
    """What a database error means to txbox, decided by SQLSTATE or error number, never by text."""

    UNAVAILABLE = "unavailable"  # connection or server gone, or refusing work: a retry may help
    CONFLICT = "conflict"  # serialization failure or deadlock: retry this transaction at once
    LOCK_TIMEOUT = "lock timeout"  # another transaction holds the row
    DUPLICATE = "duplicate"  # a unique constraint
    GUARD = "guard"  # the transaction guard refused (promise 2.1)
    ABORTED = "aborted"  # the transaction had already failed
    SCHEMA = "schema"  # undefined table, column or function
    PREPARED = "prepared"  # a pooler mixed up prepared statements
    TIMEOUT = "timeout"  # a server-side time limit on a statement or transaction
    CONTENT = "content"  # a value that it cannot hold: too large, out of range, or not in its character set
    OTHER = "other"


# waiting may end these
_TRANSIENT = (Fault.UNAVAILABLE, Fault.CONFLICT, Fault.LOCK_TIMEOUT, Fault.PREPARED, Fault.TIMEOUT)

# SQLSTATE insufficient_privilege; MySQL's "access denied" to a database, a table, a column and a routine
_LACKS_RIGHT = frozenset({"42501", "1044", "1142", "1143", "1370"})
# no connection is free: of the server, or of this user
FULL = frozenset({"53300", "1040", "1203", "1226"})
#: A disk, or the file of a table, has no room: what one statement is told, another may not notice.
NO_ROOM = frozenset({"53100", "1021", "1114", "SQLITE_FULL"})
# no server answered, or libpq keeps to itself what it said: no code, or one of MySQL's client codes
UNANSWERED = frozenset({None, "2003", "2005"})


class StoreError(TxboxError):
    """The database refused a statement from txbox or from the handler's transaction."""

    fault = Fault.OTHER

    def __init__(
        self,
        message: str,
        *,
        fault: Fault | None = None,
        code: str | None = None,
        constraint: str | None = None,
        definite: bool = True,
        misconfigured: bool = False,
    ) -> None:
        super().__init__(message)
        if fault is not None:
            self.fault = fault
        self.code = code
        self.constraint = constraint
        #: False when the COMMIT may or may not have taken effect (promise 2.6).
        self.definite = definite
        #: True when a wrong host, user, password or database name is likely: waiting seldom helps.
        self.misconfigured = misconfigured

    @property
    def transient(self) -> bool:
        """Whether the same operation may succeed later."""
        return self.fault in _TRANSIENT

    @property
    def lacks_right(self) -> bool:
        """Whether the role may not do this: `txbox schema print --grants` prints what it needs."""
        return self.code in _LACKS_RIGHT

    @property
    def full(self) -> bool:
        """Whether no connection to the server is free."""
        return self.code in FULL


class StoreUnavailable(StoreError):
    """The database cannot be reached or does not accept work now; a retry may help."""

    fault = Fault.UNAVAILABLE


class BrokerError(TxboxError):
    """A broker refused an operation."""

    def __init__(
        self, message: str, *, failed: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        #: How many of the deliveries could not be settled; None means all of them.
        self.failed = failed
        #: How long the broker asks to wait before the message is sent again.
        self.retry_after_s = retry_after_s


class BrokerUnavailable(BrokerError):
    """A broker cannot be reached; a retry may help."""


class MessageRefused(BrokerError):
    """The broker will never accept this message as it is (too large, or an illegal name)."""


class NotTried(BrokerError):
    """A message was not sent this time; this does not count as an attempt."""


class DestinationRefused(NotTried):
    """The topic's destination takes no message now: it is full, missing, or this user may not write to it."""


class UnusableMessage(TxboxError):
    """The message has no usable id, or contains what no database can store: `quarantine` it, then acknowledge."""

    #: The message's id, when the id is not the problem.
    message_id: str = ""


class UnreadableMessage(TxboxError):
    """A stored message cannot be read: its codec fails on it or lacks its key, or somebody has altered the row.

    It costs the message an attempt; when the attempts are used up it is dead, with its content as it was stored.
    """

    #: The columns of its content, as they are stored.
    stored: Mapping[str, object] = MappingProxyType({})


class PayloadMismatch(TxboxError):
    """A known message id arrived with a different payload: roll back, `quarantine` it, then acknowledge."""


class MessageInProgress(TxboxError):
    """Another transaction holds this message id: roll back, do not acknowledge, try again later."""


class HandlerTimeout(TxboxError):
    """A handler ran longer than its `timeout=`."""


class Retry(TxboxError):
    """Raised by a handler that wants to be retried.

    Args:
        after: wait before the next attempt, at most ten years; None leaves it to the retry policy.
    """

    def __init__(
        self, reason: str = "the handler asked for a retry", *, after: timedelta | None = None
    ) -> None:
        check_duration("Retry: after", after)
        super().__init__(reason)
        self.after = after


#: Ten years. Beyond it, sums of times soon leave what databases and Python can express.
LONGEST = timedelta(days=3653)


def check_duration(name: str, value: object) -> None:
    """Check that an argument is a timedelta of at most ten years, or None.

    Raises:
        ConfigurationError: it is something else.
    """
    if value is None:
        return
    if not isinstance(value, timedelta):
        raise ConfigurationError(
            f"{name} is {value!r}: give a timedelta, such as timedelta(seconds=5)."
        )
    if abs(value) > LONGEST:
        raise ConfigurationError(f"{name} is {value!r}: it must be at most ten years.")


class Reject(TxboxError):
    """Raised by a handler to send its message to the dead letters at once."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)


class VersionConflict(TxboxError):
    """Raised by a handler that finds a newer version than the message's; retried by policy."""
