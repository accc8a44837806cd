"""A migration's operation: the tables at a version."""

from __future__ import annotations

from typing import Any

from django.core import mail
from django.db import connections, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation

from txbox.connections.django import Borrowed
from txbox.integrations import django as integration
from txbox.session import run
from txbox.store import schema
from txbox.store.dialect import dialect


class Tables(Operation):
    """Migrates the tables of TXBOX_APP's database to a version, from whatever version they are at.

    Not reversible: the rows say what has been processed.
    """

    reversible = False
    reduces_to_sql = True
    atomic = False

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The models are not managed: what Django knows of them is in the code."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        del app_label, from_state, to_state
        connection = schema_editor.connection
        if connection.alias != integration.alias():
            return
        wanted = integration.app().database.schema
        tables = dialect(connection.vendor, wanted)
        if schema_editor.collect_sql:
            text = schema.migration_text(tables, wanted, upto=self.version)
            for statement in schema.split(text):
                # not `execute`, which would take a % for a parameter here
                schema_editor.collected_sql.append(f"{statement};")
            return
        # not `borrow`: MySQL commits DDL by itself, so that Django begins no transaction there
        run(
            Borrowed(connection, tables, is_async=False),
            schema.migrate,
            tables,
            wanted,
            upto=self.version,
        )

    def describe(self) -> str:
        return f"The tables of txbox at version {self.version}"


def after_migrate(sender: Any, using: str, **more: Any) -> None:
    """Make the tables where migrations are switched off; empty them where a test flushes the database.

    Without migrations Django makes those of managed models alone, and a flush empties no others. What a person
    flushes keeps its inbox: only a test is known to want nothing of it.
    """
    if using != integration.alias():
        return
    connection = connections[using]
    wanted = integration.app().database.schema
    tables = dialect(connection.vendor, wanted)
    if MigrationLoader.migrations_module(sender.label)[0] is None:
        run(Borrowed(connection, tables, is_async=False), schema.migrate, tables, wanted)
    elif "plan" not in more and hasattr(mail, "outbox"):
        # only `flush` leaves the plan out, and only a test's set-up makes this outbox
        prefix = "" if wanted is None else f"{connection.ops.quote_name(wanted)}."
        with transaction.atomic(using=using), connection.cursor() as cursor:
            for table, columns in schema.expected(connection.vendor).columns.items():
                # a view has no columns there
                if columns and table != "txbox_schema":
                    cursor.execute(f"DELETE FROM {prefix}{table}")  # noqa: S608  # names of ours
