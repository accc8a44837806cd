"""A database that a test has used, as it was before: rows away, and nothing else changed; or no, it is not.

Making one costs ten times as much as emptying it, and most tests change rows alone. What a test has done to
the tables, functions, rights or statistics is not repaired: such a database is dropped.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Protocol

LEAVING_S = 2.0  # a server notices a moment later that a client has gone


class _Look(Protocol):
    def rows(self, sql: str, params: Any = ()) -> list[tuple[Any, ...]]: ...

    def value(self, sql: str, params: Any = ()) -> Any: ...

    def execute(self, sql: str, params: Any = ()) -> int: ...


def _alone(look: _Look, others: str, params: tuple[object, ...] = ()) -> bool:
    """Whether nobody else is connected: who still is may go on to write."""
    deadline = time.monotonic() + LEAVING_S
    while look.value(others, params):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


# --- PostgreSQL: everything in the catalogs that a test could have changed, as one hash: of oids and stored trees,
# which are those of the template, and not of the texts that PostgreSQL makes of them.

# the view of the sessions joins databases and roles, and costs as much as a connection
_OTHERS = (
    "SELECT count(*) FROM pg_stat_get_activity(NULL) WHERE datid ="
    " (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)
_TABLES = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
#: Any row that was ever written, committed or not, has made the file longer.
_WRITTEN = (
    "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
    " AND relname <> 'txbox_schema' AND (pg_relation_size(oid) > 0 OR reltuples >= 0)"
)
_HERE = (
    "NOT IN ('pg_catalog', 'information_schema', 'pg_toast') AND nspname NOT LIKE 'pg\\_%temp\\_%'"
)
_STATE = f"""
WITH here AS (SELECT * FROM pg_namespace WHERE nspname {_HERE}),
relation AS (SELECT c.* FROM pg_class c JOIN here h ON h.oid = c.relnamespace)
SELECT md5(string_agg(line, chr(10) ORDER BY line COLLATE "C")) FROM (
  SELECT concat_ws('|', 'schema', nspname, nspowner, nspacl) AS line FROM here
  UNION ALL SELECT concat_ws('|', 'relation', relname, relkind, relnamespace, relowner, relacl, reloptions,
    relpersistence, relrowsecurity, relforcerowsecurity, relreplident, relhastriggers, relispartition) FROM relation
  UNION ALL SELECT concat_ws('|', 'column', attrelid, attnum, attname, atttypid, atttypmod, attnotnull,
    attstattarget, attstorage, attacl, attoptions, attisdropped, attidentity)
    FROM pg_attribute WHERE attrelid IN (SELECT oid FROM relation)
  UNION ALL SELECT concat_ws('|', 'default', adrelid, adnum, adbin) FROM pg_attrdef
  UNION ALL SELECT concat_ws('|', 'constraint', pg_constraint)
    FROM pg_constraint WHERE connamespace IN (SELECT oid FROM here)
  UNION ALL SELECT concat_ws('|', 'index', pg_index) FROM pg_index WHERE indrelid IN (SELECT oid FROM relation)
  UNION ALL SELECT concat_ws('|', 'trigger', pg_trigger) FROM pg_trigger
  UNION ALL SELECT concat_ws('|', 'function', oid, proargtypes, proowner, prosecdef, proacl, proconfig, prosrc)
    FROM pg_proc WHERE pronamespace IN (SELECT oid FROM here)
  UNION ALL SELECT concat_ws('|', 'setting', setrole, setconfig) FROM pg_db_role_setting
    WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
  UNION ALL SELECT concat_ws('|', 'database', datacl, datconnlimit, datallowconn, datdba)
    FROM pg_database WHERE datname = current_database()
  UNION ALL SELECT concat_ws('|', 'comment', objoid, objsubid, description) FROM pg_description WHERE objoid >= 16384
  UNION ALL SELECT concat_ws('|', 'counts',
    (SELECT count(*) FROM pg_extension), (SELECT count(*) FROM pg_publication), (SELECT count(*) FROM pg_event_trigger),
    (SELECT count(*) FROM pg_default_acl), (SELECT count(*) FROM pg_statistic_ext), (SELECT count(*) FROM pg_policy),
    (SELECT count(*) FROM pg_rewrite WHERE oid >= 16384), (SELECT count(*) FROM pg_type WHERE oid >= 16384),
    (SELECT count(*) FROM pg_largeobject_metadata), (SELECT count(*) FROM pg_statistic WHERE starelid >= 16384))
  UNION ALL SELECT concat_ws('|', 'version', txbox_schema::text) FROM txbox_schema
) AS lines
"""


def postgresql_state(look: _Look) -> tuple[str, frozenset[str]]:
    """What `tidy_postgresql` compares with: of a database that nobody has used."""
    return str(look.value(_STATE)), frozenset(str(name) for (name,) in look.rows(_TABLES))


def tidy_postgresql(look: _Look, state: tuple[str, frozenset[str]]) -> bool:
    """Whether the database is now as it was when its state was taken."""
    if not _alone(look, _OTHERS):
        return False
    before, tables = state
    look.execute("SET lock_timeout = '2s'")  # a prepared transaction holds locks without a client
    if more := [name for (name,) in look.rows(_TABLES) if name not in tables]:
        look.execute("DROP TABLE " + ", ".join(f'public."{name}"' for name in more))
    # before the tables are emptied: that resets the statistics
    if look.value(_STATE) != before:
        return False
    if written := [name for (name,) in look.rows(_WRITTEN)]:
        names = ", ".join(f'public."{name}"' for name in written)
        look.execute(f"TRUNCATE {names} RESTART IDENTITY")
    look.rows("SELECT pg_stat_reset()")  # tests count the rows that were written
    return True


# --- MySQL and MariaDB: the statement that makes each table, and the names of everything else.

#: The sessions of a server. MySQL's information_schema fails (3854) for as long as any of them runs a statement with
#: bytes that are not UTF-8, and MariaDB has no other: each of them reads the line of the other as a comment.
SESSIONS = "/*!80000 performance_schema.processlist */ /*M! information_schema.processlist */"
#: The sessions that wait for a lock, for one more condition.
LOCK_WAITS = (
    f"SELECT id FROM {SESSIONS}"
    " /*M! JOIN information_schema.innodb_trx ON id = trx_mysql_thread_id WHERE trx_state = 'LOCK WAIT' */"
    " /*!80000 JOIN performance_schema.threads ON id = processlist_id"
    " JOIN performance_schema.data_lock_waits ON thread_id = requesting_thread_id WHERE true */"
)
_COUNTER = re.compile(r" AUTO_INCREMENT=\d+")
_ELSE = """
SELECT concat_ws('|', 'trigger', trigger_name, action_statement)
  FROM information_schema.triggers WHERE trigger_schema = ?
