"""What an examination works with: the database, the App if there is one, and the policies that hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from txbox.admin.doctor.finding import Diagnosis
from txbox.admin.views import age
from txbox.brokers.base import Source
from txbox.connections.base import Database
from txbox.handlers import Handlers
from txbox.outbox import Routes
from txbox.policy import Lease, Limits, RelayPolicy, Retention
from txbox.session import Session, Statement
from txbox.store.dialect import Dialect

Rows = Sequence[Sequence[Any]]


class Consumes(Protocol):
    """A source and the topics it is asked for; None for those of the handlers."""

    @property
    def source(self) -> Source: ...
    @property
    def topics(self) -> Sequence[str] | None: ...


@runtime_checkable
class ConfiguredApp(Protocol):
    """An App with all that it says of itself; a database alone says less."""

    database: Database
    handlers: Handlers
    limits: Limits
    lease: Lease
    retention: Retention
    relaying: RelayPolicy
    routes: Routes
    notify: bool

    @property
    def consumptions(self) -> Sequence[Consumes]: ...


@dataclass(slots=True)
class Case:
    """One database that is examined.

    Args:
        app: None when only the database is known; then the defaults of the policies hold.
        dialect: with the schema of the tables, once that is known.
        usable: the tables are there, and of a version that this release works with.
        settings: those of the server that matter, by their names.
    """

    db: Session
    dialect: Dialect
    database: Database
    app: ConfiguredApp | None
    diagnosis: Diagnosis
    usable: bool = False
    settings: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def lease(self) -> Lease:
        return Lease() if self.app is None else self.app.lease

    @property
    def limits(self) -> Limits:
        return Limits() if self.app is None else self.app.limits

    @property
    def retention(self) -> Retention:
        return Retention() if self.app is None else self.app.retention

    async def rows(self, query: str, **params: Any) -> Rows:
        """Read, in no transaction but the statement's."""
        return (await self.db.read(self.statement(query, **params))).rows

    def statement(self, query: str, **params: Any) -> Statement:
        return self.dialect.statement(query, params)


def lasting(seconds: float) -> str:
    """A length of time for people; short ones with their fractions, which count between machines."""
    return age(round(seconds)) if seconds >= 60 else f"{seconds:.3g} s"
