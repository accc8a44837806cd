"""Filters: which rows an operator means, in the inbox or in the outbox."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filter:
    def criteria(self) -> dict[str, str]:
        """What is asked for, for people and for `txbox_audit`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter(_Filter):
    """Which rows an operator means; what is None (or no status) is not asked for."""

    consumer: str | None = None
    message_id: str | None = None
    status: str | None = None
    topic: str | None = None
    type: str | None = None
    key: str | None = None
    error_type: str | None = None
    fingerprint: str | None = None
    older_than: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineFilter(_Filter):
    """Which quarantined messages an operator means; what is None is not asked for.

    Args:
        hash: of the payload, in hexadecimal digits; the first ones are enough.
        status: "quarantined" until somebody decides, then "accepted" or "discarded".
    """

    consumer: str | None = None
    message_id: str | None = None
    hash: str | None = None
    status: str | None = None
    topic: str | None = None
    type: str | None = None
    older_than: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingFilter(_Filter):
    """Which outgoing messages an operator means; what is None (or no status) is not asked for."""

    message_id: str | None = None
    status: str | None = None
    topic: str | None = None
    route: str | None = None
    type: str | None = None
    key: str | None = None
    error_type: str | None = None
    older_than: timedelta | None = None
