"""Routes: where staged messages go, by topic.

Source: docs/decisions/0029-routes-in-rows.md
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from txbox.brokers.base import Destination
from txbox.brokers.local import Local
from txbox.errors import ConfigurationError
from txbox.handlers import Handlers

CloudEvents = Literal["binary", "structured"]
_ALL = "*"
#: Rows for whichever App of the database has a consumer: the App that staged them has none.
LOCAL = "local"
_UNHANDLED = " (no handler)"
_NAME_BYTES = 200
_CONSUMER_BYTES = 60


@dataclass(frozen=True, slots=True)
class Route:
    """Messages of some topics go to one destination.

    Args:
        destination: None for the consumers of this app itself.
        topics: with `others`, those that go elsewhere. To the consumers of the app itself everything
            goes that was staged for them: there they say what is taken that was staged without a route.
        others: every topic but `topics`.
        cloudevents: how a message is wrapped; None leaves it as it was staged.
        source: the CloudEvents source.
        name: what the rows that go this way have in their column `route`.
    """

    destination: Destination | None
    topics: tuple[str, ...]
    others: bool = False
    cloudevents: CloudEvents | None = None
    source: str | None = None
    name: str = LOCAL

    def names(self, topic: str) -> bool:
        """Say whether a topic is one of its own."""
        return (topic in self.topics) is not self.others


@dataclass(frozen=True, slots=True)
class _Published:
    destination: Destination | Local
    topics: tuple[str, ...]
    others: bool
    cloudevents: CloudEvents | None
    source: str | None
    name: str | None


class Routes:
    """The destinations of one app; a topic goes to one of them.

    Args:
        arrives: says whether a topic comes from a broker that this app consumes.
    """

    def __init__(self, handlers: Handlers, arrives: Callable[[str], bool]) -> None:
        self._handlers = handlers
        self._arrives = arrives
        self._named: list[_Published] = []
        self._others: _Published | None = None
        self._names: dict[_Published, str] = {}
        self._local = (0, LOCAL)

    def add(
        self,
        destination: Destination | Local,
        topics: Iterable[str] | None,
        cloudevents: CloudEvents | None,
        source: str | None,
        name: str | None = None,
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
        if name is not None:
            _check_name(name, destination)
        named = (_ALL,) if topics is None else tuple(topics)
        if not named:
            raise ConfigurationError("app.publish got no topics: name them, or leave topics out.")
        if _ALL in named:
            if self._others is not None:
                raise ConfigurationError(
                    "Two destinations take every topic: name the topics of one of them."
                )
            self._others = _Published(destination, (), True, cloudevents, source, name)
        listed = tuple(topic for topic in named if topic != _ALL)
        for topic in listed:
            if any(topic in other.topics for other in self._named):
                raise ConfigurationError(f"Topic {topic!r} has two destinations: name it once.")
        if listed:
            self._named.append(_Published(destination, listed, False, cloudevents, source, name))

    def of(self, topic: str, kind: str | None) -> str | None:
        """The name of the route that a message takes; None when it has nowhere to go."""
        published = self._published(topic)
        if published is not None and not isinstance(published.destination, Local):
            return self._name(published)
        if self._handlers.matching(topic, kind):
            return self.local
        if self._handlers.consumes(topic):
            return self.local + _UNHANDLED
        return None if published is None else LOCAL

    def all(self) -> list[Route]:
        """Return the routes that a relay of this app serves."""
        routes = [
            Route(
                published.destination,
                published.topics,
                False,
                published.cloudevents,
                published.source,
                self._name(published),
            )
            for published in self._named
            if not isinstance(published.destination, Local)
        ]
        others = self._others
        if others is not None and not isinstance(others.destination, Local):
            routes.append(
                Route(
                    others.destination, self._named_topics(), True, others.cloudevents,
                    others.source, self._name(others),
                )
            )  # fmt: skip
        if any(self._is_local(topic) for topic in self._consumed()):
            routes.append(self._local_route())
        return routes

    @property
    def local(self) -> str:
        """The route of what goes to this app's own consumers: named by them, which no other App has."""
        count, name = self._local
        if count != len(self._handlers):
            name = _within(
                ",".join(sorted(_short(consumer) for consumer in self._handlers.consumers()))
            )
            self._local = (len(self._handlers), name)
        return name

    def adopts(self, route: str, topic: str, kind: str | None, cause_consumer: str | None) -> bool:
        """Say whether rows that are on no route of this app are for its own consumers.

        They are when they were staged for one of these consumers, by a release that had others beside
        it or had no handler for them; or by a handler of this app, before rows had a route; or for
        whoever consumes them, and their topic does not come to this app from a broker too.
        """
        consumers = self._handlers.consumers()
        if not self._handlers.matching(topic, kind):
            return False
        if route == LOCAL:
            return not self._arrives(topic)
        if not route:
            return cause_consumer in consumers and self.of(topic, kind) == self.local
        named = route.removesuffix(_UNHANDLED).removeprefix(f"{LOCAL}:").split(",")
        return not {_short(consumer) for consumer in consumers}.isdisjoint(named)

    def _published(self, topic: str) -> _Published | None:
        for published in self._named:
            if topic in published.topics:
                return published
        return self._others

    def _named_topics(self) -> tuple[str, ...]:
        return tuple(topic for published in self._named for topic in published.topics)

    def _consumed(self) -> list[str]:
        """The topics that handlers name, and those that only this app's routes name."""
        named = (topic for topic in self._named_topics() if self._handlers.consumes(topic))
        return list(dict.fromkeys((*self._handlers.topics(), *named)))

    def _is_local(self, topic: str) -> bool:
        published = self._published(topic)
        return published is None or isinstance(published.destination, Local)

    def _takes_unrouted(self, topic: str) -> bool:
        """Nobody said where these rows go: what also comes from a broker may have been meant for that."""
        return self._is_local(topic) and (
            self._published(topic) is not None or not self._arrives(topic)
        )

    def _local_route(self) -> Route:
        topics = self._consumed()
        if _ALL in topics and self._takes_unrouted(_ALL):
            left = (topic for topic in topics if topic != _ALL and not self._takes_unrouted(topic))
            return Route(None, tuple(left), others=True, name=self.local)
        taken = (topic for topic in topics if topic != _ALL and self._takes_unrouted(topic))
        return Route(None, tuple(taken), name=self.local)

    def _name(self, published: _Published) -> str:
        if published.name is not None:
            return published.name
        found = self._names.get(published)
        if found is None:
            assert not isinstance(published.destination, Local)
            kind, colon, where = published.destination.publisher().name.partition(":")
            # the hosts of a cluster in any order
            found = kind + colon + ",".join(sorted(where.split(",")))
            if published.cloudevents is not None:
                found = f"{found} {published.cloudevents} {published.source}"
            self._names[published] = found = _bounded(found)
        return found


