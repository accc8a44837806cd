"""Django: an app with the tables as migrations, read-only models, the admin's verbs, a command and a signal.

    INSTALLED_APPS = [..., "txbox.integrations.django"]
    TXBOX_APP = "shop.messages:app"    # module:name of the App; imported when Django is ready

Without TXBOX_APP the tables are those of the alias "default", and there are no handlers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from django.conf import settings
from django.dispatch import Signal

from txbox.app import App
from txbox.connections.django import DjangoDatabase
from txbox.errors import ConfigurationError

#: Sent with `event=`, a MessageDead or OutgoingDead, by the process that gave the message up. Receivers run outside of
#: any transaction of txbox's; one that raises is logged and disturbs nobody.
dead_letter = Signal()


@cache
def app() -> App:
    """The App that settings.TXBOX_APP names.

    Raises:
        ConfigurationError: it names none, or one that is not on a database of Django's.
    """
    path = getattr(settings, "TXBOX_APP", None)
    if path is None:
        return App(django="default")
    module, separator, name = str(path).partition(":")
    if not separator:
        raise ConfigurationError(f"TXBOX_APP is {path!r}: write it as module:name of an App.")
    loaded = getattr(import_module(module), name, None)
    if not isinstance(loaded, App):
        raise ConfigurationError(f"TXBOX_APP is {path!r}, and that is no App.")
    if not isinstance(loaded.database, DjangoDatabase):
        raise ConfigurationError(
            f"TXBOX_APP is {path!r}, which is on {loaded.database.name}: make it App(django='default')."
        )
    return loaded


def alias() -> str:
    """The database of the tables."""
    database = app().database
    assert isinstance(database, DjangoDatabase)
    return database.alias
