"""Named queries of one database, and what that database can do.

Source: docs/decisions/0003-sql-as-text.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal

from txbox.errors import ConfigurationError, Fault
from txbox.steps import Statement

Style = Literal["numeric", "format", "qmark", "named"]

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
# a comment, a string, a cast, or a parameter: only the last is rewritten
_TOKEN = re.compile(r"--[^\n]*|'(?:[^']|'')*'|::|:([a-z_][a-z0-9_.]*)")
_REGION = re.compile(r"\{([^{}]*)\}")
_OBJECT = re.compile(
    r"(?<![.])\btxbox_(?:inbox|attempt|quarantine|outbox|sequence|job|audit|schema|dead_letters|status|refuse|guard"
    r"|partition_bound|partition_make|partition_drop)\b(?!\s*\.)"
)
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")


@dataclass(frozen=True)
class Dialect:
    """The statements of one database.

    Args:
        name: `postgresql`, `mysql` or `sqlite`; for messages and file names, never to branch on.
        queries: name → SQL text; an empty text means that this database has nothing to do there.
        arrays: many rows travel as one array a column; otherwise a `{…}` region repeats per row.
        returning: INSERT and UPDATE name the rows they touched.
        refuses_commit: the database itself refuses a commit before close (SEMANTICS 2.1); where it
            cannot, the claim writes `processing` and `complete` makes it `processed`.
        claim_bounds_wait: the claim's own statement bounds how long it waits for a rival.
        transactional_ddl: DDL does not end a transaction.
        cheap_savepoints: a savepoint takes no round trip: each message of a batch gets its own.
        faults: SQLSTATE, its first two characters, or the error number → what it means.
    """

    name: str
    queries: Mapping[str, str]
    arrays: bool
    returning: bool
    refuses_commit: bool
    claim_bounds_wait: bool
    transactional_ddl: bool
    cheap_savepoints: bool
    faults: Mapping[str, Fault] = field(repr=False)

    def statement(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        rows: Mapping[str, Sequence[Any]] | None = None,
        canary: str | None = None,
    ) -> Statement:
        """Build a statement.

        Args:
            name: of the query; also the statement's crash point.
            params: may hold more than the query asks for.
            rows: columns of equal length, one element a row.
            canary: a random identifier for the databases that guard by savepoint.
        """
        sql = self.queries[name]
        bound: dict[str, Any] = dict(params or ())
        if canary is not None:
            sql = sql.replace("[canary]", f"txbox_{canary}")
        if rows is not None:
            if self.arrays:
                for column, values in rows.items():
                    bound[f"rows.{column}"] = list(values)
            else:
                count = len(next(iter(rows.values())))
                sql = _expanded(sql, count)
                for column, values in rows.items():
                    for index, value in enumerate(values):
                        bound[f"rows.{column}.{index}"] = value
        return Statement(name, sql, bound)

    def has(self, name: str) -> bool:
        """Say whether this database has anything to do at this point."""
        return bool(self.queries[name])

    def fault(self, code: str | None) -> Fault:
        """Return what a SQLSTATE or error number means; unknown codes are OTHER."""
        if not code:
            return Fault.OTHER
        return self.faults.get(code) or self.faults.get(code[:2] + "___") or Fault.OTHER


@lru_cache(maxsize=512)
def _expanded(sql: str, count: int) -> str:
    return _REGION.sub(
        lambda region: ", ".join(_numbered(region[1], index) for index in range(count)), sql
    )


def _numbered(text: str, index: int) -> str:
    """Give the row parameters of one repetition their row's number."""
    return _TOKEN.sub(
        lambda found: (
            f":{found[1]}.{index}" if found[1] and found[1].startswith("rows.") else found[0]
        ),
        text,
    )


@lru_cache(maxsize=2048)
def native(sql: str, style: Style) -> tuple[str, tuple[str, ...]]:
    """Rewrite `:name` parameters for a driver; returns the SQL and the parameter names in order.

    "numeric" gives $1 and names each once; "format" (%s), "qmark" (?) name repeats again;
    "named" (:n) is for drivers that take a mapping.
    """
    names: list[str] = []

    def rewrite(token: re.Match[str]) -> str:
        name = token[1]
        if name is None:
            if token[0].startswith("--"):
                return ""
            return token[0].replace("%", "%%") if style == "format" else token[0]
        if style == "numeric":
            if name not in names:
                names.append(name)
            return f"${names.index(name) + 1}"
        names.append(name)
        return "%s" if style == "format" else "?"

    text = _TOKEN.sub(rewrite, sql)
    if style == "format":
        # a lone % outside of strings (the modulo operator) would be read as a placeholder
        text = re.sub(r"%%|%(?!s)", "%%", text)
    return re.sub(r"\n\s*\n", "\n", text).strip(), tuple(names)


def parse_queries(text: str) -> dict[str, str]:
    """Split a file of named queries; comments stay above their query and out of its text."""
    parts = _NAME.split(text)
    queries: dict[str, str] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
        if name in queries:
            raise ConfigurationError(f"The query {name} is defined twice.")
        queries[name] = "\n".join(lines).strip()
    return queries


def qualified(sql: str, schema: str) -> str:
    """Put a PostgreSQL schema, a plain identifier, before every table, view and function of txbox."""
    return _OBJECT.sub(lambda found: f'"{schema}".{found[0]}', sql)


