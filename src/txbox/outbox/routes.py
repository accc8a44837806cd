"""Routes: which destination a staged message goes to, and which rows this app's own consumers take."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from txbox.brokers.base import Destination
from txbox.brokers.local import Local
from txbox.errors import ConfigurationError
from txbox.handlers import Handlers, check_name, listed
from txbox.identity import EFFECT_PREFIX
from txbox.message import Message

CloudEvents = Literal["binary", "structured"]
_ALL = "*"
#: Rows for whichever App on this database has a consumer; the App that staged them has none.
LOCAL = "local"
_UNHANDLED = " (no handler)"
_NAME_BYTES = 200
# a program may make up its topics
_ROUTES_MAX = 1_000
_CONSUMER_BYTES = 60
# how long the rows of a newer release wait for its relays
_NEWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Route:
    """Sends messages of some topics to one destination.

    Args:
        destination: None for the consumers of this app.
        topics: the topics that take this route; with `others`, the topics that do not. On the route to
            the app's own consumers, these only select which rows staged without a route it takes.
        others: every topic except `topics`.
        cloudevents: how a message is wrapped; None leaves it as it was staged.
        source: the CloudEvents source.
        name: what rows on this route have in their `route` column.
        render: makes what is sent of what was staged.
    """

    destination: Destination | None
    topics: tuple[str, ...]
    others: bool = False
    cloudevents: CloudEvents | None = None
    source: str | None = None
    name: str = LOCAL
    render: Callable[[Message[Any]], Message[Any]] | None = None

    def names(self, topic: str) -> bool:
        """Whether a topic takes this route."""
        return (topic in self.topics) is not self.others


class Routes:
    """The destinations of one app. Each topic goes to exactly one.

    Args:
        arrives: whether a topic comes from a broker that this app consumes.
    """

    def __init__(self, handlers: Handlers, arrives: Callable[[str], bool]) -> None:
        self._handlers = handlers
        self._arrives = arrives
        # as added, with the names that were given
        self._named: list[Route] = []
        self._others: Route | None = None
        self._names: dict[Route, str] = {}
        self._local = (0, LOCAL)
        # topic and type → route, for as long as no handler or destination is added
        self._of: dict[tuple[str, str | None], str | None] = {}
        self._of_handlers = 0

    def add(
        self,
        destination: Destination | Local,
        topics: Iterable[str] | None,
        cloudevents: CloudEvents | None,
        source: str | None,
        name: str | None = None,
        *,
        render: Callable[[Message[Any]], Message[Any]] | None = None,
    ) -> None:
        """Send topics to a destination; None or "*" sends every topic without a route of its own.

        Raises:
            ConfigurationError: a topic already has a destination, or an option is out of range.
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
        route = Route(
            None if isinstance(destination, Local) else destination,
            (), cloudevents=cloudevents, source=source, name=name or "", render=render,
        )  # fmt: skip
        named = (_ALL,) if topics is None else listed("app.publish", topics)
        for topic in named:
            check_name("topic", topic)
        if _ALL in named:
            if self._others is not None:
                raise ConfigurationError(
                    "Two destinations take every topic: name the topics of one of them."
                )
            self._others = replace(route, others=True)
        topics = tuple(topic for topic in named if topic != _ALL)
        for topic in topics:
            if any(topic in other.topics for other in self._named):
                raise ConfigurationError(f"Topic {topic!r} has two destinations: name it once.")
        if topics:
            self._named.append(replace(route, topics=topics))
        self._of.clear()

    def of(self, topic: str, kind: str | None) -> str | None:
        """Return the name of the route a message takes; None if it has nowhere to go."""
        if self._of_handlers != len(self._handlers) or len(self._of) >= _ROUTES_MAX:
            self._of, self._of_handlers = {}, len(self._handlers)
        try:
            return self._of[topic, kind]
        except KeyError:
            return self._of.setdefault((topic, kind), self._route_of(topic, kind))

    def _route_of(self, topic: str, kind: str | None) -> str | None:
        published = self._published(topic)
        if published is not None and published.destination is not None:
            return self._name(published)
        if not self._is_wanted(topic):
            return None
        if self._handlers.matching(topic, kind):
            return self.local
        if self._handlers.consumes(topic):
            return self.local + _UNHANDLED
        return None if published is None else LOCAL

    def all(self) -> list[Route]:
        """Return the routes that this app's relay serves."""
        routes = [*self._named]
        if self._others is not None:
            routes.append(replace(self._others, topics=self._named_topics()))
        routes = [
            replace(route, name=self._name(route))
            for route in routes
            if route.destination is not None
        ]
        if any(self._is_local(topic) for topic in self._consumed()):
            routes.append(self._local_route())
        return routes

    @property
    def local(self) -> str:
        """The route to this app's own consumers. It contains their names, which no other App shares."""
        count, name = self._local
        if count != len(self._handlers):
            name = _within(
                ",".join(sorted(_short(consumer) for consumer in self._handlers.consumers()))
            )
            self._local = (len(self._handlers), name)
        return name

    def adopts_after(
        self, route: str, topic: str, kind: str | None, cause_consumer: str | None
    ) -> float | None:
        """Return for how many seconds rows whose route this app does not know must be due until it takes them.

        Not None in three cases: this app staged the rows for one of these consumers when it had other consumers, or no
        handler for them; or a handler of this app staged them by an Outbox without an App; or any App may consume
        them, and their topic does not also come from a broker.

        Returns: 0.0 takes them before they are due, too. None never takes them.
        """
        consumers = self._handlers.consumers()
        if not self._handlers.matching(topic, kind) or not self._is_wanted(topic):
            return None
        if route == LOCAL:
            return None if self._arrives(topic) else 0.0
        if not route:
            mine = cause_consumer in consumers and self.of(topic, kind) == self.local
            return 0.0 if mine else None
        named = set(route.removesuffix(_UNHANDLED).removeprefix(f"{LOCAL}:").split(","))
        known = named.intersection(_short(consumer) for consumer in consumers)
        if not known:
            return None
        # the others were removed from this app, or are new: then a relay of the next release has them
        return 0.0 if known == named else _NEWER_S

    def _published(self, topic: str) -> Route | None:
        return next((route for route in self._named if topic in route.topics), self._others)

    def _named_topics(self) -> tuple[str, ...]:
        return tuple(topic for published in self._named for topic in published.topics)

    def _consumed(self) -> list[str]:
        """Return the topics that handlers name, plus those that only this app's routes name."""
        named = (topic for topic in self._named_topics() if self._handlers.consumes(topic))
        return [
            topic
            for topic in dict.fromkeys((*self._handlers.topics(), *named))
            if not topic.startswith(EFFECT_PREFIX)
        ]

    def _is_wanted(self, topic: str) -> bool:
        """Whether what is staged for a topic may be meant for this app's handlers: one names it, or a route does.

        Never for an effect: a message's `reply-to` may name any topic, and must not run one.
        A handler of "*" takes what sources bring, and what is published to Local. It is no reason to take what nobody
        publishes: the topic may be misspelt, or another App's.
        """
        if topic.startswith(EFFECT_PREFIX):
            return False
        return self._published(topic) is not None or self._handlers.name(topic)

    def _is_local(self, topic: str) -> bool:
        published = self._published(topic)
        return published is None or published.destination is None

    def _takes_unrouted(self, topic: str) -> bool:
        """Whether to take rows without a route. If the topic also comes from a broker, they may be meant for it."""
        return self._is_local(topic) and (
            self._published(topic) is not None or not self._arrives(topic)
        )

    def _local_route(self) -> Route:
        topics = self._consumed()
        others = _ALL in topics and self._others is not None and self._takes_unrouted(_ALL)
        named = (
            topic for topic in topics if topic != _ALL and self._takes_unrouted(topic) is not others
        )
        return Route(None, tuple(named), others=others, name=self.local)

    def _name(self, route: Route) -> str:
        """Return the name of a route to a broker: the one that was given, or where it leads."""
        if route.name:
            return route.name
        # which topics take it may change with each `add`
        key = replace(route, topics=())
        if key not in self._names:
            assert route.destination is not None
            kind, colon, where = route.destination.publisher().name.partition(":")
            # a cluster's hosts may be listed in any order
            name = kind + colon + ",".join(sorted(where.split(",")))
            if route.cloudevents is not None:
                name = f"{name} {route.cloudevents} {route.source}"
            self._names[key] = _bounded(name)
        return self._names[key]


def _check_name(name: str, destination: Destination | Local) -> None:
    if isinstance(destination, Local):
        raise ConfigurationError("name= is for brokers: Local always uses the App's own route.")
    if not name or len(name.encode()) > _NAME_BYTES or name.startswith(LOCAL):
        raise ConfigurationError(
            f"invalid route name {name!r}: use 1 to {_NAME_BYTES} bytes that do not begin with {LOCAL!r}."
        )


def _short(consumer: str) -> str:
    """A consumer's name as part of a route name."""
    plain = consumer.isascii() and consumer.isprintable() and not set(consumer) & {",", " "}
    if plain and len(consumer) <= _CONSUMER_BYTES:
        return consumer
    return hashlib.sha256(consumer.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def _within(consumers: str) -> str:
    """Return a route name with as many consumers as fit: any one of them identifies the App."""
    if not consumers:
        return LOCAL
    name = f"{LOCAL}:{consumers}"
    return name if len(name) <= _NAME_BYTES else name[: _NAME_BYTES + 1].rpartition(",")[0]


def _bounded(name: str) -> str:
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:16]
    return f"{encoded[: _NAME_BYTES - 17].decode('utf-8', 'ignore')} {digest}"
