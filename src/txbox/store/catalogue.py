"""The tables as the migrations define them, and what a database lacks of that."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

from txbox.session import Transaction
from txbox.store import schema
from txbox.store.dialect import Dialect

_COMMENT = re.compile(r"--[^\n]*")
# what creates, alters or drops something, in order
_STEP = re.compile(
    r"CREATE TABLE (?:IF NOT EXISTS )?(?P<table>txbox_\w+) \((?P<body>.*?)\n\)"
    r"|CREATE (?:OR REPLACE )?VIEW (?P<view>txbox_\w+)"
    r"|CREATE INDEX (?:IF NOT EXISTS )?(?P<index>txbox_\w+) ON (?P<indexed>txbox_\w+)"
    r"|DROP INDEX (?P<dropped>[^;']*)"
    r"|ALTER TABLE (?P<altered>txbox_\w+)\s(?P<changes>[^;]*)"
    r"|CREATE (?:OR REPLACE )?FUNCTION (?P<function>txbox_\w+)\(\)(?:(?!\$function\$).)*"
    r"\$function\$(?P<source>.*?)\$function\$",
    re.DOTALL,
)
_COLUMN = re.compile(r"^    (`?)([a-z_]+)\1 +[A-Za-z]", re.MULTILINE)
_KEY = re.compile(
    r"^    KEY (txbox_\w+)|^    (PRIMARY) KEY|CONSTRAINT (txbox_\w+_pkey) ", re.MULTILINE
)
_KEY_OF_COLUMN = re.compile(r"^    [a-z_]+ .*PRIMARY KEY", re.MULTILINE)
_CHANGE = re.compile(r"(ADD|DROP) (COLUMN|KEY) `?(\w+)`?")


@dataclass(slots=True)
class Catalogue:
    """The columns and indexes of each table (none for a view), and the source of each function."""

    columns: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    indexes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    functions: dict[str, str] = field(default_factory=dict[str, str])


@cache
def expected(dialect_name: str, upto: int = schema.VERSION) -> Catalogue:
    """Return what the migrations up to a version create, except for partitions."""
    text = _COMMENT.sub("", "\n".join(schema.migrations(dialect_name, upto=upto)))
    found = Catalogue()
    for step in _STEP.finditer(text):
        if (table := step["table"]) is not None:
            body = step["body"]
            found.columns[table] = {name for _, name in _COLUMN.findall(body)}
            found.indexes[table] = {"".join(names) for names in _KEY.findall(body)}
            if _KEY_OF_COLUMN.search(body):
                found.indexes[table].add(f"{table}_pkey")
        elif step["view"] is not None:
            found.columns[step["view"]] = set()
        elif step["index"] is not None:
            found.indexes[step["indexed"]].add(step["index"])
        elif step["dropped"] is not None:
            for name in re.findall(r"txbox_\w+", step["dropped"]):
                for of_table in found.indexes.values():
                    of_table.discard(name)
        elif step["function"] is not None:
            found.functions[step["function"]] = step["source"]
        else:
            _alter(found, step["altered"], step["changes"])
    if dialect_name == "sqlite":
        # the index of a primary key has no name
        found.indexes = {
            table: {name for name in names if name != "PRIMARY" and not name.endswith("_pkey")}
            for table, names in found.indexes.items()
        }
    return found


def _alter(found: Catalogue, table: str, changes: str) -> None:
    for verb, kind, name in _CHANGE.findall(changes):
        of_table = (found.columns if kind == "COLUMN" else found.indexes)[table]
        if verb == "ADD":
            of_table.add(name)
        else:
            of_table.discard(name)


async def read(db: Transaction, dialect: Dialect) -> tuple[Catalogue, list[tuple[str, str]]]:
    """Read what the database has, and its invalid indexes with their tables, in an open transaction."""
    found, invalid = Catalogue(), list[tuple[str, str]]()
    for table, column in (await db.execute(dialect.statement("doctor_columns"))).rows:
        found.columns.setdefault(str(table), set()).add(str(column))
    for table, index, valid in (await db.execute(dialect.statement("doctor_indexes"))).rows:
        found.indexes.setdefault(str(table), set()).add(str(index))
        if not valid:
            invalid.append((str(table), str(index)))
    if dialect.has("doctor_functions"):
        for name, source in (await db.execute(dialect.statement("doctor_functions"))).rows:
            found.functions[str(name)] = str(source)
    return found, invalid


def missing(wanted: Catalogue, found: Catalogue) -> list[str]:
    """Return what is missing, for people."""
    lacking: list[str] = []
    for table, columns in wanted.columns.items():
        if table not in found.columns:
            lacking.append(f"{'table' if columns else 'view'} {table}")
            continue
        lacking += [f"column {table}.{name}" for name in sorted(columns - found.columns[table])]
        kept = found.indexes.get(table, set())
        lacking += [
            f"index {name} of {table}" for name in sorted(wanted.indexes.get(table, set()) - kept)
        ]
    return lacking + [
        f"function {name}" for name in wanted.functions if name not in found.functions
    ]


def changed(wanted: Catalogue, found: Catalogue) -> list[str]:
    """Name the functions whose source differs."""
    return [
        name
        for name, source in wanted.functions.items()
        if found.functions.get(name, source).strip() != source.strip()
    ]
