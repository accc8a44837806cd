"""The driver under an SQLAlchemy engine: what database it speaks to, whether it autocommits, what its errors mean."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from txbox.connections.base import dbapi_error
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.store.dialect import Dialect, Style, dialect

_DIALECTS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
_STYLES: dict[str, Style] = {
    "pyformat": "format",
    "format": "format",
    "qmark": "qmark",
    "numeric_dollar": "numeric",
}


def dialect_of(bind: sa.Engine | sa.Connection, schema: str | None) -> Dialect:
    name = bind.dialect.name
    if name not in _DIALECTS or bind.dialect.paramstyle not in _STYLES:
        raise ConfigurationError(
            f"txbox does not know {name}+{bind.dialect.driver}: use PostgreSQL, MySQL, MariaDB or SQLite."
        )
    return dialect(_DIALECTS[name], schema)


def style_of(driver: sa.Dialect) -> Style:
    return _STYLES[driver.paramstyle]


def autocommits(raw: sa.Connection) -> bool:
    """Say whether each statement would commit by itself; asks the driver's object, not the server."""
    if raw.closed or raw.invalidated:
        return False
    if raw.dialect.name == "sqlite":
        # engines that send BEGIN themselves run the driver in autocommit: what counts is the transaction
        driver: Any = raw.connection.driver_connection
        return driver.isolation_level is None and not driver.in_transaction
    connection = raw.connection.dbapi_connection
    assert connection is not None
    return bool(raw.dialect.detect_autocommit_setting(connection))


def driver_error(driver: sa.Dialect) -> type[Exception]:
    assert driver.dbapi is not None
    kind: type[Exception] = driver.dbapi.Error
    return kind


def translated(error: BaseException, sql_dialect: Dialect, driver: sa.Dialect) -> StoreError | None:
    """Put an error of SQLAlchemy's driver into txbox's words; None when it is none."""
    if isinstance(error, exc.DBAPIError):
        cause = error.orig
        if cause is None:
            return None
        found = dbapi_error(cause, sql_dialect)
        if error.connection_invalidated and found.fault is not Fault.UNAVAILABLE:
            return StoreUnavailable(str(found), fault=Fault.UNAVAILABLE, code=found.code)
        return found
    return dbapi_error(error, sql_dialect) if isinstance(error, driver_error(driver)) else None


def unusable(error: BaseException) -> StoreError:
    return StoreError(
        f"SQLAlchemy: {type(error).__name__}: the transaction cannot be used any more; roll it back.",
        fault=Fault.ABORTED,
    )
