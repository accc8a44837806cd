"""Reading an id, a version or a lock key out of a message: by a callable, or by a path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from txbox.message import Message

Extractor = Callable[[Message[Any]], object]


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
