"""What runs with the owner's rights is led astray by no role that may create in the schema, and by no isolation."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.command import Command
from tests.support.databases import NewDatabase, Raw
from tests.support.partitions import DAY, aged, day_parts, finished_at, midnight, uuid7
from tests.support.shop import opened, paid
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App, Outcome, Retention
from txbox.maintenance import run_once
from txbox.store import schema as tables
from txbox.store.dialect import dialect
from txbox.store.partitions import Partitioning

#: Whoever is a superuser and calls a trap makes the attacker one.
_TRAP = """
DO $traps$
DECLARE
    types text[] := ARRAY['oid', 'regclass', 'name', 'text', '"char"', 'varchar', 'int2', 'int4', 'int8', 'float8',
                          'numeric', 'timestamptz', 'interval', 'bool', 'bytea'];
    head  text := 'CREATE FUNCTION public.';
    tail  text;
    one   text;
    two   text;
    named text;
BEGIN
    tail := format(' LANGUAGE plpgsql SET search_path = pg_catalog AS %L', $body$
BEGIN
    INSERT INTO public.trapped VALUES (current_query());
    IF (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) current_user) THEN
        EXECUTE 'ALTER ROLE [attacker] SUPERUSER';
    END IF;
    RETURN NULL;
END
$body$);
    FOREACH one IN ARRAY types LOOP
        FOREACH two IN ARRAY types LOOP
            EXECUTE head || format('trap(%s, %s) RETURNS boolean', one, two) || tail;
            EXECUTE head || format('text_trap(%s, %s) RETURNS text', one, two) || tail;
            FOREACH named IN ARRAY ARRAY['=', '<>', '<', '>', '<=', '>=', '~', '~~'] LOOP
                EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.trap)',
                               named, one, two);
            END LOOP;
            EXECUTE format('CREATE OPERATOR public.|| (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.text_trap)',
                           one, two);
            FOREACH named IN ARRAY ARRAY['format', 'substring', 'pg_get_expr', 'to_char', 'pg_relation_size',
                                         'obj_description'] LOOP
                EXECUTE head || format('%I(%s, %s) RETURNS text', named, one, two) || tail;
            END LOOP;
        END LOOP;
        FOREACH named IN ARRAY ARRAY['to_regclass', 'to_hex', 'floor', 'count', 'max', 'make_interval',
                                     'pg_advisory_xact_lock', 'brin_summarize_new_values', 'pg_relation_size',
                                     'current_setting', 'to_timestamp'] LOOP
            EXECUTE head || format('%I(%s) RETURNS text', named, one) || tail;
        END LOOP;
    END LOOP;
