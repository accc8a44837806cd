"""What a source of messages is: receive a batch, settle it, and little else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from txbox.message import Message


@dataclass(slots=True, eq=False)
class Delivery:
    """A message together with the right to acknowledge it.

    Attributes:
        message: None when the bytes are no message; `problem` says why, `raw` keeps them.
        tag: the source's own handle, for nobody else.
    """

    message: Message[Any] | None
    topic: str
    tag: Any = None
    problem: str | None = None
    raw: bytes = b""
    redelivered: bool = field(default=False)


class Progress(Protocol):
    """Where a source without a broker keeps how far it has come: a row in the database.

    Only one process at a time holds it; `load` and `save` raise StoreError.
    """

    def acquire(self) -> bool:
        """Take or renew the lease of this progress; False while another process holds it."""
        ...

    def load(self) -> str | None: ...
    def save(self, state: str) -> bool:
        """Store the state; False when the lease was lost."""
        ...

    def release(self) -> None: ...


class Source(Protocol):
    """Where deliveries come from. All methods are called from one thread, the source's own.

    Guarantee: a delivery that was not settled comes again after a crash.
    """

    @property
    def name(self) -> str:
        """The source for people and metrics, stable across restarts."""
        ...

    @property
    def exhausted(self) -> bool:
        """True when nothing more will ever come; a source that follows is never exhausted."""
        ...

    def open(self, topics: Sequence[str], progress: Progress) -> None: ...
    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        """Return what is there, up to `messages_max`; wait at most `wait_s` seconds for the first."""
        ...

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge deliveries, in any order; a source with a cursor moves it over the gapless front only."""
        ...

    def close(self) -> None: ...
