"""Whether the first messages of a source have ids at all (SEMANTICS 1.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from txbox.errors import UnusableMessage
from txbox.handlers import Handler
from txbox.message import Message

_MESSAGES = 100


class FirstIds:
    """Looks at the messages of a source until one has a usable id.

    One message without an id is a stranger's mistake and goes to the quarantine. A source without
    any is set up wrongly, and would be emptied into the quarantine.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._without = 0
        #: True once a message had an id: from then on there is nothing to look at.
        self.found = False

    def missing(self, message: Message[Any], handlers: Sequence[Handler]) -> str | None:
        """Look at one more message; returns what to set when that is one too many without an id."""
        for handler in handlers:
            try:
                handler.id_of(message)
            except UnusableMessage:
                continue
            self.found = True
            return None
        self._without += 1
        if self._without < _MESSAGES:
            return None
        weak = (
            ", or weak_ids=True if the position in the stream may stand for one"
            if "weak_id" in message.origin
            else ""
        )
        names = ", ".join(handler.name for handler in handlers)
        return (
            f"None of the first {_MESSAGES} messages of {self._source} has a usable id, and the source is paused: "
            f"set message_id= on {names}{weak}, then start the worker again."
        )
