"""The named queries of one database, and what that database can do.

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
from txbox.session import Result, Session, Statement, Statements, Transaction

Style = Literal["numeric", "format", "qmark", "named"]

_PART = re.compile(r"^-- (name|fragment|nothing): (\w+)(.*)$", re.MULTILINE)
# the use of a fragment, with the texts for its parameters; the innermost one first
_USE = re.compile(r"\[(?!canary\])(\w+)(?: ((?:[^\[\]]|\[\])+))?\]")
# what tells PostgreSQL the type of a parameter or result
_CAST = re.compile(r"::[a-z]+(?: precision)?")
# a comment, a string, a cast or a parameter; only parameters are rewritten
_TOKEN = re.compile(r"--[^\n]*|'(?:[^']|'')*'|::|:([a-z_][a-z0-9_.]*)")
_ROWS = re.compile(r":rows\.(\w+)")
_REGION = re.compile(r"\{([^{}]*)\}")
_OBJECT = re.compile(
    r"(?<![.])\btxbox_(?:inbox|attempt|quarantine|outbox|sequence|job|audit|schema|activity|worker|pause|dead_letters|status|refuse|guard"
    r"|partition_bound|partition_make|partition_detach|partition_drop)\b(?!\s*\.)"
)
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")


@dataclass(frozen=True)
class Dialect:
    """The statements of one database.

    Args:
        name: `postgresql`, `mysql` or `sqlite`; for messages and file names, never to branch on.
        queries: name → SQL text; an empty text means that there is nothing to do on this database.
        seconds: query that only locks and reads rows → query that then writes them; for `take`.
        arrays: many rows travel as one array per column; otherwise a `{…}` region is repeated per row.
        returning: INSERT and UPDATE name the rows they touched.
        refuses_commit: the database itself refuses a commit before close (promise 2.1). If it cannot,
            the claim writes `processing` and `complete` makes that `processed`.
        claim_bounds_wait: the claim's own statement limits how long it waits for a rival.
        cheap_savepoints: a savepoint needs no round trip, so each message of a batch gets its own.
        faults: SQLSTATE, its first two characters, or the error number → what it means.
    """

    name: str
    queries: Mapping[str, str]
    seconds: Mapping[str, str]
    arrays: bool
    returning: bool
    refuses_commit: bool
    claim_bounds_wait: bool
    cheap_savepoints: bool
    faults: Mapping[str, Fault] = field(repr=False)

    def statement(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        rows: Mapping[str, Sequence[Any]] | None = None,
    ) -> Statement:
        """Build a statement.

        Args:
            name: of the query; also the statement's crash point, whichever form it takes.
            params: may contain more than the query uses.
            rows: columns of equal length, one element per row. A single row takes the query's `_single` form, if
                there is one: values cost client and server less than arrays of one.
        """
        sql = self.queries[name]
        bound: dict[str, Any] = dict(params or ())
        if rows is not None:
            if self.arrays:
                single = self.queries.get(f"{name}_single")
                if single and len(next(iter(rows.values()))) == 1:
                    bound |= {column: values[0] for column, values in rows.items()}
                    return Statement(name, single, bound)
                for column, values in rows.items():
                    bound[f"rows.{column}"] = list(values)
            else:
                count = len(next(iter(rows.values())))
                sql = _expanded(sql, count)
                for column, values in rows.items():
                    for index, value in enumerate(values):
                        bound[f"rows.{column}.{index}"] = value
        return Statement(name, sql, bound)

    async def run(
        self,
        db: Session,
        name: str,
        params: Mapping[str, Any] | None = None,
        rows: Mapping[str, Sequence[Any]] | None = None,
        *,
        begin: Statements = (),
    ) -> Result:
        """Execute one query in a transaction of its own, behind the statements that it begins with."""
        return (await db.together((*begin, self.statement(name, params, rows))))[-1]

    async def take(
        self,
        db: Transaction,
        name: str,
        params: Mapping[str, Any],
        rows: Mapping[str, Sequence[Any]] | None = None,
    ) -> Result:
        """Execute a query that selects and updates rows; returns the updated rows.

        If this database's statements cannot return the rows they write, the query only locks and reads
        them, and a second one updates them. Its row parameters are the first columns that were read.
        """
        picked = await db.execute(self.statement(name, params, rows))
        return await self._take_second(db, name, params, picked)

    async def take_alone(
        self,
        db: Session,
        name: str,
        params: Mapping[str, Any],
        rows: Mapping[str, Sequence[Any]] | None = None,
    ) -> Result:
        """`take` in a transaction of its own. Nothing that the rows contain can stop the COMMIT."""
        statement = self.statement(name, params, rows)
        if name not in self.seconds:
            return (await db.together((statement,)))[0]
        (picked,) = await db.begin((statement,))
        result = await self._take_second(db, name, params, picked)
        await db.commit()
        return result

    async def _take_second(
        self, db: Transaction, name: str, params: Mapping[str, Any], selected: Result
    ) -> Result:
        if name not in self.seconds or not selected.rows:
            return selected
        second = self.seconds[name]
        columns = dict.fromkeys(_ROWS.findall(self.queries[second]))
        picked = {column: [row[n] for row in selected.rows] for n, column in enumerate(columns)}
        updated = await db.execute(self.statement(second, params, picked))
        return Result(selected.rows, updated.count)

    @property
    def idle_limit(self) -> tuple[Statement, ...]:
        """See `Connections.idle_limit`."""
        return (self.statement("limit_idle"),) if self.has("limit_idle") else ()

    def has(self, name: str) -> bool:
        """Whether there is anything to do at this point on this database."""
        return bool(self.queries[name])

    def fault(self, code: str | None) -> Fault:
        """Return the meaning of a SQLSTATE or error number; unknown codes are OTHER."""
        if not code:
            return Fault.OTHER
        return self.faults.get(code) or self.faults.get(code[:2] + "___") or Fault.OTHER


@lru_cache(maxsize=512)
def _expanded(sql: str, count: int) -> str:
    return _REGION.sub(
        lambda region: ", ".join(_numbered(region[1], index) for index in range(count)), sql
    )


def _numbered(text: str, index: int) -> str:
    """Add the row's number to the row parameters of one repetition."""
    return _TOKEN.sub(
        lambda match: (
            f":{match[1]}.{index}" if match[1] and match[1].startswith("rows.") else match[0]
        ),
        text,
    )


