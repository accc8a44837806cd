"""What a source of messages is: receive a batch, settle it, and little else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from txbox.errors import BrokerError
from txbox.events import Event
from txbox.message import Message


@dataclass(slots=True, eq=False)
class Delivery:
    """A message together with the right to acknowledge it.

    Args:
        message: None when the bytes are no message; then `problem` says why, for people, and `raw`
            keeps what came (or its beginning, when it was too long to keep).
        topic: where it came from; consumers of this topic hear of a problem.
        tag: the source's own handle, for nobody else.
        redelivered: the broker says that an earlier delivery was not acknowledged.
    """

    message: Message[Any] | None
    topic: str
    tag: Any = None
    problem: str | None = None
    raw: bytes = b""
    redelivered: bool = False

    @property
    def size_bytes(self) -> int:
        """What it weighs against the bound on deliveries in flight."""
        return len((self.message.payload or b"") if self.message is not None else self.raw)


class Progress(Protocol):
    """Where a source without a broker keeps how far it has come: a row in the database.

    Only one process at a time holds it, for a few seconds after each `acquire`. Every method raises
    StoreError; `load` reads what was saved last, by whomever.
    """

    @property
    def lease_s(self) -> float:
        """Seconds for which `acquire` holds."""
        ...

    def acquire(self) -> bool:
        """Take or renew the lease; False while another process holds it."""
        ...

    def load(self) -> str | None: ...
    def save(self, state: str) -> bool:
        """Store the state; False when the lease was lost, and nothing was stored."""
        ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Anchor:
    """Up to where the work of one partition is in the database, and which database said so.

    Args:
        position: everything below it is committed there; None when no position is stored.
        history: another text when commits may be missing although the position is not: another
            server, or a database that was started again or restored.
    """

    position: int | None
    history: str

    def is_missing_in(self, later: Anchor) -> bool:
        """Say whether the database may have lost what was committed since this was read."""
        if self.history != later.history:
            return True
        return self.position is not None and (
            later.position is None or later.position < self.position
        )


class Anchors(Protocol):
    """Positions kept in the database; any process may read and advance them. Raises StoreError.

    Guarantee: a stored position never goes back, but with the whole database.
    """

    def read(self, names: Sequence[str]) -> Mapping[str, Anchor]:
        """Return the anchor of every name."""
        ...

    def advance(self, moves: Mapping[str, tuple[int, Anchor]]) -> Mapping[str, Anchor]:
        """Store positions in a transaction of their own; returns the anchors as they are then.

        Args:
            moves: name → the new position, and the anchor as it was known before what lies between
                was committed. Where that anchor is missing in the database, nothing is stored.
        """
        ...


@runtime_checkable
class Anchored(Protocol):
    """A Progress that keeps anchors, too; that of a worker does."""

    @property
    def anchors(self) -> Anchors: ...


class InFlight(Protocol):
    """The deliveries that a source has handed out and that are not settled yet; and who hears of them."""

    def settled(self, among: Callable[[Delivery], bool], within_s: float) -> Sequence[Delivery]:
        """Wait until all in-flight deliveries that match are done, at most so long; returns the done.

        For a source that is about to lose them (a partition revoked): what is returned is for the
        source to acknowledge now, `settle` will not be called for it.
        """
        ...

    def report(self, event: Event) -> None:
        """Tell the app's observers what only the source can see, such as `MessagesLost`."""
        ...


class Source(Protocol):
    """Where deliveries come from. All methods are called from one thread, the source's own.

    `receive`, `tend` and `settle` may raise BrokerUnavailable, or the StoreError of their progress:
    they are called again later. Any other exception stops the worker.

    Guarantee: a delivery that was not settled comes again after a crash.
    """

    @property
    def name(self) -> str:
        """The source for people and metrics, stable across restarts; its progress is kept under it."""
        ...

    @property
    def topics(self) -> Sequence[str] | None:
        """The only topics it can deliver; None when it delivers those it is asked for."""
        ...

    @property
    def exhausted(self) -> bool:
        """True when nothing more will ever come; a source that follows is never exhausted."""
        ...

    @property
    def tend_every_s(self) -> float | None:
        """How often `tend` must be called at least; None for a source that needs none."""
        ...

    @property
    def redelivery_s(self) -> float | None:
        """After how long the broker gives an unsettled delivery to another; None when never, or not known yet.

        Where `tend_every_s` is a number, the time without `tend`; else the time since the delivery,
        which no run may outlast. Asked before and after `open`.
        """
        ...

    def keeps_order(self, topic: str) -> bool:
        """Say whether the messages of a key come to one consumer at a time, in their order (SEMANTICS 5.1)."""
        ...

    def open(self, topics: Sequence[str], progress: Progress, in_flight: InFlight) -> None:
        """Connect or look, without waiting for messages.

        Args:
            topics: what to deliver; "*" means all there is. A source with one stream of its own
                may ignore it.
            progress: for a source without a broker that remembers.
            in_flight: for a source that can lose what it has handed out.

        Raises:
            ConfigurationError: it can never work like this.
        """
        ...

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        """Return what is there, up to `messages_max`; wait at most `wait_s` seconds for the first.

        The first `messages_max` is the most that will ever be in flight. While deliveries are in flight
        `wait_s` is zero, and the call comes up to 2,000 times a second.
        """
        ...

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        """Keep what is in flight ours, without receiving: extend it, stay a member of the group.

        Called while handlers run longer, or the database is away longer, than the broker waits.
        """
        ...

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge deliveries, in any order; a source with a cursor moves it over the gapless front only.

        Raises:
            BrokerError: `failed` of them are not acknowledged and come again.
        """
        ...

    def close(self) -> None:
        """Give everything back; what was not settled stays for the next who opens it."""
        ...


class Publisher(Protocol):
    """Where staged messages leave. All methods are called from one thread, the relay's own.

    Guarantee: a message that `publish` reported as confirmed survives a restart of the broker, as
    far as the broker's own settings for durability go; anything else is sent again under the same id.
    """

    @property
    def name(self) -> str:
        """The publisher for people and metrics."""
        ...

    @property
    def event_prefix(self) -> str:
        """What the transport binding of CloudEvents puts before an attribute in a header: "ce_", "ce-"…"""
        ...

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        """Send messages and wait for the broker's confirmation of each; connects when it must.

        Args:
            messages: with `id`, `topic`, `payload`, `headers` and, where known, `type`, `key`,
                `content_type` and `time`. The id leaves as `message-id`, natively where the broker
                has such a property and as a header else.
            within_s: what has not been confirmed by then is an error.

        Returns: for each message None when the broker has confirmed it; MessageRefused when it can
            never take it; another BrokerError when it has not confirmed it this time.

        Raises:
            BrokerUnavailable: the broker cannot be reached; nothing is known of any of them.
        """
        ...

    def close(self) -> None:
        """Give connections back. Nothing is pending: `publish` waits for every answer."""
        ...


class Destination(Protocol):
    """What `App.publish` takes: a broker that messages can be sent to."""

    def publisher(self) -> Publisher:
        """Make a publisher with connections of its own; does no I/O.

        Raises:
            ConfigurationError: an option with which a confirmation would not mean that it is kept.
        """
        ...
