"""What an examination works with: the database, the App or its defaults, and what was found so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from txbox.admin.doctor.finding import Diagnosis
from txbox.admin.reader import Application, Rows
from txbox.admin.views import age
from txbox.session import Session, Statement
from txbox.store.dialect import Dialect


@dataclass(slots=True)
class Case:
    """One database that is examined.

    Args:
        app: its policies, or the defaults of a database alone.
        known: handlers, sources and routes are those of a real App.
        dialect: with the schema of the tables, once that is known.
        usable: the tables are there, and of a version that this release works with.
        settings: those of the server that matter, by their names.
    """

    db: Session
    app: Application
    known: bool
    dialect: Dialect
    diagnosis: Diagnosis
    usable: bool = False
    settings: dict[str, str] = field(default_factory=dict[str, str])

    async def rows(self, query: str, **params: Any) -> Rows:
        """Read in a transaction of its own."""
        return (await self.db.read(self.statement(query, **params))).rows

    def statement(self, query: str, **params: Any) -> Statement:
        return self.dialect.statement(query, params)


def lasting(seconds: float) -> str:
    """Format a length of time; short ones with fractions, which matter between machines."""
    return age(round(seconds)) if seconds >= 60 else f"{seconds:.3g} s"
