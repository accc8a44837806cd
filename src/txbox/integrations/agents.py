"""Tool calls of agents once: `once` for a function that an agent's loop, its framework or an MCP server calls.

A call claims an inbox row in the transaction of the tool, and what the tool returns is kept in it by the same commit.
An agent that is killed, and runs again, gets the same answers and has no second effect. A call that a person must
approve waits in the quarantine; a worker carries it out once it is accepted.

Source: docs/decisions/0068-tool-calls-once.md
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, make_dataclass
from datetime import timedelta
from functools import partial
from inspect import BoundArguments, Parameter
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, cast
from urllib.parse import quote
from uuid import UUID

from txbox.admin import Admin
from txbox.admin.tables import InboxFilter, QuarantineFilter
from txbox.app import App
from txbox.errors import (
    ConfigurationError,
    MessageInProgress,
    PayloadMismatch,
    TxboxError,
    check_duration,
)
from txbox.handlers import Options, is_async_function
from txbox.handlers.body import as_json, decoder_for
from txbox.identity import TEXT_BYTES_MAX, TOOL_PREFIX, canonical_id
from txbox.inbox import Acceptance, Inbox
from txbox.integrations.once import Body
from txbox.message import Message
from txbox.outcome import Status
from txbox.policy import Limits
from txbox.session import blocking

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: Why a call that waits for a person is in the quarantine.
APPROVAL = "waits for approval"
_LOOKS_S = 0.1, 1.0
_JSON = "application/json"
_A_PERSON, _A_WORKER = "the approval of a person", "a worker to carry it out"


class CallWaiting(TxboxError):
    """The call is not done yet: a person must approve it, a worker carry it out, or it runs elsewhere. Repeat it."""


class CallRefused(TxboxError):
    """A person has refused the call. It did nothing, and neither will its repeats."""


class CallFailed(TxboxError):
    """A worker has given the call up, or its answer is not known any more."""


# -- runs -------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """A run of an agent: its id, and the numbers of its equal calls that were answered or run."""

    id: str
    call: str | None
    numbers: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, digest: str) -> int:
        """Number a call among the equal ones: the lowest that none of them has."""
        with self.lock:
            used = self.numbers.setdefault(digest, set())
            number = next(n for n in range(len(used) + 1) if n not in used)
            used.add(number)
            return number

    def release(self, digest: str, number: int) -> None:
        with self.lock:
            self.numbers[digest].discard(number)


_RUN: ContextVar[_Run | None] = ContextVar("txbox_agent_run", default=None)


@contextmanager
def run(run_id: str | int | UUID, *, call: str | None = None) -> Generator[None]:
    """Say which run of an agent calls tools in this block, in its threads and tasks too.

    Args:
        run_id: of the conversation, ticket or job: the same when the agent is started again.
        call: the model's own id of one call (`tool_call_id`), which is kept with the conversation. Without it, calls
            are told apart by their arguments, and equal ones by their order; so a run that starts again must start
            from its beginning.

    Raises:
        ConfigurationError: an id is empty, or that of the run is of another type.
    """
    if not is_id(run_id) or call == "":
        raise ConfigurationError(
            "run() needs the id of a conversation, ticket or job: a text, number or UUID that stays the same when the "
            "agent is started again; and call= is the model's id of the call."
        )
    token = _RUN.set(_Run(str(run_id), call))
    try:
        yield
    finally:
        _RUN.reset(token)


def is_id(value: object) -> bool:
    """Whether this may be the id of a run or a user: what else has a text may have another one tomorrow."""
    return isinstance(value, str | int | UUID) and not isinstance(value, bool) and value != ""


def _quoted(text: str) -> str:
    """Without blanks and `#`, which separate the parts of an id."""
    return quote(text, safe="@:/+=|,;!$&'()*~", errors="surrogatepass")


@dataclass(frozen=True)
class _Call:
    """One call of a tool.

    Attributes:
        id: as it is stored.
        run: whose it is, for people.
        payload: its arguments as JSON; None if they are no JSON, and not compared.
    """

    id: str
    run: str | None
    arguments: BoundArguments
    payload: bytes | None


# -- tools ------------------------------------------------------------------------------------------


def once(
    app: App,
    consumer: str,
    *,
    id: Callable[..., str | int] | None = None,  # noqa: A002  # the word of the field
    approve: Callable[..., bool] | bool = False,
    transactional: bool = True,
    context: Collection[str] = (),
    wait: timedelta = timedelta(seconds=10),
    **options: Unpack[Options],
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[P, R]]:
    """Run a tool once for each call: below the decorator of an agent's framework, on a `def` or `async def` function.

    The function's first argument is the transaction, a connection or session of the app's kind, which callers do not
    pass and models do not see. Inside, `app.effects.stage(tx, …)` and `app.outbox.stage(tx, …)` leave if it commits.

    Args:
        consumer: of its rows: one for each tool. Keep it stable: under a new name every call runs again.
        id: the call's id from its arguments, such as `lambda order, **_: f"refund-{order}"`, for all runs alike.
            Without it, the call belongs to its `run`.
        approve: whether a person must approve a call, from its arguments; True for all. It waits in the quarantine for
            `txbox quarantine accept` or `discard`, or the dashboard. A worker (`txbox run`) carries it out.
        transactional: False for a tool whose work is a call to another system. The function gets its message in place
            of the transaction, whose `idempotency_key` stays the same; a worker carries it out, at least once.
        context: the names of parameters that the framework fills, which are no arguments: they are neither compared nor
            kept, and what a worker carries out is called without them.
        wait: the longest wait for a person, a worker or the same call elsewhere, before CallWaiting is raised.
        options: of `app.handler`, for what a worker carries out: `retry=`, `timeout=`, `concurrency=`.

    The tool returns its result as JSON can say it, read back as its annotation says: the first call as its repeats.

    Raises, at registration:
        ConfigurationError: the function has no first parameter, or a worker could not call it.

    Raises, in a call:
        CallWaiting, CallRefused, CallFailed: their texts are written for the model.
        PayloadMismatch: the id was used with other arguments. Nothing is kept of this call.
        ConfigurationError: there is no run and no id; or the result, or what must wait, is not JSON.
        StoreError: the database refused, or COMMIT was not answered: the repeat tells.
        whatever the function raises: it is rolled back, so that a repeat runs.

    Guarantee: row, result and what the function wrote are one commit; a repeat has no effect and gets the same result.
    """

    def decorate(function: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        tool = _Tool(
            app, consumer, function, id=id, approve=approve, transactional=transactional, context=context,
            wait=wait, options=options,
        )  # fmt: skip
        return cast("Callable[P, R]", tool.called)

    return decorate


class _Tool:
    """A function that runs once for each call; `called` is what agents call. The arguments are those of `once`."""

    def __init__(
        self,
        app: App,
        consumer: str,
        function: Callable[..., Any],
        *,
        id: Callable[..., str | int] | None,  # noqa: A002
        approve: Callable[..., bool] | bool,
        transactional: bool,
        context: Collection[str],
        wait: timedelta,
        options: Options,
    ) -> None:
        check_duration("wait", wait)
        self._app, self.consumer, self._function = app, consumer, function
        self._is_async = is_async_function(function)
        self._inbox = Inbox(consumer, schema=app.database.schema, codec=app.store.columns.codec)
        self._id, self._approve, self._transactional = id, approve, transactional
        self._context, self._wait_s = frozenset(context), wait.total_seconds()
        self._body = Body(function, self._inbox, is_async=self._is_async)
        #: What agents and their frameworks call, with the signature that they and the model see.
        self.called = self._wrapper()
        self._body.update(self.called)
        signature = self._body.signature
        if unknown := self._context - signature.parameters.keys():
            raise ConfigurationError(
                f"{self.name}: context= names {min(unknown)!r}, which it does not take."
            )
        returned = {"value": signature.return_annotation}
        self._result = _reader("Result", returned, {})
        self._by_worker = not transactional or approve is not False
        if self._by_worker:
            self._register(options)
        elif options:
            raise ConfigurationError(
                f"{self.name}: {min(options)}= is for what a worker carries out, which needs approve= or "
                "transactional=False."
            )
        self._admin = Admin(app)

    @property
    def name(self) -> str:
        return self._body.name

    def _wrapper(self) -> Callable[..., Any]:
        if self._is_async:

            async def called_async(*args: Any, **kwargs: Any) -> Any:
                return await self._called(args, kwargs)

            return called_async

        def called(*args: Any, **kwargs: Any) -> Any:
            return blocking(self._called(args, kwargs))

        return called

    # -- a call -----------------------------------------------------------------------------------

    async def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = self._body.signature.bind(*args, **kwargs)
        payload = self._payload(arguments)
        if self._id is not None:
            chosen = canonical_id(self._id(**_by_name(arguments)))
            return await self._answered(_Call(chosen, None, arguments, payload))
        current = _RUN.get()
        if current is None:
            raise ConfigurationError(
                f"{self.name} was called outside a run, so its call has no id: call it inside `with run(…)` of "
                "txbox.integrations.agents, or give once() an id=."
            )
        if current.call is not None:
            chosen = canonical_id(f"{_quoted(current.id)} {_quoted(current.call)}")
            return await self._answered(_Call(chosen, current.id, arguments, payload))
        if payload is None:
            raise ConfigurationError(
                f"{self.name} was called with what is not JSON, so its call has no id of its own: name what the "
                "framework passes in context=, or give run() the model's call=, or once() an id=."
            )
        digest = hashlib.sha256(self.consumer.encode() + b"\0" + payload).hexdigest()[:32]
        number = current.take(digest)
        try:
            chosen = canonical_id(f"{_quoted(current.id)} #{digest}.{number}")
            return await self._answered(_Call(chosen, current.id, arguments, payload))
        except BaseException:
            # what is not answered yet is the same call when the model tries again
            current.release(digest, number)
            raise

    async def _answered(self, call: _Call) -> Any:
        if not self._by_worker:
            return await self._run(call)
        if call.payload is None:
            raise ConfigurationError(
                f"{self.name} may have to wait, and its arguments are not JSON: name in context= what the framework "
                "passes."
            )
        deadline = time.monotonic() + self._wait_s
        pause_s, longest_s = _LOOKS_S
        while True:
            waits_for = await self._look(call)
            if waits_for == Status.PROCESSED:
                return await self._run(call)
            if waits_for is None and self._needs_approval(call):
                await self._ask(call)
                waits_for = _A_PERSON
            elif waits_for is None and self._transactional:
                return await self._run(call)
            elif waits_for is None:
                await self._store(call)
                waits_for = _A_WORKER
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise CallWaiting(
                    f"{self.name} is not done yet: it waits for {waits_for} ({call.id}). Call it again with the same "
                    "arguments to get its result."
                )
            await self._sleep(min(pause_s, remaining_s))
            pause_s = min(pause_s * 2, longest_s)

    def _needs_approval(self, call: _Call) -> bool:
        if callable(self._approve):
            return bool(self._approve(**_by_name(call.arguments)))
        return self._approve

    async def _look(self, call: _Call) -> str | None:
        """What a call waits for; PROCESSED if there is a result, None if nothing is known of it.

        Raises:
            CallRefused, CallFailed, PayloadMismatch: this is its answer.
        """
        assert call.payload is not None
        hashed = hashlib.sha256(call.payload).hexdigest()
        # first what leads to the other: a call that is accepted in between is seen there
        aside = await self._shown(QuarantineFilter(consumer=self.consumer, message_id=call.id))
        for row in await self._shown(InboxFilter(consumer=self.consumer, message_id=call.id)):
            if row.payload_hash not in (None, hashed):
                raise self._reused(call)
            if row.status == Status.DISCARDED:
                raise self._refused(call)
            if row.status == Status.DEAD:
                raise CallFailed(f"{self.name} failed: {_first_line(row.error)} ({call.id})")
            if row.status == Status.PROCESSED:
                return str(Status.PROCESSED)
            last = f", after this failure: {_first_line(row.error)}" if row.error else ""
            return f"{_A_WORKER}{last}"
        decisions = {row.hash: row.status for row in aside if row.status != "replaced"}
        if decisions and hashed not in decisions:
            raise self._reused(call)
        match decisions.get(hashed):
            case "discarded":
                raise self._refused(call)
            case "accepted":
                raise self._forgotten(call)
            case None:
                return None
            case _:
                return _A_PERSON

    async def _ask(self, call: _Call) -> None:
        """Have the call wait for a person; one that waits already, or is decided, stays as it is."""
        most = Limits().quarantined_bytes
        if len(call.payload or b"") > most:
            raise ConfigurationError(
                f"{self.name}: arguments of more than {most} bytes are not kept whole, so nobody could approve this "
                "call: pass a reference to what is large."
            )
        async with self._transaction() as tx:
            await self._verb("quarantine", tx, self._message(call), reason=APPROVAL)

    async def _store(self, call: _Call) -> None:
        if self._is_async:
            await self._app.send_async(self._message(call))
        else:
            self._app.send(self._message(call))

    async def _run(self, call: _Call) -> Any:
        """Run the tool in its transaction, or return what it returned when it ran."""
        async with self._transaction() as tx:
            accepted = await self._accept(tx, call)
            if not accepted:
                kept = await self._verb("result", tx, accepted)
                if accepted.status != Status.PROCESSED or kept is None:
                    raise self._without_result(call, accepted)
            else:
                if not self._transactional:
                    raise self._forgotten(call)  # pruned a moment ago
                result = self._function(tx, *call.arguments.args, **call.arguments.kwargs)
                if self._is_async:
                    result = await result
                kept = self._encoded(result)
                await self._verb("keep_result", tx, accepted, kept)
        return self._decoded(kept)

    async def _accept(self, tx: Any, call: _Call) -> Acceptance:
        known: dict[str, Any] = {
            "payload": call.payload, "topic": self._topic, "key": _key(call),
            "timeout": timedelta(seconds=self._wait_s),
        }  # fmt: skip
        try:
            accepted: Acceptance = await self._verb("accept", tx, call.id, **known)
        except PayloadMismatch:
            raise self._reused(call) from None
        except MessageInProgress as error:
            raise CallWaiting(
                f"{self.name} is not done yet: the same call runs elsewhere ({call.id}). Call it again with the same "
                "arguments to get its result."
            ) from error
        return accepted

    # -- what a worker carries out ----------------------------------------------------------------

    def _register(self, options: Options) -> None:
        parameters: Mapping[str, Parameter] = self._body.signature.parameters
        for name, each in parameters.items():
            if each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                raise ConfigurationError(
                    f"{self.name}: a worker cannot carry it out, because of *{name}."
                )
            if name in self._context and each.default is Parameter.empty:
                raise ConfigurationError(
                    f"{self.name}: a worker calls it without {name!r}, so give it a default, such as None."
                )
        read = _reader(
            "Arguments",
            {
                name: each.annotation
                for name, each in parameters.items()
                if name not in self._context
            },
            {name: each.default for name, each in parameters.items()},
        )

        def arguments(message: Message[Any]) -> BoundArguments:
            values = read(message)
            bound = self._body.signature.bind_partial()
            bound.arguments.update(
                (name, getattr(values, name)) for name in parameters if name not in self._context
            )
            return bound

        function = self._function
        if self._is_async:

            async def of_message_async(message: Message[Any], *tx: Any) -> Any:
                first = tx or (message,)
                return await function(*first, *message.body.args, **message.body.kwargs)

            carry_out: Callable[..., Any] = of_message_async
        else:

            def of_message(message: Message[Any], *tx: Any) -> Any:
                first = tx or (message,)
                return function(*first, *message.body.args, **message.body.kwargs)

            carry_out = of_message
        carry_out.__name__ = carry_out.__qualname__ = self.name
        carry_out.__module__ = function.__module__
        settings: dict[str, Any] = {**options, "decode": arguments, "keep_result": True}
        register: Any = self._app.handler
        register(
            self._topic, consumer=self.consumer, transactional=self._transactional, **settings
        )(carry_out)

    @property
    def _topic(self) -> str:
        # as of an effect: no source brings it
        return TOOL_PREFIX + self.consumer

    def _message(self, call: _Call) -> Message[Any]:
        return Message(
            id=call.id, topic=self._topic, key=_key(call), payload=call.payload, content_type=_JSON
        )

    # -- arguments and results --------------------------------------------------------------------

    def _payload(self, arguments: BoundArguments) -> bytes | None:
        # by name, so that f(1) and f(order=1) are the same call
        named = {
            name: value for name, value in arguments.arguments.items() if name not in self._context
        }
        try:
            return as_json(named, sort_keys=True)
        except (TypeError, ValueError):
            return None

    def _encoded(self, result: Any) -> bytes:
        try:
            return as_json(result)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{self.name} returned what cannot be kept ({type(error).__name__}): return what JSON can say, a "
                "dataclass or a model."
            ) from error

    def _decoded(self, kept: bytes) -> Any:
        # the field in front of it, so that each kind of annotation is read alike
        return self._result(Message(topic="", payload=b'{"value":' + kept + b"}")).value

    # -- answers without a result -----------------------------------------------------------------

    def _without_result(self, call: _Call, accepted: Acceptance) -> TxboxError:
        match accepted.status:
            case Status.PROCESSED | None:
                return self._forgotten(call)
            case Status.DISCARDED:
                return self._refused(call)
            case Status.DEAD:
                return CallFailed(f"{self.name} failed ({call.id}).")
            case _:
                return CallWaiting(
                    f"{self.name} is not done yet ({call.id}). Call it again with the same arguments."
                )

    def _refused(self, call: _Call) -> CallRefused:
        return CallRefused(
            f"A person has refused this call of {self.name} ({call.id}). Nothing was done. Do not try it again."
        )

    def _forgotten(self, call: _Call) -> CallFailed:
        return CallFailed(
            f"This call of {self.name} has been done before, and its result is not known any more ({call.id})."
        )

    def _reused(self, call: _Call) -> PayloadMismatch:
        return PayloadMismatch(
            f"The id {call.id!r} belongs to another call of {self.name}, with other arguments: nothing was done."
        )

    # -- the verbs of either colour ---------------------------------------------------------------

    @asynccontextmanager
    async def _transaction(self) -> AsyncGenerator[Any]:
        if self._is_async:
            async with self._app.transaction_async() as tx:
                yield tx
        else:
            with self._app.transaction() as tx:
                yield tx

    async def _verb(self, name: str, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_async:
            return await getattr(self._inbox, f"{name}_async")(tx, *args, **kwargs)
        return getattr(self._inbox, name)(tx, *args, **kwargs)

    async def _shown(self, where: Any) -> Any:
        if self._is_async:
            return await self._admin.show_async(where)
        return self._admin.show(where)

    async def _sleep(self, seconds: float) -> None:
        if self._is_async:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)  # noqa: ASYNC251  # no loop: `blocking` runs it


def _same(value: T) -> T:
    return value


def _by_name(arguments: BoundArguments) -> dict[str, Any]:
    """The arguments as a caller would name them, with those of `**kwargs` among them."""
    named = dict(arguments.arguments)
    for name, each in arguments.signature.parameters.items():
        if each.kind is Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named


def _key(call: _Call) -> str | None:
    if call.run is None:
        return None
    return call.run.encode(errors="replace")[:TEXT_BYTES_MAX].decode(errors="ignore")


def _first_line(error: str | None) -> str:
    return (error or "").partition("\n")[0] or "its error is not known"


def _reader(
    name: str, hints: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Callable[[Message[Any]], Any]:
    """Return what reads a JSON object with these fields, each as its annotation says."""
    fields: list[Any] = []
    for each, hint in hints.items():
        # a name that only a type checker knows says nothing here
        kind = Any if hint is Parameter.empty or isinstance(hint, str) else hint
        default = defaults.get(each, Parameter.empty)
        if default is Parameter.empty:
            fields.append((each, kind))
        else:
            fields.append((each, kind, field(default_factory=partial(_same, default))))
    return decoder_for(make_dataclass(name, fields, kw_only=True))
