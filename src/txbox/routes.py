"""Routes: where staged messages go, by topic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from txbox.brokers.base import Destination
from txbox.brokers.local import Local
from txbox.errors import ConfigurationError

CloudEvents = Literal["binary", "structured"]
_ALL = "*"


@dataclass(frozen=True, slots=True)
class Route:
    """Messages of some topics go to one destination.

    Args:
        destination: None for the consumers of this app itself.
        topics: with `others`, those that go elsewhere.
        others: every topic but `topics`.
        cloudevents: how a message is wrapped; None leaves it as it was staged.
        source: the CloudEvents source.
    """

    destination: Destination | None
    topics: tuple[str, ...]
    others: bool = False
    cloudevents: CloudEvents | None = None
    source: str | None = None


class Routes:
    """The destinations of one app; a topic goes to one of them.

    Args:
        consumed: says whether a handler of this app consumes a topic.
    """

    def __init__(self, consumed: Callable[[str], bool]) -> None:
        self._consumed = consumed
        self._named: list[Route] = []
        self._others: Route | None = None

    def __len__(self) -> int:
        return len(self._named) + (self._others is not None)

    def add(
        self,
        destination: Destination | Local,
        topics: Iterable[str] | None,
        cloudevents: CloudEvents | None,
        source: str | None,
    ) -> None:
        """Send topics to a destination; None or "*" sends every topic that no other route names.

        Raises:
            ConfigurationError: a topic has a destination already, or an option is out of range.
        """
        if cloudevents not in (None, "binary", "structured"):
            raise ConfigurationError(
                f"cloudevents is {cloudevents!r}: use 'binary', 'structured' or leave it out."
            )
        if (cloudevents is None) != (source is None):
            raise ConfigurationError(
                "cloudevents= and source= go together: a CloudEvent names the service it comes from."
            )
        named = (_ALL,) if topics is None else tuple(topics)
        if not named:
            raise ConfigurationError("app.publish got no topics: name them, or leave topics out.")
        target = None if isinstance(destination, Local) else destination
        if _ALL in named:
            if self._others is not None:
                raise ConfigurationError(
                    "Two destinations take every topic: name the topics of one of them."
                )
            self._others = Route(target, (), True, cloudevents, source)
        own = tuple(topic for topic in named if topic != _ALL)
        for topic in own:
            if any(topic in other.topics for other in self._named):
                raise ConfigurationError(f"Topic {topic!r} has two destinations: name it once.")
        if own:
            self._named.append(Route(target, own, False, cloudevents, source))

    def knows(self, topic: str) -> bool:
        """Say whether a topic has somewhere to go."""
        return (
            self._others is not None
            or any(topic in route.topics for route in self._named)
            or self._consumed(topic)
        )

    def all(self) -> list[Route]:
        """Return every route; what nobody publishes goes to the consumers of this app itself."""
        named = tuple(topic for route in self._named for topic in route.topics)
        others = self._others or Route(None, (), True)
        last = Route(others.destination, named, True, others.cloudevents, others.source)
        return [*self._named, last]
