"""What happens when Django is ready: the App is imported, and its dead letters become a signal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db import Error, connections
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.models.signals import post_migrate

from txbox.errors import StoreError
from txbox.events import Event, MessageDead, OutgoingDead
from txbox.integrations import django as integration
from txbox.integrations.django.operations import after_migrate
from txbox.session import drive
from txbox.store import schema
from txbox.text import capitalized


class TxboxConfig(AppConfig):
    name = "txbox.integrations.django"
    label = "txbox"
    verbose_name = "txbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        observers = integration.app().events.observers
        if _signal not in observers:
            observers.append(_signal)
        checks.register(check_tables, checks.Tags.database)
        post_migrate.connect(after_migrate, sender=self)


def _signal(event: Event) -> None:
    if isinstance(event, (MessageDead, OutgoingDead)):
        integration.dead_letter.send_robust(sender=type(event), event=event)


def check_tables(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Whether the tables are those that this release needs; only where databases may be asked.

    Before their first migration nothing is wrong: `migrate` itself asks, and Django names what is unapplied.
    """
    alias = integration.alias()
    if not databases or alias not in databases or connections[alias].in_atomic_block:
        return []
    app = integration.app()
    assert app.database.sync is not None
    try:
        state = drive(app.database.sync, schema.state_of, app.store.dialect)
        is_pending = _is_pending(connections[alias])
    except (StoreError, Error):
        # Django reports an absent database
        return []
    refusal = schema.unusable(state)
    if refusal is None or (is_pending and state.version is None):
        return []
    hint = "Run `manage.py migrate`."
    if not is_pending:
        hint = capitalized(refusal.remedy).replace("`txbox ", "`manage.py txbox ")
    return [checks.Warning(f"{refusal.problem}.", hint=hint, id="txbox.W001")]


def _is_pending(connection: Any) -> bool:
    """Whether a migration of this app has not been applied."""
    loader = MigrationLoader(connection, load=False)
    loader.load_disk()
    applied = MigrationRecorder(connection).applied_migrations()
    return any(key[0] == TxboxConfig.label and key not in applied for key in loader.disk_migrations)