@cache
def dialect(name: str, schema: str | None = None) -> Dialect:
    """Load a dialect, once.

    Raises:
        ConfigurationError: an unknown name, or a schema name that is no plain identifier.
    """
    if name not in _CAPABILITIES:
        raise ConfigurationError(
            f"There is no dialect {name!r}: use postgresql, mysql (also for MariaDB) or sqlite."
        )
    queries = parse_queries(files("txbox.store").joinpath(f"{name}.sql").read_text())
    if schema is not None:
        if name != "postgresql":
            raise ConfigurationError(
                "schema= is for PostgreSQL only: leave it out for this database."
            )
        if not _SCHEMA.fullmatch(schema):
            raise ConfigurationError(
                f"The schema {schema!r} is no plain lower-case identifier: use letters, digits and underscores."
            )
        queries = {query: qualified(sql, schema) for query, sql in queries.items()}
    return Dialect(name=name, queries=queries, faults=_FAULTS[name], **_CAPABILITIES[name])


def as_time(value: Any) -> datetime | None:
    """Read a point in time as any driver returns it, as aware UTC."""
    if value is None:
        return None
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


_CAPABILITIES: dict[str, dict[str, bool]] = {
    "postgresql": {
        "arrays": True,
        "returning": True,
        "refuses_commit": True,
        "claim_bounds_wait": True,
        "transactional_ddl": True,
        "cheap_savepoints": False,
    },
    "mysql": {
        "arrays": False,
        "returning": False,
        "refuses_commit": False,
        "claim_bounds_wait": False,
        "transactional_ddl": False,
        "cheap_savepoints": False,
    },
    "sqlite": {
        "arrays": False,
        "returning": True,
        "refuses_commit": True,
        "claim_bounds_wait": True,
        "transactional_ddl": True,
        "cheap_savepoints": True,
    },
}

_FAULTS: dict[str, dict[str, Fault]] = {
    "postgresql": {
        "40001": Fault.CONFLICT,
        "40P01": Fault.CONFLICT,
        "55P03": Fault.LOCK_TIMEOUT,
        "23505": Fault.DUPLICATE,
        "TXB01": Fault.GUARD,
        "TXB02": Fault.GUARD,
        "25P02": Fault.ABORTED,
        "42P01": Fault.SCHEMA,
        "42703": Fault.SCHEMA,
        "42883": Fault.SCHEMA,
        "3F000": Fault.SCHEMA,
        "26000": Fault.PREPARED,
        "42P05": Fault.PREPARED,
        "57014": Fault.TIMEOUT,
        "25P03": Fault.TIMEOUT,
        "25P04": Fault.TIMEOUT,
        "25006": Fault.UNAVAILABLE,
        "08___": Fault.UNAVAILABLE,
        "53___": Fault.UNAVAILABLE,
        "57P01": Fault.UNAVAILABLE,
        "57P02": Fault.UNAVAILABLE,
        "57P03": Fault.UNAVAILABLE,
        "57P05": Fault.UNAVAILABLE,
        "58___": Fault.UNAVAILABLE,
    },
    # 1020 and 1213 roll the whole transaction back, 1205 only its statement: all three end it here
    "mysql": {
        "1213": Fault.CONFLICT,
        "1020": Fault.CONFLICT,
        "1205": Fault.LOCK_TIMEOUT,
        "3572": Fault.LOCK_TIMEOUT,
        "1062": Fault.DUPLICATE,
        "1305": Fault.GUARD,
        "1146": Fault.SCHEMA,
        "1054": Fault.SCHEMA,
        "1176": Fault.SCHEMA,
        "1969": Fault.TIMEOUT,
        "3024": Fault.TIMEOUT,
        "1317": Fault.TIMEOUT,
        "1290": Fault.UNAVAILABLE,
        "1792": Fault.UNAVAILABLE,
        "1836": Fault.UNAVAILABLE,
        "1040": Fault.UNAVAILABLE,
        "1053": Fault.UNAVAILABLE,
        "1077": Fault.UNAVAILABLE,
        "1152": Fault.UNAVAILABLE,
        "1158": Fault.UNAVAILABLE,
        "1159": Fault.UNAVAILABLE,
        "1160": Fault.UNAVAILABLE,
        "1161": Fault.UNAVAILABLE,
        "1184": Fault.UNAVAILABLE,
        "1203": Fault.UNAVAILABLE,
        "1226": Fault.UNAVAILABLE,
        "1927": Fault.UNAVAILABLE,
        "2002": Fault.UNAVAILABLE,
        "2003": Fault.UNAVAILABLE,
        "2006": Fault.UNAVAILABLE,
        "2013": Fault.UNAVAILABLE,
        "2014": Fault.UNAVAILABLE,
        "2055": Fault.UNAVAILABLE,
        "4031": Fault.UNAVAILABLE,
        "1021": Fault.UNAVAILABLE,
        "1114": Fault.UNAVAILABLE,
    },
    # extended result codes by name (sqlite_errorname)
    "sqlite": {
        "SQLITE_BUSY": Fault.CONFLICT,
        "SQLITE_BUSY_SNAPSHOT": Fault.CONFLICT,
        "SQLITE_BUSY_RECOVERY": Fault.CONFLICT,
        "SQLITE_BUSY_TIMEOUT": Fault.CONFLICT,
        "SQLITE_LOCKED": Fault.CONFLICT,
        "SQLITE_LOCKED_SHAREDCACHE": Fault.CONFLICT,
        "SQLITE_CONSTRAINT_UNIQUE": Fault.DUPLICATE,
        "SQLITE_CONSTRAINT_PRIMARYKEY": Fault.DUPLICATE,
        "SQLITE_CONSTRAINT_ROWID": Fault.DUPLICATE,
        # what close fails with
        "SQLITE_MISMATCH": Fault.GUARD,
        "SQLITE_FULL": Fault.UNAVAILABLE,
        "SQLITE_CANTOPEN": Fault.UNAVAILABLE,
        "SQLITE_READONLY": Fault.UNAVAILABLE,
        "SQLITE_IOERR": Fault.UNAVAILABLE,
        "SQLITE_PROTOCOL": Fault.UNAVAILABLE,
    },
}
