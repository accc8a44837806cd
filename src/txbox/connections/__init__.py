"""Which adapter handles which driver's objects. Adapters are imported on first use."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from txbox.connections.base import Database, Executor, dbapi_error
from txbox.errors import ConfigurationError, StoreError, TxboxError
from txbox.store.dialect import dialect

# one line per driver: the top-level package of its classes → module, extra
_ADAPTERS = {
    "sqlite3": ("sqlite", "sqlite"),
    "aiosqlite": ("sqlite", "sqlite"),
    "psycopg": ("psycopg", "postgresql"),
    "psycopg_pool": ("psycopg", "postgresql"),
    "asyncpg": ("asyncpg", "asyncpg"),
    "pymysql": ("mysql", "mysql"),
    "asyncmy": ("mysql", "mysql"),
    "sqlalchemy": ("sqlalchemy", "sqlalchemy"),
    "django": ("django", "django"),
}
# of errors: the package of the driver, and what it talks to
_PRODUCTS = {
    "psycopg": "postgresql", "psycopg2": "postgresql", "asyncpg": "postgresql", "pymysql": "mysql", "asyncmy": "mysql",
    "MySQLdb": "mysql", "sqlite3": "sqlite",
}  # fmt: skip
# that no connection could be had: as PEP 249, and the pool of SQLAlchemy, call it
_UNCONNECTED = frozenset({"OperationalError", "InterfaceError", "TimeoutError"})
_SCHEMES = {
    "postgresql": "psycopg",
    "postgres": "psycopg",
    "postgresql+psycopg": "psycopg",
    "postgresql+asyncpg": "asyncpg",
    "mysql": "mysql",
    "mysql+pymysql": "mysql",
    "mariadb": "mysql",
    "mariadb+pymysql": "mysql",
    "sqlite": "sqlite",
}

# a name or address, or a bracketed IPv6 address; optionally a port
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]*)(:\d{0,5})?")

# something meant as a file: it has no user, option or space
_PATH = re.compile(r"(?=[^/]*/|.*\.(?:db|db3|sqlite|sqlite3)\Z)[^@:?=\s]*", re.IGNORECASE)

_known: dict[type[Any], ModuleType] = {}


def open_database(target: Any, *, schema: str | None = None) -> Database:
    """Return the source of connections for a target, without connecting.

    Args:
        target: a URL, or the user's own pool, engine or sessionmaker.

    Raises:
        ConfigurationError: unknown scheme or object, or the driver is not installed.
    """
    if isinstance(target, str):
        scheme, separator, _ = target.partition("://")
        if not separator and _PATH.fullmatch(target):
            raise ConfigurationError(
                f"{target!r} looks like a path, but App takes a URL: for this SQLite file use sqlite:///{target}."
            )
        if not separator or scheme.lower() not in _SCHEMES:
            # without a scheme it may be a password
            wrong = (
                f"unsupported database URL scheme {scheme!r}"
                if separator
                else "This is not a database URL"
            )
            raise ConfigurationError(
                f"{wrong}: use postgresql://user@host/name, mysql://user@host/name or sqlite:///file.db."
            )
        _check_readable(target)
        by_url: Database = _load(_SCHEMES[scheme.lower()]).open_url(target, schema=schema)
        return by_url
    by_object: Database = _adapter(target).open_object(target, schema=schema)
    return by_object


def _check_readable(url: str) -> None:
    """Refuse a URL whose password would be parsed as a host, port, path or fragment."""
    if url.lower().startswith("sqlite:"):
        return
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2].split(",")  # libpq takes several
        readable = all(map(_HOST.fullmatch, hosts)) and " " not in parts.netloc
        readable = readable and not parts.fragment and "@" not in parts.path
        # what begins with two slashes becomes a host when the URL is put together again
        readable = readable and not parts.path.startswith("//")
    except ValueError:
        # the standard library's error quotes the part that may be a password
        readable = False
    if not readable:
        raise ConfigurationError(
            "The database URL cannot be parsed: percent-encode special characters in the user, password and "
            "database name (/ is %2F, @ is %40, # is %23, ? is %3F, [ is %5B, a space is %20)."
        )


def borrow(tx: Any, *, is_async: bool = False, schema: str | None = None) -> Executor:
    """Adapt the caller's connection or session, for statements in its current transaction.

    Args:
        is_async: accept only async connections and sessions; otherwise only sync ones.

    Raises:
        ConfigurationError: unknown object, of the other kind, or not in a transaction.
    """
    executor: Executor = _adapter(tx).borrow(tx, is_async=is_async, schema=schema)
    return executor


def is_transient(error: BaseException) -> bool:
    """Whether beginning or committing a transaction by means of the user's own may succeed later.

    There, errors are those of drivers, SQLAlchemy and Django, and there may be no connection to ask about them.
    """
    if isinstance(error, TxboxError):
        return isinstance(error, StoreError) and error.transient
    reasons: tuple[Any, ...] = (getattr(error, "orig", None), error.__cause__, error)
    for reason in reasons:
        packages = {kind.__module__.partition(".")[0] for kind in type(reason).__mro__}
        if product := next(filter(None, map(_PRODUCTS.get, packages)), None):
            failure = dbapi_error(reason, dialect(product))
            if failure.code is not None:
                return failure.transient
            break
    # no server has said why
    named = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OSError) or not _UNCONNECTED.isdisjoint(named)


def _adapter(target: Any) -> ModuleType:
    kind: type[Any] = target.__class__
    known = _known.get(kind)
    if known is not None:
        return known
    if any("Cursor" in ancestor.__name__ for ancestor in kind.__mro__):
        raise ConfigurationError(
            f"This {kind.__module__}.{kind.__qualname__} is a cursor: pass the connection it belongs to."
        )
    for ancestor in kind.__mro__:
        package = ancestor.__module__.partition(".")[0]
        if package in _ADAPTERS:
            return _known.setdefault(kind, _load(_ADAPTERS[package][0]))
    raise ConfigurationError(
        f"txbox cannot use this {kind.__module__}.{kind.__qualname__} as a database: pass a URL, a psycopg or asyncpg "
        "pool, an SQLAlchemy Engine or sessionmaker, or the connection or session of your transaction."
    )


def _load(module: str) -> ModuleType:
    try:
        return import_module(f"txbox.connections.{module}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("txbox"):
            raise
        extra = next(extra for adapter, extra in _ADAPTERS.values() if adapter == module)
        raise ConfigurationError(
            f"The driver {error.name} is not installed: run pip install 'txbox[{extra}]'."
        ) from error
    except ImportError as error:
        # since 2.1 SQLAlchemy does not install greenlet, and cannot import its asyncio part without it
        if module != "sqlalchemy" or find_spec("greenlet") is not None:
            raise
        raise ConfigurationError(
            "txbox needs greenlet with SQLAlchemy, and it is not installed: run pip install 'txbox[sqlalchemy]'."
        ) from error
