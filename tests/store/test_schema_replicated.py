"""A copy of the inbox that logical replication keeps takes rows that were committed under the guard."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.databases import Raw
from tests.support.servers.control import ThrowawayPostgres
from tests.support.shop import opened, paid, statuses
from tests.support.waiting import eventually
from txbox import App, Outcome


@pytest.fixture
def server() -> Iterator[ThrowawayPostgres]:
    with ThrowawayPostgres() as postgres:
        with Raw(postgres.url) as admin:
            admin.execute("ALTER SYSTEM SET wal_level = logical")
        postgres.stop()
        postgres.start()
        yield postgres


def test_logical_replication_brings_processed_rows(server: ThrowawayPostgres) -> None:
    """Those that were there, those that come, and those of a role that may not look at other sessions."""
    first, second = (urlsplit(server.url)._replace(path=f"/{each}").geturl() for each in "pq")
    with Raw(server.url) as admin:
        admin.execute("CREATE DATABASE p")
        admin.execute("CREATE DATABASE q")
    with App(second) as copy:
        copy.init()
    with App(first) as app:
        app.init()
    with opened(first) as shop, Raw(second) as standby:
        shop.handler()
        assert shop.deliver(paid("before")) is Outcome.PROCESSED
        shop.raw.execute("CREATE PUBLICATION inbox FOR TABLE txbox_inbox")
        shop.raw.rows("SELECT pg_create_logical_replication_slot('inbox', 'pgoutput')")
        standby.execute("CREATE ROLE keeper")
        standby.execute("GRANT CREATE ON SCHEMA public TO keeper")
        standby.execute("ALTER TABLE txbox_inbox OWNER TO keeper")
        # from 16 on an apply worker takes the table owner's part, and no deferred trigger may fire there
        (version,) = standby.rows("SELECT current_setting('server_version_num')::integer")[0]
        as_owner = ", run_as_owner = true" if version >= 160000 else ""
        standby.execute(
            f"CREATE SUBSCRIPTION inbox CONNECTION '{first}' PUBLICATION inbox"
            f" WITH (create_slot = false, slot_name = 'inbox'{as_owner})"
        )
        try:
            eventually(lambda: statuses(standby) == {"processed": 1})
            assert shop.deliver(paid("after")) is Outcome.PROCESSED
            eventually(lambda: statuses(standby) == {"processed": 2})
            standby.execute("SET session_replication_role = replica")
            with pytest.raises(psycopg.Error) as refused:
                standby.execute(
                    "INSERT INTO txbox_inbox (consumer, message_id, status, topic)"
                    " VALUES ('a', 'b', 'processed', 't')"
                )
            assert refused.value.sqlstate == "TXB02"
        finally:
            standby.execute("ALTER SUBSCRIPTION inbox DISABLE")
            standby.execute("ALTER SUBSCRIPTION inbox SET (slot_name = NONE)")
            standby.execute("DROP SUBSCRIPTION inbox")
