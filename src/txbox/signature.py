"""The signature of a handler: what it takes, its colour, and the body that its annotation asks for."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from txbox.errors import ConfigurationError
from txbox.message import Message


def check_signature(function: Callable[..., Any], *, batch: bool, transactional: bool) -> None:
    """Check that a handler can be called as its options say.

    Raises:
        ConfigurationError: it is no function, a generator, or takes other arguments.
    """
    if not callable(function):
        raise ConfigurationError(f"A handler must be a function, got {type(function).__name__}.")
    bare = inspect.unwrap(function)
    if inspect.isgeneratorfunction(bare) or inspect.isasyncgenfunction(bare):
        raise ConfigurationError(f"{function!r} is a generator: a handler must return, not yield.")
    wanted = 2 if transactional else 1
    shape = "(message, tx)" if transactional else "(message)"
    if batch:
        shape = shape.replace("message", "messages")
    try:
        inspect.signature(function).bind(*range(wanted))
    except TypeError:
        raise ConfigurationError(
            f"The handler {getattr(function, '__qualname__', function)} must take {shape}, "
            f"but its signature is {inspect.signature(function)}."
        ) from None


def is_async_function(function: Callable[..., Any]) -> bool:
    """Say whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004  # the colour, not whether it can be called
    )


def body_annotation(function: Callable[..., Any], *, batch: bool) -> Any:
    """Return the X of `message: Message[X]` (with `batch`, of `list[Message[X]]`), or Any.

    Raises:
        ConfigurationError: the annotation names what is not there at run time.
    """
    target: Any = inspect.unwrap(function)
    if not (inspect.isfunction(target) or inspect.ismethod(target)):
        # an object with __call__ carries its annotations there
        target = getattr(target.__class__, "__call__", target)  # noqa: B004
    if isinstance(target, functools.partial):
        target = target.func
    parameters = list(inspect.signature(function).parameters)
    try:
        hints: Mapping[str, Any] = typing.get_type_hints(target)
    except NameError:
        # a name that is imported for type checkers only; look at the one annotation that matters
        hints = _own_hint(target, parameters[0])
    hint = hints.get(parameters[0], Any)
    if batch and typing.get_origin(hint) in (list, typing.Sequence):
        (hint,) = typing.get_args(hint) or (Any,)
    if typing.get_origin(hint) is Message:
        return typing.get_args(hint)[0]
    return Any


def _own_hint(target: Any, parameter: str) -> Mapping[str, Any]:
    annotation = getattr(target, "__annotations__", {}).get(parameter, Any)
    if not isinstance(annotation, str):
        return {parameter: annotation}
    scope = {**typing.get_type_hints(Message), **getattr(target, "__globals__", {})}
    try:
        return {parameter: eval(annotation, scope)}  # noqa: S307  # the user's own annotation, as get_type_hints does
    except NameError as error:
        raise ConfigurationError(
            f"The annotation {annotation!r} of {target.__qualname__} names {error.name!r}, which is not there at run "
            "time: import it outside of TYPE_CHECKING."
        ) from error