END
$traps$
"""


@contextmanager
def attacker(url: str) -> Iterator[tuple[str, Raw]]:
    """An unprivileged login that may create in the schema of the tables."""
    role, parts = f"txbox_attacker_{secrets.token_hex(4)}", urlsplit(url)
    with Raw(url) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        admin.execute(f"GRANT CREATE, USAGE ON SCHEMA public TO {role}")
        try:
            host = parts.netloc.rpartition("@")[2]
            with Raw(parts._replace(netloc=f"{role}:x@{host}").geturl()) as view:
                yield role, view
        finally:
            # dropped with the traps it set
            admin.execute(f"DROP OWNED BY {role} CASCADE")
            admin.execute(f"DROP ROLE {role}")


def set_traps(role: str, view: Raw) -> None:
    view.execute("CREATE TABLE trapped (query text)")
    view.execute("GRANT INSERT ON trapped TO PUBLIC")
    view.execute(_TRAP.replace("[attacker]", role))


def sprung(view: Raw, role: str) -> list[str]:
    """The queries that met a trap; the role itself when it has become a superuser."""
    found = {str(query) for (query,) in view.rows("SELECT query FROM trapped")}
    if view.value("SELECT rolsuper FROM pg_roles WHERE rolname = ?", (role,)):
        found.add(f"{role} is a superuser")
    return sorted(found)


@pytest.fixture
def partitioned(new_database: NewDatabase) -> str:
    """An inbox that is partitioned by time."""
    return aged(new_database("postgresql", schema=False), "uuid7")


def test_a_role_that_may_create_in_the_schema_does_not_become_a_superuser(
    partitioned: str,
) -> None:
    with opened(partitioned, retention=Retention(processed=7 * DAY, ahead=12)) as shop:
        shop.handler()
        shop.deliver(paid(uuid7(midnight(-20))))
        finished_at(shop.raw, midnight(-20))
        with attacker(partitioned) as (role, view):
            set_traps(role, view)
            name = f"txbox_inbox_uuid7_{midnight(-20):%Y%m%d}_0000"
            gone = [
                shop.raw.value(
                    f"SELECT txbox_partition_{each}(?::text, 604800.0::double precision)", (name,)
                )
                for each in ("detach", "drop")
            ]
            assert sprung(view, role) == []
            made = shop.raw.value(
                "SELECT txbox_partition_make(?::timestamptz, ?::timestamptz, 0)",
                (midnight(11), midnight(12)),
            )
            assert sprung(view, role) == []
            assert (*gone, made) == (True, True, "made")
            assert run_once(shop.app, "partitions").rows == 1
            assert run_once(shop.app, "prune").rows == 0
            with App(partitioned) as app:
                app.init()
                run_once(app, "rescue")
            assert sprung(view, role) == []


def test_tables_are_made_in_a_schema_full_of_traps(new_database: NewDatabase) -> None:
    for kind in ("uuid7", "hash", None):
        url = new_database("postgresql", schema=False)
        with attacker(url) as (role, view), App(url) as app:
            set_traps(role, view)
            app.init(partition=kind)
            assert sprung(view, role) == []


def test_functions_search_pg_catalog_and_are_for_maintenance_alone(partitioned: str) -> None:
    role = f"txbox_maintenance_{secrets.token_hex(4)}"
    look = (
        "SELECT proname::text, proconfig::text, prosecdef,"
        " has_function_privilege(?, oid, 'EXECUTE'), has_function_privilege('public', oid, 'EXECUTE')"
        " FROM pg_proc WHERE proname ~ '^txbox_partition_' ORDER BY 1"
    )
    with Raw(partitioned) as admin:
        admin.execute(f"CREATE ROLE {role}")
        try:
            for statement in tables.split(
                tables.grants(dialect("postgresql"), "uuid7")["maintenance"]
            ):
                admin.execute(statement.replace("<maintenance>", role))
            pinned = '"search_path=pg_catalog, pg_temp"'
            assert admin.rows(look, (role,)) == [
                ("txbox_partition_bound", f"{{{pinned}}}", False, True, True),
                ("txbox_partition_detach", f"{{{pinned},enable_seqscan=off}}", True, True, False),
                ("txbox_partition_drop", f"{{{pinned},enable_seqscan=off}}", True, True, False),
                ("txbox_partition_make", f"{{{pinned}}}", True, True, False),
            ]
        finally:
            admin.execute(f"DROP OWNED BY {role}")
            admin.execute(f"DROP ROLE {role}")


def test_functions_find_tables_in_a_schema_of_any_name(new_database: NewDatabase) -> None:
    url = new_database("postgresql", schema=False)
    with Raw(url) as raw:
        raw.execute("""CREATE SCHEMA "it's ""a"" [home]" """)
        raw.execute("""SET search_path = "it's ""a"" [home]" """)
        sql = tables.migration_text(
            dialect("postgresql"), None, partitioning=Partitioning("uuid7", ahead=1)
        )
        for statement in tables.split(sql):
            raw.execute(statement)
        made = "SELECT txbox_partition_make(?::timestamptz, ?::timestamptz, 0)"
        assert raw.value(made, (midnight(2), midnight(3))) == "made"
        newest = day_parts(raw)[-1]
        assert not raw.value("SELECT txbox_partition_detach(?, 1.0)", (newest,))
        # the least age has everything go that is over: nothing younger than a hundred days behind now
        assert raw.value("SELECT txbox_partition_detach(?, -8640000.0)", (newest,))
        assert raw.value("SELECT txbox_partition_drop(?, -8640000.0)", (newest,))


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("how", ["transaction", "default"])
def test_no_partition_is_dropped_from_a_snapshot(
    partitioned: str, raw: Callable[[str], Raw], level: str, how: str
) -> None:
    """A marker that was committed behind the snapshot is not seen, and would go with its partition."""
    with opened(partitioned) as shop:
        shop.handler()
        name = f"txbox_inbox_uuid7_{midnight(-20):%Y%m%d}_0000"
        rival = raw(partitioned)
        if how == "default":
            database = rival.value("SELECT current_database()")
            rival.execute(
                f"ALTER DATABASE {database} SET default_transaction_isolation = '{level}'"
            )
            rival = raw(partitioned)
            rival.execute("BEGIN")
        else:
            rival.execute(f"BEGIN ISOLATION LEVEL {level}")
        rival.value("SELECT count(*) FROM txbox_attempt")  # the snapshot
        old = uuid7(midnight(-20))
        assert shop.deliver(paid(old)) is Outcome.PROCESSED
        with pytest.raises(psycopg.Error, match="READ COMMITTED") as refused:
            rival.value("SELECT txbox_partition_detach(?, 7 * 86400.0)", (name,))
        assert refused.value.sqlstate == "TXB03"
        rival.execute("ROLLBACK")
        assert shop.deliver(paid(old)) is Outcome.DUPLICATE


def test_a_snapshot_does_not_hide_a_row_that_comes_while_the_drop_waits(
    partitioned: str, raw: Callable[[str], Raw]
) -> None:
    """With SERIALIZABLE as the database's default; pruning itself asks for READ COMMITTED."""
    with Raw(partitioned) as admin:
        database = admin.value("SELECT current_database()")
        admin.execute(
            f"ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'"
        )
    with opened(partitioned, retention=Retention(processed=7 * DAY)) as shop:
        shop.handler()
        shop.deliver(paid(uuid7(midnight(-20))))
        finished_at(shop.raw, midnight(-20))
        rival, late = raw(partitioned), uuid7(midnight(-20))
        rival.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        rival.execute("SET txbox.token = 'own'")
        rival.execute("SET txbox.closed = 'own'")
        rival.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic, processed_at)"
            " VALUES ('billing', ?, 'processed', 't', now())",
            (late,),
        )
        pruning = threading.Thread(target=run_once, args=(shop.app, "prune"))
        pruning.start()
        eventually(lambda: shop.raw.value("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0)
        rival.execute("COMMIT")
        pruning.join(DEADLINE_S)
        assert shop.deliver(paid(late)) is Outcome.DUPLICATE


def test_who_may_create_in_the_schema_is_told(
    command: Command, new_database: NewDatabase, raw: Callable[[str], Raw]
) -> None:
    url = new_database("postgresql", schema=False)
    admin = raw(url)
    admin.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")  # granted before PostgreSQL 15
    assert command("init", "--database", url).err == ""
    with attacker(url) as (role, _):
        for words in (("init",), ("schema", "check", "--json"), ("schema", "apply")):
            assert f"{role} may create in the schema" in command(*words, "--database", url).sentence
        admin.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
        told = command("schema", "check", "--database", url).sentence
        assert f"PUBLIC, {role} may create in the schema" in told
        command("init", "--database", url, "--schema", "alone")
        alone = command("schema", "check", "--database", url, "--schema", "alone")
        assert alone.err == ""
