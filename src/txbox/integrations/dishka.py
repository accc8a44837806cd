"""dishka: extra parameters of handlers from its container, one request scope for each call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from inspect import Parameter
from typing import Any

from dishka import DEFAULT_COMPONENT, AsyncContainer, Container, DependencyKey
from dishka.integrations.base import default_parse_dependency

from txbox.errors import ConfigurationError
from txbox.handlers import Opened, Resolver
from txbox.message import Message


def resolver(container: Container | AsyncContainer) -> Resolver:
    """`App(…, resolver=resolver(container))`: by plain annotation or FromDishka[…], of any component.

    Each call enters the next scope, REQUEST by default, in the handler's transaction, and closes it before COMMIT. Its
    context has the message as `Message` and the transaction under its classes: a provider that declares them with
    `from_context` makes repositories that write in the handler's transaction. In a batch there is no Message.

    Args:
        container: it stays yours to close. An AsyncContainer is for `async def` handlers only.

    Raises, at registration:
        ConfigurationError: the container has no factory for a parameter.
    """

    def resolve(annotations: Mapping[str, Any], *, is_async: bool, transactional: bool) -> Opened:
        del transactional  # a provider that needs the transaction finds none in its context
        if isinstance(container, AsyncContainer) and not is_async:
            raise ConfigurationError(
                "an AsyncContainer is awaited: make it an `async def` function, or use make_container()."
            )
        keys = {name: _key(hint) for name, hint in annotations.items()}
        for name, key in keys.items():
            if not _provides(container(), key):
                raise ConfigurationError(
                    f"the container has no factory for {name}: {key.type_hint!r}."
                )

        @contextmanager
        def opened(argument: Any, tx: Any) -> Generator[Mapping[str, Any]]:
            assert isinstance(container, Container)
            with container(_context(argument, tx)) as scope:
                yield {name: scope.get(key.type_hint, key.component) for name, key in keys.items()}

        @asynccontextmanager
        async def opened_async(argument: Any, tx: Any) -> AsyncGenerator[Mapping[str, Any]]:
            assert isinstance(container, AsyncContainer)
            async with container(_context(argument, tx)) as scope:
                yield {
                    name: await scope.get(key.type_hint, key.component)
                    for name, key in keys.items()
                }

        return opened_async if isinstance(container, AsyncContainer) else opened

    return resolve


def _key(hint: Any) -> DependencyKey:
    marked = default_parse_dependency(Parameter("_", Parameter.KEYWORD_ONLY), hint)
    return marked or DependencyKey(hint, DEFAULT_COMPONENT)


def _provides(scope: Container | AsyncContainer | None, key: DependencyKey) -> bool:
    while scope is not None:
        if scope.registry.get_factory(key) is not None:
            return True
        scope = scope.parent_container
    return False


def _context(argument: Any, tx: Any) -> dict[Any, Any]:
    # under every class of it: a sessionmaker makes a Session class of its own
    kinds: Sequence[type] = () if tx is None else type(tx).__mro__[:-1]
    context: dict[Any, Any] = dict.fromkeys(kinds, tx)
    if isinstance(argument, Message):
        context[Message] = argument
    return context