#: Texts of ours that set something, for their own transaction. A handler's are looked at for what they set.
OURS: set[str] = set()
_SETS = re.compile(r"\bset_config\b|^\s*(?:SET|CREATE TEMP)\b|:=")


@lru_cache(maxsize=2048)
def native(sql: str, style: Style) -> tuple[str, tuple[str, ...]]:
    """Rewrite `:name` parameters for a driver; returns the SQL and the parameter names in order.

    "numeric" gives $1 and lists each name once; "format" (%s) and "qmark" (?) repeat names;
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
        # a bare % outside strings (the modulo operator) would be read as a placeholder
        text = re.sub(r"%%|%(?!s)", "%%", text)
    text = re.sub(r"\n\s*\n", "\n", text).strip()
    if _SETS.search(text):
        OURS.add(text)
    return text, tuple(names)


def parse_queries(*texts: str) -> tuple[dict[str, str], dict[str, str]]:
    """Read files of named queries; returns them, and which one follows which (`-- name: a then b`).

    What a later file names replaces what an earlier one does. Comments above a query are not part of its text.
    `-- nothing: a b` names queries with nothing to do. `-- fragment: name a b` defines a text for the queries of
    all files: each `[name x, y]` is replaced by it, with x for `[a]` and y for `[b]`. A short text may follow ` = ` in
    the same line.
    """
    queries: dict[str, str] = {}
    seconds: dict[str, str] = {}
    fragments: dict[str, tuple[list[str], str]] = {}
    for text in texts:
        seen: set[tuple[bool, str]] = set()
        parts = _PART.split(text)
        for kind, name, words, body in zip(*(parts[n::4] for n in (1, 2, 3, 4)), strict=True):
            lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
            params, _, short = words.partition(" =")
            sql = "\n".join([short, *lines]).strip()
            named = [name, *words.split()] if kind == "nothing" else [name]
            for each in named:
                if (kind == "fragment", each) in seen:
                    raise ConfigurationError(f"{kind} {each} is defined twice.")
                seen.add((kind == "fragment", each))
            if kind == "fragment":
                fragments[name] = params.split(), sql
            else:
                queries |= dict.fromkeys(named, sql)
            if kind == "name" and words:
                seconds[name] = words.removeprefix(" then ")
    return {name: _whole(sql, fragments) for name, sql in queries.items()}, seconds


def _whole(sql: str, fragments: Mapping[str, tuple[list[str], str]]) -> str:
    """Replace every use of a fragment; the last of its parameters may have commas."""
    while use := _USE.search(sql):
        words, text = fragments[use[1]]
        values = use[2].split(", ", len(words) - 1) if use[2] else ()
        for word, value in zip(words, values, strict=True):
            text = text.replace(f"[{word}]", value)
        sql = sql[: use.start()] + text + sql[use.end() :]
    return sql


def qualified(sql: str, schema: str) -> str:
    """Qualify every txbox table, view and function with a PostgreSQL schema, which is a plain identifier."""
    return _OBJECT.sub(lambda match: f'"{schema}".{match[0]}', sql)


@cache
def dialect(name: str, schema: str | None = None) -> Dialect:
    """Load a dialect; the result is cached.

    Raises:
        ConfigurationError: unknown name, or a schema name that is not a plain identifier.
    """
    if name not in _CAPABILITIES:
        raise ConfigurationError(
            f"There is no dialect {name!r}: use postgresql, mysql (also for MariaDB) or sqlite."
        )
    common, differing = (
        files("txbox.store").joinpath(f"{file}.sql").read_text("utf-8") for file in ("common", name)
    )
    queries, seconds = parse_queries(
        common if name == "postgresql" else _CAST.sub("", common), differing
    )
    if schema is not None:
        if name != "postgresql":
            raise ConfigurationError("schema= is for PostgreSQL only: remove it for this database.")
        if not _SCHEMA.fullmatch(schema):
            raise ConfigurationError(
                f"invalid schema name {schema!r}: use lower-case letters, digits and underscores."
            )
        queries = {query: qualified(sql, schema) for query, sql in queries.items()}
    return Dialect(
        name=name, queries=queries, seconds=seconds, faults=_FAULTS[name], **_CAPABILITIES[name]
    )


#: What stands for times that Python cannot express, such as infinity: a day from its ends, whatever the time zone.
FIRST, LAST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


def as_time(value: Any) -> datetime | None:
    """Return a point in time, in whatever form a query returns it, as aware UTC.

    One before the year 1 or after 9998 is `FIRST` or `LAST`; None where it was altered and is no time.
    """
    if isinstance(value, datetime):
        moment = value
    elif value is None or isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value or "")
        except ValueError:
            return None
    else:
        # seconds since 1970
        try:
            moment = datetime.fromtimestamp(value, UTC)
        except (ValueError, OverflowError, OSError):
            return LAST if value > 0 else FIRST
        except TypeError:
            return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        return LAST if moment.year > 1 else FIRST


_CAPABILITIES: dict[str, dict[str, bool]] = {
    "postgresql": {
        "arrays": True,
        "returning": True,
        "refuses_commit": True,
        "claim_bounds_wait": True,
        "cheap_savepoints": False,
    },
    "mysql": {
        "arrays": False,
        "returning": False,
        "refuses_commit": False,
        "claim_bounds_wait": False,
        "cheap_savepoints": False,
    },
    "sqlite": {
        "arrays": False,
        "returning": True,
        "refuses_commit": True,
        "claim_bounds_wait": True,
        "cheap_savepoints": True,
    },
}

# SQLSTATE, its first two characters, or error number
_CODES: dict[str, dict[Fault, str]] = {
    "postgresql": {
        Fault.CONFLICT: "40001 40P01",
        Fault.LOCK_TIMEOUT: "55P03",
        Fault.DUPLICATE: "23505",
        Fault.GUARD: "TXB01 TXB02",
        Fault.ABORTED: "25P02",
        Fault.SCHEMA: "42P01 42703 42883 3F000",
        Fault.PREPARED: "26000 42P05",
        Fault.TIMEOUT: "57014 25P03 25P04",
        Fault.CONTENT: "22___ 54000 54001",
        Fault.UNAVAILABLE: "25006 08___ 53000 53100 53200 53300 57P01 57P02 57P03 57P04 57P05 58___",
    },
    # 1020 and 1213 roll back the whole transaction, 1205 only its statement; here all three end the transaction.
    # Group Replication reports a conflict with another node by 1180 or 3101, at COMMIT, and 3100 where this node has
    # left the group; Galera 1047 where this node has no quorum. 1041, 1135, 1637: no memory, threads or undo slots;
    # 3032: offline mode; 9001: ProxySQL, which has no server to give
    "mysql": {
        Fault.CONFLICT: "1213 1020 1180 3101",
        Fault.LOCK_TIMEOUT: "1205 3572",
        Fault.DUPLICATE: "1062",
        Fault.GUARD: "1305",
        Fault.SCHEMA: "1146 1054 1176",
        Fault.TIMEOUT: "1969 3024 1317",
        Fault.CONTENT: "1118 1153 1264 1292 1300 1301 1366 1367 1406 1441 3988",
        Fault.UNAVAILABLE: "1021 1037 1040 1041 1047 1053 1077 1114 1135 1152 1158 1159 1160 1161 1184 1203 1226 "
        "1290 1637 1792 1836 1927 2002 2003 2006 2013 2014 2055 3032 3100 4031 9001",
    },
    # extended result codes by name (sqlite_errorname)
    "sqlite": {
        Fault.CONFLICT: "SQLITE_BUSY SQLITE_BUSY_SNAPSHOT SQLITE_BUSY_RECOVERY SQLITE_BUSY_TIMEOUT SQLITE_LOCKED "
        "SQLITE_LOCKED_SHAREDCACHE",
        Fault.DUPLICATE: "SQLITE_CONSTRAINT_UNIQUE SQLITE_CONSTRAINT_PRIMARYKEY SQLITE_CONSTRAINT_ROWID",
        Fault.CONTENT: "SQLITE_TOOBIG",
        # the error that close fails with
        Fault.GUARD: "SQLITE_MISMATCH",
        Fault.UNAVAILABLE: "SQLITE_FULL SQLITE_CANTOPEN SQLITE_READONLY SQLITE_IOERR SQLITE_PROTOCOL",
    },
}
_FAULTS = {
    name: {code: fault for fault, codes in faults.items() for code in codes.split()}
    for name, faults in _CODES.items()
}
