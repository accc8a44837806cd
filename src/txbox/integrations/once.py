"""Run a function's body once per id, in a transaction of the caller's: what `once` of each task queue is made of.

What the body returns is kept with the row, so that a copy returns it too: after a crash between the commit and the
queue's own bookkeeping, the chain, chord, pipeline or caller that waits for it goes on. Failures stay with the queue:
an exception rolls the row back, so that the queue's own retry runs the body again. An exception by which a body tells
its queue that it is done, and has no result, is no failure: it goes on to the queue behind the commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import update_wrapper
from inspect import Parameter, signature, unwrap
from types import SimpleNamespace
from typing import Any, get_type_hints

from txbox.connections import borrow
from txbox.connections.base import block_left
from txbox.errors import ConfigurationError, PayloadMismatch, StoreError
from txbox.handlers import is_async_function
from txbox.handlers.body import as_json
from txbox.inbox import Acceptance, Inbox
from txbox.session import Statement, Transaction, run, run_async

#: Begins a transaction, yields its connection or session, then commits or rolls back: `engine.begin`.
Begin = Callable[[], AbstractContextManager[Any]]
BeginAsync = Callable[[], AbstractAsyncContextManager[Any]]
#: Whether an exception of the body means that it is done, without a result.
Done = Callable[[Exception], bool]

# not `BLOCK`: MySQL would drop that of an `App.transaction` around it
_BODY = Statement("savepoint", "SAVEPOINT txbox_body", {})
_BODY_ENDS = Statement("release_savepoint", "RELEASE SAVEPOINT txbox_body", {})


def _never(_: Exception) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Once:
    """What a call returns. False if that is unknown: the id was reused, or the result of its first run was not kept."""

    known: bool
    result: Any = None

    def __bool__(self) -> bool:
        return self.known


class Body:
    """A function whose first parameter is a transaction that its callers do not pass.

    Args:
        id, timeout: as of the `once` of a task queue; `id` of None is the queue's own id.
        encode, decode: a result to bytes and back, as the queue would pass it on; None keeps no results.
        is_async: for `call_async`.

    Raises:
        ConfigurationError: the function has no first parameter, or is not called as its queue does.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inbox: Inbox,
        *,
        id: Callable[..., str | int] | None = None,  # noqa: A002  # the word of the field
        timeout: timedelta | None = None,
        encode: Callable[[Any], bytes] | None = None,
        decode: Callable[[bytes], Any] = bytes,
        is_async: bool = False,
    ) -> None:
        self.function = function
        self.name: str = getattr(function, "__name__", "the task")
        if is_async_function(function) is not is_async:
            # an unawaited coroutine would count as a body that has run
            kind = "an `async def`" if is_async else "a `def`"
            raise ConfigurationError(
                f"{self.name}: make it {kind} function, as this queue calls it."
            )
        self._inbox, self._id, self._timeout = inbox, id, timeout
        self._encode, self._decode = encode, decode
        full = signature(function)
        parameters = list(full.parameters.values())
        if not parameters or parameters[0].kind not in (
            Parameter.POSITIONAL_ONLY,
            Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise ConfigurationError(f"{self.name}: its first parameter must be the transaction.")
        self._transaction = parameters[0].name
        #: As callers see it.
        self.signature = full.replace(parameters=parameters[1:])

    def update(self, wrapper: Callable[..., Any]) -> None:
        """Give a wrapper the function's name, and its signature and annotations without the transaction."""
        update_wrapper(wrapper, self.function)
        attributes = vars(wrapper)
        del attributes["__wrapped__"]  # queues that unwrap it would want the transaction
        hints = {
            name: kind
            for name, kind in wrapper.__annotations__.items()
            if name != self._transaction
        }
        # queues would look the names up in the wrapper's module; what only a type checker knows stays a name
        with suppress(NameError):
            known = getattr(unwrap(self.function), "__globals__", {})
            annotated: Any = SimpleNamespace(__annotations__=hints)
            hints = get_type_hints(annotated, known, include_extras=True)
        wrapper.__annotations__ = hints
        attributes["__signature__"] = self.signature = self.signature.replace(
            parameters=[
                each.replace(annotation=hints.get(each.name, each.annotation))
                for each in self.signature.parameters.values()
            ],
            return_annotation=hints.get("return", self.signature.return_annotation),
        )

    def __call__(
        self,
        begin: Begin,
        delivery_id: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        done: Done = _never,
    ) -> Once:
        """Run the body in a new transaction, or return what it returned when it ran for this id.

        Args:
            delivery_id: the queue's id of the task, for a body without an `id=`.
            done: for the exceptions that end a body without a result; they are raised behind the commit.

        Raises:
            ConfigurationError: there is no id, or the result cannot be encoded.
            MessageInProgress: another transaction locked the id until the timeout.
            StoreError: the body ended the transaction, or went on after the database had failed it.
            whatever else the body raises: nothing is kept.

        Guarantee: the row and what the body wrote are one commit.
        """
        chosen, known = self._message(delivery_id, args, kwargs)
        accepted: Acceptance | None = None
        ended: Exception | None = None
        result: Any = None
        try:
            with begin() as tx:
                accepted = self._inbox.accept(tx, chosen, timeout=self._timeout, **known)
                if not accepted:
                    return self._first(self._inbox.result(tx, accepted))
                executor = borrow(tx)
                run(executor, begin_body)
                try:
                    result = self.function(tx, *args, **kwargs)
                except Exception as error:
                    if not done(error):
                        raise
                    ended = error
                run(executor, end_body)
                if ended is None and self._encode is not None:
                    self._inbox.keep_result(tx, accepted, self._encoded(result))
        except PayloadMismatch:
            if accepted:
                raise  # of another inbox, which the body uses
            with begin() as tx:
                self._inbox.quarantine(tx, chosen, **known)
            return Once(False)
        if ended is not None:
            raise ended
        return Once(True, result)

    async def call_async(
        self,
        begin: BeginAsync,
        delivery_id: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        done: Done = _never,
        sent: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> Once:
        """The twin of calling it, for an `async def` function.

        Args:
            sent: the arguments that copies are compared by, where the queue has added some.
        """
        chosen, known = self._message(delivery_id, args, kwargs, sent)
        function: Callable[..., Awaitable[Any]] = self.function
        accepted: Acceptance | None = None
        ended: Exception | None = None
        result: Any = None
        try:
            async with begin() as tx:
                accepted = await self._inbox.accept_async(
                    tx, chosen, timeout=self._timeout, **known
                )
                if not accepted:
                    return self._first(await self._inbox.result_async(tx, accepted))
                executor = borrow(tx, is_async=True)
                await run_async(executor, begin_body)
                try:
                    result = await function(tx, *args, **kwargs)
                except Exception as error:
                    if not done(error):
                        raise
                    ended = error
                await run_async(executor, end_body)
                if ended is None and self._encode is not None:
                    await self._inbox.keep_result_async(tx, accepted, self._encoded(result))
        except PayloadMismatch:
            if accepted:
                raise
            async with begin() as tx:
                await self._inbox.quarantine_async(tx, chosen, **known)
            return Once(False)
        if ended is not None:
            raise ended
        return Once(True, result)

    def _encoded(self, result: Any) -> bytes:
        assert self._encode is not None, "results are kept"
        try:
            return self._encode(result)
        except Exception as error:
            # the queue could not pass it on either, but would say so only after the commit
            raise ConfigurationError(
                f"{self.name} returned what its queue cannot pass on ({type(error).__name__}): return what it can, or "
                "give once() keep_result=False if nobody reads it."
            ) from error

    def _first(self, kept: bytes | None) -> Once:
        return Once(False) if kept is None else Once(True, self._decode(kept))

    def _message(
        self,
        delivery_id: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sent: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> tuple[str | int, dict[str, Any]]:
        chosen = delivery_id if self._id is None else self._id(*args, **kwargs)
        if chosen is None:
            raise ConfigurationError(
                f"{self.name} was called outside a task, so it has no id: send it to the queue, or give once() an id=."
            )
        # by name, so that f(1) and f(order=1) are the same call
        bound = self.signature.bind(*args, **kwargs)
        if sent is not None:
            bound = self.signature.bind_partial(*sent[0], **sent[1])
        arguments: dict[str, Any] = dict(bound.arguments)
        try:
            payload = as_json(arguments, sort_keys=True)
        except (TypeError, ValueError):
            payload = None  # not JSON: copies of it are not compared
        return chosen, {"payload": payload, "topic": self.name}


async def begin_body(db: Transaction) -> None:
    """Mark the transaction before user code runs in it."""
    await db.execute(_BODY)


async def end_body(db: Transaction) -> None:
    """Refuse to commit when the row may not be in this transaction any more.

    COMMIT would not say so: PostgreSQL answers that of a failed transaction with ROLLBACK, and drivers are silent.
    """
    try:
        await db.execute(_BODY_ENDS)
    except StoreError as error:
        raise block_left(error) from error.__cause__