UNION ALL SELECT concat_ws('|', 'routine', routine_name) FROM information_schema.routines WHERE routine_schema = ?
UNION ALL SELECT concat_ws('|', 'event', event_name) FROM information_schema.events WHERE event_schema = ?
UNION ALL SELECT concat_ws('|', 'view', table_name) FROM information_schema.views WHERE table_schema = ?
UNION ALL SELECT concat_ws('|', 'schema', default_character_set_name, default_collation_name)
  FROM information_schema.schemata WHERE schema_name = ?
"""


@dataclass(frozen=True, slots=True)
class MySQLState:
    tables: dict[str, str]
    others: list[str]
    versions: list[tuple[Any, ...]]


def _tables(look: _Look, name: str) -> dict[str, str]:
    """Each table, with the statement that makes it."""
    found = look.rows(
        "SELECT table_name FROM information_schema.tables"
        " WHERE table_schema = ? AND table_type = 'BASE TABLE'",
        (name,),
    )
    return {
        str(table): str(look.rows(f"SHOW CREATE TABLE `{name}`.`{table}`")[0][1])
        for (table,) in found
    }


def _others(look: _Look, name: str) -> list[str]:
    return sorted(str(line) for (line,) in look.rows(_ELSE, (name,) * 5))


def _versions(look: _Look, name: str) -> list[tuple[Any, ...]]:
    """Without the time of each: every database is made by itself."""
    return look.rows(f"SELECT version, compatible_from FROM `{name}`.txbox_schema ORDER BY version")


def mysql_state(look: _Look, name: str) -> MySQLState:
    """What `tidy_mysql` compares with: of a database that nobody has used."""
    tables = {table: _COUNTER.sub("", text) for table, text in _tables(look, name).items()}
    return MySQLState(tables, _others(look, name), _versions(look, name))


def tidy_mysql(look: _Look, name: str, state: MySQLState) -> bool:
    """Whether the database is now as it was when its state was taken."""
    if not _alone(look, f"SELECT count(*) FROM {SESSIONS} WHERE db = ?", (name,)):
        return False
    tables = _tables(look, name)
    if more := tables.keys() - state.tables.keys():
        look.execute("DROP TABLE " + ", ".join(f"`{name}`.`{table}`" for table in more))
    kept = {table: _COUNTER.sub("", text) for table, text in tables.items() if table not in more}
    if kept != state.tables or _others(look, name) != state.others:
        return False
    if _versions(look, name) != state.versions:
        return False
    # a counter moves with every row, committed or not; a table without one is looked into
    used = {table for table, text in kept.items() if text != tables[table]}
    plain = [table for table, text in kept.items() if "AUTO_INCREMENT" not in text]
    look.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")  # a prepared transaction's too
    rows = (f"(SELECT '{table}' FROM `{name}`.`{table}` LIMIT 1)" for table in plain)
    used |= {str(table) for (table,) in look.rows(" UNION ALL ".join(rows))}
    for table in used - {"txbox_schema"}:
        # making a table anew is the most expensive part of this
        look.execute(f"TRUNCATE TABLE `{name}`.`{table}`")
    return True