def _check_name(name: str, destination: Destination | Local) -> None:
    if isinstance(destination, Local):
        raise ConfigurationError("name= is for brokers: the route of Local is that of the App.")
    if not name or len(name.encode()) > _NAME_BYTES or name.startswith(LOCAL):
        raise ConfigurationError(
            f"name is {name!r}: use a text of 1 to {_NAME_BYTES} bytes that does not begin with {LOCAL!r}."
        )


def _short(consumer: str) -> str:
    """A consumer within a route's name."""
    plain = consumer.isascii() and consumer.isprintable() and not set(consumer) & {",", " "}
    if plain and len(consumer) <= _CONSUMER_BYTES:
        return consumer
    return hashlib.sha256(consumer.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def _within(consumers: str) -> str:
    """The route's name with as many of the consumers as fit: each of them is enough to know the App by."""
    if not consumers:
        return LOCAL
    name = f"{LOCAL}:{consumers}"
    return name if len(name) <= _NAME_BYTES else name[: _NAME_BYTES + 1].rpartition(",")[0]


def _bounded(name: str) -> str:
    found = name.encode("utf-8", "surrogatepass")
    if len(found) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(found).hexdigest()[:16]
    return f"{found[: _NAME_BYTES - 17].decode('utf-8', 'ignore')} {digest}"
