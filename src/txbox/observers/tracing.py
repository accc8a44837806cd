"""Spans of OpenTelemetry for what is staged, sent and processed, in the trace of the message itself.

Names and attributes are those of the semantic conventions for messaging, version 1.37 and later.
Source: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from txbox import events
from txbox.errors import installed
from txbox.events import Event
from txbox.message import HeaderValue, Message

with installed("otel", "Tracing"):
    from opentelemetry import context as contexts
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import Getter
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

F = TypeVar("F", bound=Callable[..., Any])

#: Outcomes; each ends the span of its message.
_ENDS = (
    events.MessageProcessed, events.MessageFailed, events.MessageDead, events.MessageDuplicate,
    events.MessageDeferred, events.MessageQuarantined,
)  # fmt: skip
# some spans never get an outcome: the connection was lost, and another process took the message
_OPEN_MAX = 10_000
#: Systems that the conventions call by another name.
_SYSTEMS = {"sqs": "aws_sqs"}


class _Headers(Getter[Message[Any]]):
    """Reads the context that a message carries."""

    def get(self, carrier: Message[Any], key: str) -> list[str] | None:
        value = carrier.headers.text(key)
        return None if value is None else [value]

    def keys(self, carrier: Message[Any]) -> list[str]:
        return [*carrier.headers.names()]


_HEADERS = _Headers()


class Tracing:
    """For App(tracing=…) and Outbox(tracing=…).

    Args:
        provider: where spans go; None means the program's global provider.

    `create <topic>` is the staging of a message, whose context the message carries from then on; `send <topic>`
    is one attempt of a relay; `process <topic>` is one run of a handler, with its outcome. All belong to the trace
    the message came with, so one trace shows the whole chain with its retries. Attributes never contain payloads,
    headers or error texts.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("txbox", tracer_provider=provider)
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, str], Span] = OrderedDict()

    # -- staging ------------------------------------------------------------------------------

    def created(
        self,
        headers: dict[str, HeaderValue],
        topic: str,
        message_id: str,
        cause: Message[Any] | None,
    ) -> None:
        """Record a staged message, and add its trace context to `headers`."""
        current = trace.get_current_span().get_span_context()
        context, links = contexts.get_current(), list[Link]()
        caused = None if cause is None else _carried(cause)
        if caused is not None and _span_context(caused).is_valid:
            if not current.is_valid:
                context = caused
            elif _span_context(caused).trace_id != current.trace_id:
                # a batch has a span of its own; each message stays in the trace of its cause
                context, links = caused, [Link(current)]
        span = self._tracer.start_span(
            f"create {topic}",
            context,
            SpanKind.PRODUCER,
            _attributes("create", "txbox", topic, message_id),
            links,
        )
        propagate.inject(headers, trace.set_span_in_context(span, context))
        span.end()

    # -- sending ------------------------------------------------------------------------------

    def sent(
        self,
        publisher: str,
        messages: Iterable[Message[Any]],
        answers: Iterable[BaseException | None],
        began_ns: int,
    ) -> None:
        """Record what a publisher answered for each message.

        Args:
            publisher: its name, which begins with its kind.
            began_ns: by `time.time_ns`.
        """
        system = _system(publisher)
        for message, answer in zip(messages, answers, strict=True):
            context = _carried(message)
            span = self._tracer.start_span(
                f"send {message.topic}",
                context,
                # not PRODUCER: the message carries the context of its creation
                SpanKind.CLIENT,
                _attributes("send", system, message.topic, str(message.id)),
                _links([context]),
                began_ns,
            )
            if answer is not None:
                _failed(span, type(answer).__qualname__)
            span.end()

    # -- processing ---------------------------------------------------------------------------

    def traced(self, function: F, consumer: str, *, is_async: bool) -> F:
        """Wrap a handler so that each run has a span, which is current during the run."""

        def call(argument: Any, *tx: Any) -> Any:
            with self._processing(consumer, argument):
                return function(argument, *tx)

        async def call_async(argument: Any, *tx: Any) -> Any:
            with self._processing(consumer, argument):
                return await function(argument, *tx)

        return cast("F", functools.wraps(function)(call_async if is_async else call))

    @contextmanager
    def _processing(
        self, consumer: str, argument: Message[Any] | list[Message[Any]]
    ) -> Generator[None]:
        messages = argument if isinstance(argument, list) else [argument]
        first = messages[0]
        carried = [_carried(message) for message in messages]
        context = contexts.get_current()
        attributes = _attributes("process", _system(first.origin.get("source")), first.topic)
        if isinstance(argument, list):
            attributes["messaging.batch.message_count"] = len(messages)
        else:
            attributes["messaging.message.id"] = str(first.id)
            attributes["txbox.attempt"] = first.attempt
            if not _span_context(context).is_valid:
                # no span around it, as in a worker: continue the trace of the message
                context = carried[0]
        attributes["messaging.consumer.group.name"] = consumer
        span = self._tracer.start_span(
            f"process {first.topic}", context, SpanKind.CONSUMER, attributes, _links(carried)
        )
        self._opened(span, [(consumer, str(message.id)) for message in messages])
        token = contexts.attach(trace.set_span_in_context(span, context))
        try:
            yield
        except BaseException as error:
            # a failed run ends here; `around` then only makes its span current
            _failed(span, type(error).__qualname__)
            span.end()
            raise
        finally:
            contexts.detach(token)

    def _opened(self, span: Span, keys: Sequence[tuple[str, str]]) -> None:
        with self._lock:
            # earlier runs that were rolled back because of a neighbour or a conflict
            over = [self._open.pop(key, None) for key in keys]
            self._open.update(dict.fromkeys(keys, span))
            while len(self._open) > _OPEN_MAX:
                over.append(self._open.popitem(last=False)[1])
        for earlier in over:
            if earlier is not None:
                earlier.end()

    @contextmanager
    def around(self, event: Event) -> Generator[None]:
        """Make the span of an event's message current, and end it with the outcome."""
        span = None
        if isinstance(event, _ENDS):
            with self._lock:
                span = self._open.pop((event.consumer or "", event.message_id or ""), None)
        if span is None:
            yield
            return
        if span.is_recording():
            outcome = type(event).__name__.removeprefix("Message").lower()
            span.set_attribute("txbox.outcome", outcome)
            if isinstance(event, (events.MessageFailed, events.MessageDead)):
                _failed(span, event.error_type)
            span.end()
        with trace.use_span(span):
            yield


def _carried(message: Message[Any]) -> Context:
    """Return the trace context a message carries: that of its creation."""
    return propagate.extract(message, Context(), _HEADERS)


def _span_context(context: Context) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()


def _links(carried: Iterable[Context]) -> list[Link]:
    contexts = (_span_context(context) for context in carried)
    return [Link(context) for context in contexts if context.is_valid]


def _attributes(
    operation: str, system: str, topic: str, message_id: str | None = None
) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.system": system,
        "messaging.destination.name": topic,
    }
    if message_id is not None:
        attributes["messaging.message.id"] = message_id
    return attributes


def _system(name: object) -> str:
    """Return the system from the name of a source or publisher, such as kafka:localhost:9092; without one, txbox."""
    kind = str(name or "txbox").partition(":")[0]
    return _SYSTEMS.get(kind, kind)


def _failed(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", error_type)
    # the text of an error may quote a payload
    span.set_status(Status(StatusCode.ERROR))
