"""Every error that txbox raises, one root, four families, and what handlers may raise."""

from __future__ import annotations

import re
from datetime import timedelta
from enum import StrEnum

# user:password@ in a URL, up to the last @: a password may hold any other delimiter, unencoded;
# and the value of an option such as password=, sslpassword=, passwd= or SharedAccessToken=
_SECRET = re.compile(
    r"(://[^:\s]*:)\S*(?=@)|([\w-]*(?:pass|pwd|secret|token)[\w-]*\s*=\s*)('[^']*'|[^\s&]+)",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """The text without any password that stands in it as in a URL or a connection string."""
    return _SECRET.sub(lambda found: f"{found[1] or found[2]}***", text)


class TxboxError(Exception):
    """The root of all errors raised by txbox."""


class ConfigurationError(TxboxError):
    """The program is wrong: raised at registration, at start or at the call, before anything is consumed."""


class SchemaError(TxboxError):
    """The tables do not fit this version; the message contains the command to run."""


class Fault(StrEnum):
    """What a database error means to the protocol; decided by SQLSTATE or error number, never by text."""

    UNAVAILABLE = "unavailable"  # the connection or the server is gone or refuses: a retry may help
    CONFLICT = (
        "conflict"  # serialization failure or deadlock: this transaction may be tried again at once
    )
    LOCK_TIMEOUT = "lock timeout"  # somebody else holds the row
    DUPLICATE = "duplicate"  # a unique constraint
    GUARD = "guard"  # the transaction guard refused (SEMANTICS 2.1)
    ABORTED = "aborted"  # the transaction had failed before
    SCHEMA = "schema"  # undefined table, column or function
    PREPARED = "prepared"  # a pooler mixed up prepared statements
    TIMEOUT = "timeout"  # a statement or transaction time limit of the server
    OTHER = "other"


class StoreError(TxboxError):
    """The database refused a statement of txbox or of the handler's transaction."""

    def __init__(
        self,
        message: str,
        *,
        fault: Fault = Fault.OTHER,
        code: str | None = None,
        constraint: str | None = None,
        definite: bool = True,
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.code = code
        self.constraint = constraint
        #: False when the error leaves open whether a COMMIT took effect (SEMANTICS 2.6).
        self.definite = definite


class StoreUnavailable(StoreError):
    """The database cannot be reached or does not accept work now; a retry may help."""

    def __init__(
        self,
        message: str,
        *,
        fault: Fault = Fault.UNAVAILABLE,
        code: str | None = None,
        constraint: str | None = None,
        definite: bool = True,
        misconfigured: bool = False,
    ) -> None:
        super().__init__(message, fault=fault, code=code, constraint=constraint, definite=definite)
        #: True when a wrong host, user, password or database name is the likely cause: waiting seldom helps.
        self.misconfigured = misconfigured


class BrokerError(TxboxError):
    """A broker refused an operation."""

    def __init__(self, message: str, *, failed: int | None = None) -> None:
        super().__init__(message)
        #: Of the deliveries that were to be settled, how many were not; None stands for all of them.
        self.failed = failed


class BrokerUnavailable(BrokerError):
    """A broker cannot be reached; a retry may help."""


class MessageRefused(BrokerError):
    """A broker will never take this message as it is (too large, a name it does not allow)."""


class UnusableMessage(TxboxError):
    """A message has no usable id, or bytes that no database can keep (NUL, lone surrogates)."""

    #: Its id, where that is not what makes it unusable.
    message_id: str = ""


class PayloadMismatch(TxboxError):
    """A known message id came with a different payload: roll back, `quarantine` it, then acknowledge."""


class MessageInProgress(TxboxError):
    """Another transaction holds this message id: roll back, do not acknowledge, try again later."""


class HandlerTimeout(TxboxError):
    """A handler ran longer than its `timeout=`."""


class Retry(TxboxError):
    """Raised by a handler to be tried again.

    Args:
        after: the wait before the next attempt; None leaves it to the retry policy.
    """

    def __init__(
        self, reason: str = "the handler asked for a retry", *, after: timedelta | None = None
    ) -> None:
        if not _is_wait(after):
            raise ConfigurationError(
                f"Retry: after is {after!r}: give a timedelta, such as timedelta(seconds=5)."
            )
        super().__init__(reason)
        self.after = after


def _is_wait(given: object) -> bool:
    return given is None or isinstance(given, timedelta)


class Reject(TxboxError):
    """Raised by a handler to send its message to the dead letters at once."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)


class VersionConflict(TxboxError):
    """Raised by a handler that met a later version than its message carries; retried by policy."""
