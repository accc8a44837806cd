"""What is checked before anything is consumed."""

from __future__ import annotations

from collections.abc import Sequence

from txbox.app import App, Consumption
from txbox.errors import ConfigurationError, StoreError
from txbox.worker.driving import Driver


def check_handlers(app: App) -> None:
    """Check that there are handlers, and connections of their colour.

    Raises:
        ConfigurationError: there are none.
    """
    if not len(app.handlers):
        raise ConfigurationError(
            "The app has no handlers: decorate a function with @app.handler(topic, consumer=…)."
        )
    for handler in app.handlers:
        connections = app.database.asynchronous if handler.is_async else app.database.sync
        if connections is None:
            colour = "async" if handler.is_async else "sync"
            raise ConfigurationError(
                f"{handler.name} is {colour}, but {app.database.name} has no {colour} connections: "
                "give App() a URL, or a database object of that colour."
            )


def topics_of(app: App, consumption: Consumption) -> Sequence[str]:
    """Return the topics to ask a source for.

    Raises:
        ConfigurationError: one has no handler, or the source cannot deliver it.
    """
    source = consumption.source
    known, own = app.handlers.topics(), source.topics
    wanted = consumption.topics
    if wanted is None:
        wanted = tuple(own) if own is not None else tuple(known)
    for topic in wanted:
        if topic != "*" and "*" not in known and topic not in known:
            raise ConfigurationError(
                f"{source.name} delivers topic {topic!r}, which no handler consumes: "
                f"register a handler for it, or name another topic ({_listed(known)})."
            )
        if own is not None and topic != "*" and topic not in own:
            raise ConfigurationError(
                f"{source.name} cannot deliver topic {topic!r}, only {_listed(own)}: "
                "set topic= on the source."
            )
    return wanted


def check_database(app: App, driver: Driver) -> None:
    """Check that the database answers and holds tables that fit.

    Raises:
        StoreError: it does not answer.
        SchemaError: the message contains the command to run.
    """
    try:
        driver.perform(app.check_schema())
    except StoreError as error:
        raise StoreError(
            f"The database {app.database.name} cannot be used ({error}): "
            "check that it runs and that the URL is right.",
            fault=error.fault,
            code=error.code,
        ) from error


def _listed(topics: Sequence[str]) -> str:
    return ", ".join(map(repr, topics))
