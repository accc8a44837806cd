"""MCP servers of the Python SDK: `once` for a tool, by the idempotency key that its client sends in `_meta`.

The ids of JSON-RPC requests cannot serve: they begin anew in every session, and a client that repeats a call does so in
another one. Both versions of the SDK: FastMCP of mcp 1, MCPServer of mcp 2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

from txbox.app import App
from txbox.boundaries import log
from txbox.connections import is_transient
from txbox.errors import ConfigurationError, PayloadMismatch, redacted
from txbox.handlers import is_async_function
from txbox.integrations import agents

# FastMCP of mcp 1 is MCPServer of mcp 2
_SDK = "mcp.server.mcpserver" if find_spec("mcp.server.mcpserver") else "mcp.server.fastmcp"
Context: Any = import_module(_SDK).Context
ToolError: type[Exception] = import_module(f"{_SDK}.exceptions").ToolError

P = ParamSpec("P")
R = TypeVar("R")

#: The name in `_meta` of a call's key.
KEY = "idempotencyKey"
_CONTEXT = "mcp_context"


def once(
    app: App,
    consumer: str,
    *,
    caller: Callable[[Any], object] | Literal["anonymous"],
    id: Callable[..., str | int] | None = None,  # noqa: A002  # the word of the field
    key: str = KEY,
    **options: Any,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[P, R]]:
    """Run a tool once for each caller and idempotency key: `@server.tool()` on top, then this.

    The client sends a new key with each call, and the same one when it repeats it:
    `session.call_tool("refund", {…}, meta={"idempotencyKey": call_id})`, where `call_id` is the model's id of the call.
    The tool may take the SDK's Context as well.

    Args:
        app, consumer, options: as of `txbox.integrations.agents.once`: `approve=`, `transactional=`, `wait=` and so on.
        caller: a function of the Context that returns the id of the authenticated user, so that nobody gets the answers
            of others; or "anonymous" where everybody may, as with stdio.
        id: the call's id from its arguments, for clients that send no keys; the same for all callers.
        key: another name of the key in `_meta`.

    A call without a key, another call under the key, one that waits, was refused or has failed, and a database that is
    away, are errors of the tool that the model reads.

    Guarantee: that of `txbox.integrations.agents.once`.
    """
    if caller != "anonymous" and not callable(caller):
        raise ConfigurationError(
            "caller= says whose key it is: give a function of the Context that returns the id of the authenticated "
            'user, or "anonymous".'
        )
    ignored: set[str] = set(options.pop("context", ()))

    def decorate(function: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        signature = inspect.signature(function, eval_str=True)
        passed = [
            each.name for each in signature.parameters.values() if _is_context(each.annotation)
        ]
        tool: Any = agents.once(app, consumer, id=id, context=ignored.union(passed), **options)(
            function
        )
        wanted = passed[0] if passed else _CONTEXT

        @contextmanager
        def answering(kwargs: dict[str, Any]) -> Generator[None]:
            context = kwargs[wanted] if passed else kwargs.pop(wanted)
            try:
                if id is not None:
                    yield
                    return
                with agents.run(_run_of(caller, context), call=_key_of(context, key)):
                    yield
            except (
                agents.CallWaiting,
                agents.CallRefused,
                agents.CallFailed,
                PayloadMismatch,
            ) as error:
                raise ToolError(str(error)) from error
            except Exception as error:
                if not is_transient(error):
                    raise
                log.warning(
                    "A call of the tool %s was not answered, because of its database: %s: %s",
                    consumer, type(error).__name__, redacted(str(error)),
                )  # fmt: skip
                raise ToolError(
                    "The database is away or busy. Send the same call again, with the same key: it tells what has "
                    "become of this one."
                ) from error

        if is_async_function(function):

            async def called_async(*args: Any, **kwargs: Any) -> Any:
                with answering(kwargs):
                    return await tool(*args, **kwargs)

            called: Any = called_async
        else:

            def called_sync(*args: Any, **kwargs: Any) -> Any:
                with answering(kwargs):
                    return tool(*args, **kwargs)

            called = called_sync
        _as_seen(called, tool, None if passed else wanted)
        return cast("Callable[P, R]", called)

    return decorate


def _is_context(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Context)


def _run_of(caller: Callable[[Any], object] | str, context: Any) -> str:
    if not callable(caller):
        return caller
    who = caller(context)
    if not agents.is_id(who):
        raise ConfigurationError(
            "caller= returned no id of a user: return a text, number or UUID, and refuse calls that are not "
            "authenticated."
        )
    # nobody can be called anonymous
    return f"user:{who}"


def _key_of(context: Any, name: str) -> str:
    # a model in mcp 1, a dict in mcp 2
    value = dict(context.request_context.meta or {}).get(name)
    if not isinstance(value, str) or not value:
        raise ToolError(
            f"This tool runs once for each call, so it needs a key: send a new text as {name!r} in _meta, and the "
            "same one when the call is repeated. Nothing was done."
        )
    return value


def _as_seen(called: Any, tool: Any, context: str | None) -> None:
    """Give what the SDK inspects the name, signature and annotations of a tool, and the Context that the SDK passes."""
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(called, name, getattr(tool, name))
    signature = inspect.signature(tool)
    hints = dict(tool.__annotations__)
    if context is not None:
        extra = Parameter(context, Parameter.KEYWORD_ONLY, annotation=Context)
        signature = signature.replace(parameters=[*signature.parameters.values(), extra])
        hints[context] = Context
    called.__signature__, called.__annotations__ = signature, hints
