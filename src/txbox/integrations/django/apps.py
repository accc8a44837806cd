"""What happens when Django is ready: the App is imported, and its dead letters become a signal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db import Error, connections

from txbox.errors import StoreError
from txbox.events import Event, MessageDead, OutgoingDead
from txbox.integrations import django as integration
from txbox.session import drive
from txbox.store import schema


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


def _signal(event: Event) -> None:
    if isinstance(event, (MessageDead, OutgoingDead)):
        integration.dead_letter.send_robust(sender=type(event), event=event)


def check_tables(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Whether the tables are those that this release needs; only where databases may be asked."""
    alias = integration.alias()
    if not databases or alias not in databases or connections[alias].in_atomic_block:
        return []
    app = integration.app()
    assert app.database.sync is not None
    try:
        state = drive(app.database.sync, schema.state_of, app.store.dialect)
    except (StoreError, Error):
        # an absent database is none of ours to report
        return []
    refusal = schema.unusable(state)
    if refusal is None:
        return []
    return [checks.Warning(refusal, hint="Run `manage.py migrate`.", id="txbox.W001")]
