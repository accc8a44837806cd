"""`txbox doctor`: what is wrong, the evidence and the remedy; and what could not be examined.

Nothing here writes, and nothing scans a table.

Source: docs/decisions/0035-doctor.md
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from itertools import starmap

from txbox import settings
from txbox.admin.doctor import app as of_app
from txbox.admin.doctor import database
from txbox.admin.doctor.finding import (
    CODES,
    SEVERITIES,
    Case,
    Diagnosis,
    Finding,
    Severity,
    Unchecked,
)
from txbox.admin.reader import Application, says_anything
from txbox.errors import StoreError, StoreUnavailable
from txbox.session import Session

__all__ = [
    "CODES",
    "SEVERITIES",
    "Diagnosis",
    "Finding",
    "Severity",
    "Unchecked",
    "examine",
    "examine_app",
]

Check = Callable[[Case], AsyncIterator[Finding]]

# what is examined, a query that not every database has, and the check
_OF_SERVER: tuple[tuple[str, str | None, Check], ...] = (
    ("the pooler", "doctor_backend", database.pooler),
    ("the server's settings", None, database.settings),
    ("the clock", "doctor_clock", database.clock),
    ("standbys", "doctor_standbys", database.standbys),
    ("old transactions", "doctor_transactions", database.transactions),
)
_OF_TABLES: tuple[tuple[str, str | None, Check], ...] = (
    ("who may create in the schema", "schema_creators", database.creators),
    ("dead rows and autovacuum", "doctor_storage", database.storage),
    ("partitions", "partitions", database.partitioned),
    ("messages that wait", None, database.inbox),
    ("outgoing messages that wait", None, database.outbox),
    ("the quarantine", None, database.quarantine),
    ("pruning", None, database.pruning),
)


async def examine(db: Session, app: Application, diagnosis: Diagnosis) -> None:
    """Examine the database, in small transactions that only read.

    Raises:
        StoreUnavailable: it does not answer.
    """
    case = Case(db, app, says_anything(app), app.database.dialect, diagnosis)
    try:
        await db.begin()
    except StoreError:
        db.discard()
        if finding := await database.transactions_refused(case):
            diagnosis.found([finding])
            return
        raise
    await db.commit()
    await _check(case, "the tables", database.tables)
    for what, query, check in (*_OF_SERVER, *(_OF_TABLES if case.usable else ())):
        if query is None or case.dialect.has(query):
            await _check(case, what, check)
    if not case.usable:
        diagnosis.not_checked("rows, pruning and partitions", "the tables are not whole")
    elif not case.known:
        diagnosis.not_checked(
            "rows that no handler or relay takes",
            "no App was given (--app): handlers and routes are not known",
        )


async def _check(case: Case, what: str, check: Check) -> None:
    try:
        async for finding in check(case):
            case.diagnosis.found([finding])
    except StoreUnavailable:
        raise
    except StoreError as error:
        # above all a missing right
        await case.db.rollback()
        case.diagnosis.not_checked(what, str(error))


def examine_app(app: Application, diagnosis: Diagnosis, grace: timedelta | None) -> None:
    """Examine the settings of an App and of its brokers.

    Args:
        grace: how long a drain may take, if that is known.
    """
    diagnosis.found(starmap(Finding, settings.time_outs(app)))
    diagnosis.found(of_app.weak_ids(app.handlers))
    if grace is not None:
        diagnosis.found(of_app.grace(app, grace))
    of_app.sources(app, diagnosis)
    of_app.destinations(app, diagnosis)
