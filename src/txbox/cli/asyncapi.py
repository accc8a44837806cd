"""asyncapi: describe what the App receives and sends, as an AsyncAPI 3.0 document.

Source: https://www.asyncapi.com/docs/reference/specification/v3.0.0
"""

from __future__ import annotations

import argparse
import re
import sys
import typing
from inspect import getdoc, unwrap
from typing import Any, cast

from txbox.app import App
from txbox.cli import add_command
from txbox.cli.options import add_options, opened
from txbox.cli.output import print_json
from txbox.handlers import Handler
from txbox.identity import EFFECT_PREFIX
from txbox.message import Message

_SCHEMAS = "#/components/schemas/"
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9._-]+")
_PLAIN: dict[Any, dict[str, Any]] = {
    dict: {"type": "object"},
    list: {"type": "array"},
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    command = add_command(commands, "asyncapi", _asyncapi, common)
    add_options(command, {"path MODULE:APP": "instead of --app"}, nargs="?")
    add_options(
        command,
        {
            "--title TEXT": "the title of the service (default: MODULE:APP)",
            "--service-version VERSION": "the version of the service (default 0)",
        },
    )
    command.set_defaults(service_version="0")


def _asyncapi(args: argparse.Namespace) -> int:
    """Prints an AsyncAPI 3.0 document in JSON: a channel for each topic, the handlers that receive from it, with
    the schemas of their bodies, and what the App publishes. It connects to nothing.
    """
    with opened(args, handlers="describes handlers") as app:
        print_json(document(app, title=args.title or args.app, version=args.service_version))
    return 0


def document(app: App, *, title: str, version: str) -> dict[str, Any]:
    """Return the document, ready for `json.dumps`; without I/O, and without any address or credential.

    A topic is a channel, a handler an operation that receives from it, and each topic of `app.publish`, a
    `reply_to=` or a `dead_letter_topic=` one that sends. A body's schema comes from the handler's annotation where
    pydantic or msgspec can tell it. Effects are no messages of a broker, and left out.

    Args:
        title, version: of the service, for its readers.
    """
    return _Document(title, version).of(app)


class _Document:
    def __init__(self, title: str, version: str) -> None:
        self._info = {"title": title, "version": version}
        self._channels: dict[str, dict[str, Any]] = {}
        self._operations: dict[str, dict[str, Any]] = {}
        self._schemas: dict[str, Any] = {}
        self._keys: dict[tuple[str, str], str] = {}

    def of(self, app: App) -> dict[str, Any]:
        for handler in app.handlers:
            if handler.topic.startswith(EFFECT_PREFIX):
                continue
            self._receive(handler)
            for topic in (handler.options.reply_to, handler.options.dead_letter_topic):
                if isinstance(topic, str):
                    self._send(topic)
        for route in app.routes.all():
            if route.destination is not None and not route.others:
                for topic in route.topics:
                    self._send(topic)
        return {
            "asyncapi": "3.0.0",
            "info": self._info,
            "defaultContentType": "application/json",
            "channels": self._channels,
            "operations": self._operations,
            "components": {"schemas": self._schemas},
        }

    def _receive(self, handler: Handler) -> None:
        channel = self._channel(handler.topic)
        schema = self._schema(_body(handler))
        messages: list[dict[str, str]] = []
        for kind in sorted(handler.types) if handler.types else [None]:
            name = self._key(f"message {channel}", f"{handler.consumer}.{kind or 'any'}")
            self._channels[channel]["messages"][name] = {
                "name": kind or handler.topic,
                "payload": schema or {},  # anything
            }
            messages.append({"$ref": f"#/channels/{channel}/messages/{name}"})
        wanted = f"{handler.consumer}.{handler.topic}"
        wanted += "" if handler.types is None else "." + "-".join(sorted(handler.types))
        said = getdoc(unwrap(handler.function))
        self._operations[self._key("operation", f"receive.{wanted}")] = {
            "action": "receive",
            "channel": {"$ref": f"#/channels/{channel}"},
            "title": handler.consumer,
            **({"description": said} if said else {}),
            "messages": messages,
        }

    def _send(self, topic: str) -> None:
        channel = self._channel(topic)
        self._operations[self._key("operation", f"send.{topic}")] = {
            "action": "send",
            "channel": {"$ref": f"#/channels/{channel}"},
        }

    def _channel(self, topic: str) -> str:
        key = self._key("channel", topic)
        if key not in self._channels:
            # null is a channel whose address is not known: the topic "*"
            self._channels[key] = {"address": None if topic == "*" else topic, "messages": {}}
        return key

    def _key(self, kind: str, name: str) -> str:
        """A name that may be a key and part of a reference; the same for the same name, and for no other."""
        known = self._keys.get((kind, name))
        if known is None:
            plain = wanted = _NOT_IN_KEYS.sub("_", name) or "_"
            others = {key for (other, _), key in self._keys.items() if other == kind}
            count = 2
            while wanted in others:
                wanted, count = f"{plain}_{count}", count + 1
            known = self._keys[kind, name] = wanted
        return known

    def _schema(self, annotation: Any) -> dict[str, Any] | None:
        if annotation in (None, Any, bytes) or isinstance(annotation, typing.TypeVar):
            return None
        schema, below = _described(annotation)
        self._schemas.update(below)
        return schema


def _body(handler: Handler) -> Any:
    """The X of the function's Message[X]; None if it says nothing."""
    try:
        hints = typing.get_type_hints(unwrap(handler.function))
    except (NameError, TypeError):
        return None
    for hint in hints.values():
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
        if typing.get_origin(inner) is Message:
            return typing.get_args(inner)[0]
    return None


def _described(annotation: Any) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the schema of a body, and the named schemas that it refers to."""
    plain = _PLAIN.get(typing.get_origin(annotation) or annotation)
    msgspec = sys.modules.get("msgspec")
    if (
        msgspec is not None
        and isinstance(annotation, type)
        and issubclass(annotation, msgspec.Struct)
    ):
        try:
            (schema,), below = msgspec.json.schema_components(
                [annotation], ref_template=_SCHEMAS + "{name}"
            )
        except (TypeError, NameError):
            # a field whose type has no schema, or is imported for type checkers only
            return None, {}
        return schema, below
    try:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError
    except ModuleNotFoundError:
        return plain, {}
    try:
        schema = TypeAdapter(annotation).json_schema(ref_template=_SCHEMAS + "{model}")
    except PydanticUserError:
        # a type of its own, which has a decode=
        return plain, {}
    below = cast("dict[str, Any]", schema.pop("$defs", {}))
    return schema, below
