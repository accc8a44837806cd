"""Decodes payloads into what a handler's annotation asks for, and encodes what a program sends."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, cast
from uuid import UUID

from txbox.errors import ConfigurationError
from txbox.message import Message, parsed
from txbox.text import with_article

Decoder = Callable[[Message[Any]], Any]

# the types `as_json` writes as text
_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
    Decimal: Decimal,
}


def decoder_for(annotation: Any) -> Decoder:
    """Return the decoder for the `X` of `Message[X]`.

    Supports bytes, str, dict, list and other JSON types, dataclasses, pydantic models (with pydantic installed,
    every type it validates) and msgspec structs. Without an annotation, a JSON payload is parsed and anything
    else stays bytes.

    Raises:
        ConfigurationError: nothing installed can decode this annotation.
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


# what some programs on Windows write before UTF-8
_BOM = b"\xef\xbb\xbf"


def _content(message: Message[Any]) -> bytes:
    payload = message.payload or b"null"
    return payload.removeprefix(_BOM)


def _lenient(message: Message[Any]) -> Any:
    payload = message.payload
    if not payload or payload.removeprefix(_BOM)[:1] not in b'{["-0123456789tfn':
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
            raise TypeError(
                f"the payload is a JSON {type(value).__name__}, not {with_article(kind.__name__)}"
            )
        return value

    return decode


def _msgspec(annotation: Any) -> Decoder | None:
    msgspec = sys.modules.get("msgspec")
    # a struct can only exist if msgspec has been imported
    if msgspec is None or not (
        isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)
    ):
        return None
    decode = msgspec.json.Decoder(annotation).decode
    return lambda message: decode(_content(message))


def _pydantic(annotation: Any) -> Decoder | None:
    if "pydantic" not in sys.modules and dataclasses.is_dataclass(annotation):
        return None
    try:
        from pydantic import TypeAdapter
    except ModuleNotFoundError:
        return None
    adapter = TypeAdapter(annotation)
    return lambda message: adapter.validate_json(_content(message))


def _dataclass(kind: Any, value: object) -> Any:
    """Build a dataclass from JSON, including nested dataclasses and lists of them; ignore unknown fields."""
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
        return [_fitted(item, entry) for entry in cast("Iterable[object]", value)]
    if isinstance(hint, type) and hint in _FROM_TEXT and isinstance(value, str):
        return _FROM_TEXT[hint](value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if isinstance(hint, type) and hint in (int, str, float, bool, dict, list):
        allowed: Any = (int, float) if hint is float else hint
        if not isinstance(value, allowed) or (hint is int and isinstance(value, bool)):
            raise ValueError(f"expected {hint.__name__}, got a JSON {type(value).__name__}")
    return value


def as_json(value: object, *, sort_keys: bool = False) -> bytes:
    """Return a value as JSON.

    Besides JSON's own types it accepts datetime, date and time (ISO 8601), timedelta (seconds), UUID and Decimal
    (as text, so no digit is lost), enums (their value), sets, dataclasses, pydantic models and msgspec structs.

    Raises:
        TypeError: it contains anything else.
        ValueError: it contains a number JSON cannot express (NaN, infinity).
    """
    return (_sorted if sort_keys else _encoder).encode(value).encode()


def _plain(value: object) -> object:
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case UUID() | Decimal():
            return str(value)
        case Enum():
            return value.value
        case set() | frozenset():
            return list(cast("Iterable[object]", value))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        case _:
            return _modelled(value)


def _modelled(value: Any) -> object:
    # a model or a struct can only exist if its library has been imported
    pydantic: Any = sys.modules.get("pydantic")
    msgspec: Any = sys.modules.get("msgspec")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if msgspec is not None and isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    raise TypeError(
        f"This {type(value).__module__}.{type(value).__qualname__} cannot be written as JSON: stage bytes, JSON's own "
        "types, datetimes, UUIDs, Decimals, enums, dataclasses, pydantic models or msgspec structs."
    )


# made once: json.dumps makes one for every call
_encoder, _sorted = (
    json.JSONEncoder(separators=(",", ":"), default=_plain, allow_nan=False, sort_keys=sort_keys)
    for sort_keys in (False, True)
)
