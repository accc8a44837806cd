"""A destination that remembers: what the relay's own tests publish to (each broker has its own tests)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from txbox import Message
from txbox.errors import BrokerError


class Recorder:
    """Confirms what `answer` does not refuse, and remembers it.

    Args:
        keeps_runs: it takes several messages of a key at once, and nothing behind one that is refused.
    """

    def __init__(
        self,
        answer: Callable[[Message[Any]], BrokerError | None] | None = None,
        *,
        keeps_runs: bool = False,
    ) -> None:
        self.keeps_runs = keeps_runs
        self.sent: list[Message[Any]] = []
        self.calls: list[list[str]] = []
        self._answer = answer
        self._lock = threading.Lock()

    def publisher(self) -> Recorder:
        return self

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def event_prefix(self) -> str:
        return "ce_"

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        del within_s
        answers: list[BrokerError | None] = []
        with self._lock:
            self.calls.append([str(message.id) for message in messages])
            stopped: set[str | None] = set()
            for message in messages:
                answer = self._answer(message) if self._answer else None
                if self.keeps_runs and message.key is not None and message.key in stopped:
                    answer = BrokerError("behind one that was refused")
                if answer is None:
                    self.sent.append(message)
                else:
                    stopped.add(message.key)
                answers.append(answer)
        return answers

    def close(self) -> None:
        pass

    @property
    def bodies(self) -> list[Any]:
        return [message.json() for message in self.sent]
