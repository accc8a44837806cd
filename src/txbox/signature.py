"""The signature of a handler: what it takes, its colour, and the body that its annotation asks for."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
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
    _check_places(function, batch=batch, transactional=transactional)


def _check_places(function: Callable[..., Any], *, batch: bool, transactional: bool) -> None:
    """Refuse `(tx, message)`, and a list where one message comes, or the reverse."""
    name = getattr(function, "__qualname__", function)
    first, *others = inspect.signature(function).parameters.values()
    if transactional and others and (_names_message(others[0]) and not _names_message(first)):
        come = "messages come" if batch else "message comes"
        raise ConfigurationError(
            f"The handler {name} takes ({first.name}, {others[0].name}): the {come} first, then the transaction."
        )
    hint = _hints(function, first.name).get(first.name, Any)
    if batch and (hint is Message or typing.get_origin(hint) is Message):
        raise ConfigurationError(
            f"The handler {name} takes one message, but batch=True gives a list: annotate it as list[Message[…]]."
        )
    if not batch and typing.get_origin(hint) in (list, Sequence):
        raise ConfigurationError(
            f"The handler {name} takes a list, but gets one message a call: annotate it as Message[…], "
            "or say batch=True."
        )


def _names_message(parameter: inspect.Parameter) -> bool:
    """Say whether a parameter is a message's or messages', by its annotation, else by its name."""
    if parameter.annotation in (inspect.Parameter.empty, Any, "Any"):
        return parameter.name in ("message", "messages", "msg", "msgs")
    shown = (
        parameter.annotation
        if isinstance(parameter.annotation, str)
        else repr(parameter.annotation)
    )
    return re.search(r"\bMessage\b", shown) is not None


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
    first = next(iter(inspect.signature(function).parameters))
    hint = _hints(function, first).get(first, Any)
    if batch and typing.get_origin(hint) in (list, Sequence):
        (hint,) = typing.get_args(hint) or (Any,)
    if typing.get_origin(hint) is Message:
        return typing.get_args(hint)[0]
    return Any


def _hints(function: Callable[..., Any], parameter: str) -> Mapping[str, Any]:
    """The annotations of a function, as values."""
    target: Any = inspect.unwrap(function)
    if not (inspect.isfunction(target) or inspect.ismethod(target)):
        # an object with __call__ carries its annotations there
        target = getattr(target.__class__, "__call__", target)  # noqa: B004
    if isinstance(target, functools.partial):
        target = target.func
    try:
        return typing.get_type_hints(target)
    except NameError:
        # a name that is imported for type checkers only; look at the one annotation that matters
        return _hint(target, parameter)


def _hint(target: Any, parameter: str) -> Mapping[str, Any]:
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
