"""Which adapter speaks to which driver's objects; adapters are imported when first needed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from txbox.connections.base import CallersAsyncConnection, CallersConnection, Database
from txbox.errors import ConfigurationError

# one line a driver: the package that its classes live in → module, extra
_ADAPTERS = {
    "sqlite3": ("sqlite", "sqlite"),
    "aiosqlite": ("sqlite", "sqlite"),
    "psycopg": ("psycopg", "postgresql"),
    "psycopg_pool": ("psycopg", "postgresql"),
    "asyncpg": ("asyncpg", "asyncpg"),
    "pymysql": ("pymysql", "mysql"),
    "asyncmy": ("pymysql", "mysql"),
    "sqlalchemy": ("sqlalchemy", "sqlalchemy"),
    "django": ("django", "django"),
}
_SCHEMES = {
    "postgresql": "psycopg",
    "postgres": "psycopg",
    "postgresql+psycopg": "psycopg",
    "postgresql+asyncpg": "asyncpg",
    "mysql": "pymysql",
    "mysql+pymysql": "pymysql",
    "mariadb": "pymysql",
    "mariadb+pymysql": "pymysql",
    "sqlite": "sqlite",
}

_known: dict[type[Any], ModuleType] = {}


def open_database(target: Any, *, schema: str | None = None) -> Database:
    """Return where connections come from, without connecting.

    Args:
        target: a URL, or a pool, engine or sessionmaker of the user's own.

    Raises:
        ConfigurationError: an unknown scheme or object, or a driver that is not installed.
    """
    if isinstance(target, str):
        scheme, separator, _ = target.partition("://")
        if not separator or scheme.lower() not in _SCHEMES:
            raise ConfigurationError(
                f"{scheme if separator else 'This'!r} is no database URL scheme that txbox knows: "
                "use postgresql://user@host/name, mysql://user@host/name or sqlite:///file.db."
            )
        by_url: Database = _load(_SCHEMES[scheme.lower()]).open_url(target, schema=schema)
        return by_url
    by_object: Database = _adapter(target).open_object(target, schema=schema)
    return by_object


def borrow(tx: Any, *, schema: str | None = None) -> CallersConnection:
    """Adapt the caller's connection or session, for statements in the transaction it is in.

    Raises:
        ConfigurationError: an unknown or async object, or one that is not in a transaction.
    """
    executor: CallersConnection = _adapter(tx).borrow(tx, schema=schema)
    return executor


def borrow_async(tx: Any, *, schema: str | None = None) -> CallersAsyncConnection:
    """The async twin of `borrow`; it takes async connections and sessions only."""
    executor: CallersAsyncConnection = _adapter(tx).borrow_async(tx, schema=schema)
    return executor


def _adapter(target: Any) -> ModuleType:
    kind: type[Any] = target.__class__
    known = _known.get(kind)
    if known is not None:
        return known
    for ancestor in kind.__mro__:
        package = ancestor.__module__.partition(".")[0]
        if package in _ADAPTERS:
            return _known.setdefault(kind, _load(_ADAPTERS[package][0]))
    raise ConfigurationError(
        f"txbox cannot use a {kind.__module__}.{kind.__qualname__} as a database: pass a URL, a psycopg or asyncpg "
        "pool, an SQLAlchemy Engine or sessionmaker, or the connection or session of your transaction."
    )


def _load(module: str) -> ModuleType:
    try:
        return import_module(f"txbox.connections.{module}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("txbox"):
            raise
        extra = next(extra for own, extra in _ADAPTERS.values() if own == module)
        raise ConfigurationError(
            f"The driver {error.name} is not installed: run pip install 'txbox[{extra}]'."
        ) from error
