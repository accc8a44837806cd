"""Decoding a payload into what a handler's annotation asks for."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, cast

from txbox.errors import ConfigurationError
from txbox.message import Message, parsed

Decoder = Callable[[Message[Any]], Any]


def decoder_for(annotation: Any) -> Decoder:
    """Return the decoder for the `X` of `Message[X]`.

    Understood: bytes, str, dict, list and other JSON types, dataclasses, pydantic models (and, where pydantic is
    installed, every type it validates), msgspec structs. No annotation: JSON where the payload is JSON,
    else the bytes.

    Raises:
        ConfigurationError: an annotation that nothing installed can decode.
    """
    if annotation is Any or annotation is None or isinstance(annotation, typing.TypeVar):
        return _lenient
    if annotation is bytes:
        return lambda message: message.payload
    if annotation is str:
        return lambda message: (message.payload or b"").decode()
    origin = typing.get_origin(annotation) or annotation
    if origin in (dict, list, int, float, bool, typing.Mapping, object):
        return _json_of(origin)
    structured = _msgspec(annotation) or _pydantic(annotation)
    if structured is not None:
        return structured
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return lambda message: _dataclass(annotation, parsed(message.payload or b"null"))
    raise ConfigurationError(
        f"Message[{annotation!r}] cannot be decoded: use a dataclass, dict, a pydantic model (pip install "
        "'txbox[pydantic]'), a msgspec struct (pip install 'txbox[msgspec]'), or pass decode=."
    )


def _lenient(message: Message[Any]) -> Any:
    payload = message.payload
    if not payload or payload[:1] not in b'{["-0123456789tfn':
        return payload
    try:
        return parsed(payload)
    except ValueError:
        return payload


def _json_of(kind: Any) -> Decoder:
    if not isinstance(kind, type):
        kind = object

    def decode(message: Message[Any]) -> Any:
        value = parsed(message.payload or b"null")
        if not isinstance(value, kind):
            raise TypeError(f"the payload is a JSON {type(value).__name__}, not a {kind.__name__}")
        return value

    return decode


def _msgspec(annotation: Any) -> Decoder | None:
    msgspec = sys.modules.get("msgspec")
    # a struct can only exist where msgspec has been imported
    if msgspec is None or not (
        isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)
    ):
        return None
    decode = msgspec.json.Decoder(annotation).decode
    return lambda message: decode(message.payload or b"null")


def _pydantic(annotation: Any) -> Decoder | None:
    if "pydantic" not in sys.modules and dataclasses.is_dataclass(annotation):
        return None
    try:
        from pydantic import TypeAdapter
    except ModuleNotFoundError:
        return None
    adapter = TypeAdapter(annotation)
    return lambda message: adapter.validate_json(message.payload or b"null")


def _dataclass(kind: Any, value: object) -> Any:
    """Build a dataclass from JSON, nested dataclasses and lists of them included; unknown fields are ignored."""
    if not isinstance(value, dict):
        raise TypeError(
            f"the payload is a JSON {type(value).__name__}, not an object for {kind.__name__}"
        )
    fields = cast("dict[str, Any]", value)
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(
        **{name: _fitted(hints[name], item) for name, item in fields.items() if name in known}
    )


def _fitted(hint: Any, value: object) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _fitted(options[0], value) if len(options) == 1 else value
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value)
    if origin is list and isinstance(value, list):
        (item,) = typing.get_args(hint) or (Any,)
        return [_fitted(item, own) for own in cast("Iterable[object]", value)]
    if isinstance(hint, type) and hint in (int, str, float, bool, dict, list):
        allowed: Any = (int, float) if hint is float else hint
        if not isinstance(value, allowed) or (hint is int and isinstance(value, bool)):
            raise ValueError(f"expected {hint.__name__}, got a JSON {type(value).__name__}")
    return value
