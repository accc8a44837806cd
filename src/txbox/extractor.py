"""Reading an id, a version or a lock key out of a message: by a callable, or by a path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from txbox.errors import ConfigurationError
from txbox.message import Message

#: What a path may begin with; all but the first two are the message's own attributes.
_HEADS = ("body", "headers", "id", "key", "type", "topic", "sequence", "origin", "time")

Extractor = Callable[[Message[Any]], object]


def check_path(option: str, given: object) -> None:
    """Check an option that may be a path, so that a slip of the pen sets no message aside.

    Raises:
        ConfigurationError: a path that no message has.
    """
    if given is None or callable(given):
        return
    if not isinstance(given, str):
        raise ConfigurationError(f"{option} is {given!r}: give a callable or a path.")
    head, dot, rest = given.partition(".")
    if head not in _HEADS or (dot and not all(rest.split("."))) or (head == "headers" and not rest):
        raise ConfigurationError(
            f'{option} is {given!r}: use a callable, or a path as "body.order.id", "headers.name" or "key".'
        )


def extractor_of(given: Extractor | str | None) -> Extractor | None:
    """Return the callable itself, or one that follows a path; None where nothing was given."""
    return functools.partial(_at_path, given) if isinstance(given, str) else given


def _at_path(path: str, message: Message[Any]) -> object:
    """Follow "body.order.id", "headers.name" or "key" through a message; the body is read as JSON."""
    head, _, rest = path.partition(".")
    if head == "headers":
        return message.headers.text(rest)
    value: Any = message.json() if head == "body" else getattr(message, head)
    for part in filter(None, rest.split(".")):
        value = value[int(part) if isinstance(value, list) else part]
    return value
