"""What is checked before anything is consumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from txbox import settings
from txbox.app import App
from txbox.brokers.base import Source
from txbox.errors import ConfigurationError, StoreError
from txbox.settings import Conflict
from txbox.worker.driving import Driver


def check_handlers(app: App, *, needed: bool = True) -> None:
    """Check that there are handlers, if they are `needed`, and sync or async connections as they need.

    Raises:
        ConfigurationError: there are none.
    """
    if needed and not len(app.handlers):
        raise ConfigurationError(
            "The app has no handlers: decorate a function with @app.handler(topic, consumer=…)."
        )
    for handler in app.handlers:
        connections = app.database.asynchronous if handler.is_async else app.database.sync
        if connections is None:
            kind = "async" if handler.is_async else "sync"
            raise ConfigurationError(
                f"{handler.name} is {kind}, but {app.database.name} has no {kind} connections: "
                "give App() a URL, or an object that has them."
            )


def check_time_outs(app: App) -> None:
    """Check that whoever waits waits longer than what is waited for.

    Raises:
        ConfigurationError: the sentence names both values.
    """
    _refuse(settings.time_outs(app))


def check_order(app: App, source: Source, topics: Sequence[str]) -> None:
    """Check that a source keeps the order that handlers ask for.

    Raises:
        ConfigurationError: it shares a topic's messages out among consumers without regard to keys.
    """
    _refuse(settings.order(app.handlers, source, topics))


def check_redelivery(app: App, source: Source) -> None:
    """Check that the broker waits longer than a run may last, or than the worker lets it wait.

    Raises:
        ConfigurationError: the sentence names both values.
    """
    _refuse(settings.redelivery(app, source))


def _refuse(conflicts: Iterator[Conflict]) -> None:
    for conflict in conflicts:
        raise ConfigurationError(conflict.sentence)


def check_database(app: App, driver: Driver) -> None:
    """Check that the database answers and holds tables that fit.

    Raises:
        StoreError: it does not answer.
        SchemaError: the message contains the command to run.
    """
    try:
        driver.perform(app.check_schema)
    except StoreError as error:
        raise StoreError(
            f"The database {app.database.name} cannot be used ({error}): "
            "check that it runs and that the URL is right.",
            fault=error.fault,
            code=error.code,
        ) from error
