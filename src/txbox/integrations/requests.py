"""HTTP requests once for each `Idempotency-Key`: what `once` of each web framework is made of.

The key, with who sends it, claims an inbox row in the transaction of the route. The answer is kept in that row, by the
same commit, and a repeat gets it byte for byte: also one whose first answer was lost with its process or connection.
See the IETF's draft-ietf-httpapi-idempotency-key-header, and docs/decisions/0057-requests-once.md.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import quote
from uuid import UUID

from txbox.boundaries import log
from txbox.connections import borrow, is_transient
from txbox.errors import (
    ConfigurationError,
    Fault,
    MessageInProgress,
    PayloadMismatch,
    StoreError,
    TxboxError,
    check_duration,
    redacted,
)
from txbox.identity import TEXT_BYTES_MAX
from txbox.inbox import Acceptance, Inbox
from txbox.integrations.once import begin_body, end_body
from txbox.session import Transaction, run, run_async
from txbox.store.dialect import Dialect
from txbox.text import with_article

#: Headers of an answer that are kept without being asked for.
KEPT_HEADERS = frozenset({
    "content-type", "content-encoding", "content-language", "content-disposition", "content-location",
    "cache-control", "location", "etag", "last-modified", "link", "vary",
})  # fmt: skip
#: For whom a key is: a function that returns the authenticated user's id, or, where everybody shares one space of keys,
#: so that they must be impossible to guess, the word.
Caller = Callable[..., object] | Literal["anonymous"]

# visible ASCII but for the quotation mark, comma and backslash: the same with and without quotes, and one key only
_KEY = re.compile(r'"?([!#-+\--\[\]-~]{1,255})"?')
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
# a commit of its own decides; so a wait would only hold a connection
_AT_ONCE = timedelta(0)

Headers = tuple[tuple[str, str], ...]


class Anonymous:
    """Nobody in particular. No text, which might be somebody's name."""


ANONYMOUS = Anonymous()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request is answered with; header names are in lower case."""

    status: int
    headers: Headers
    body: bytes

    def encoded(self) -> bytes:
        """Return it as JSON. A body that is JSON stays as it is, between two line breaks: redaction sees its fields."""
        head = json.dumps({"status": self.status, "headers": _checked(self.headers)})
        try:
            text = self.body.decode()
        except UnicodeDecodeError:
            name, body = "base64", json.dumps(base64.b64encode(self.body).decode()).encode()
        else:
            try:
                json.loads(text)
                name, body = "json", self.body
            except (ValueError, RecursionError):
                name, body = "text", json.dumps(text).encode()
        return f'{head[:-1]}, "{name}":\n'.encode() + body + b"\n}"

    @classmethod
    def decoded(cls, kept: bytes) -> Answer:
        """Read what `encoded` wrote.

        Raises:
            ValueError, KeyError, TypeError: it was not.
        """
        head, _, rest = kept.partition(b"\n")
        # json.dumps writes no line break
        fields = json.loads(head + b"null}")
        body = rest.removesuffix(b"\n}")
        if "text" in fields:
            body = json.loads(body).encode()
        elif "base64" in fields:
            body = base64.b64decode(json.loads(body), validate=True)
        headers = tuple((str(name), str(value)) for name, value in fields["headers"])
        return cls(int(fields["status"]), _checked(headers), body)


def _checked(headers: Headers) -> Headers:
    """Refuse what would be another header, or another answer, when it is sent."""
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ConfigurationError(
                f"The header {name!r} has characters that HTTP does not allow."
            )
    return headers


class Refused(Exception):
    """A request that does not run; `answer` says why, or is that of its first run."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"The request is answered {answer.status} without running.")
        self.answer = answer


class _Undone(Exception):
    """Has the transaction roll back: the answer is an error."""


@dataclass(frozen=True, slots=True)
class Received:
    """A request, as far as it is compared with its repeats.

    Attributes:
        keys: each `Idempotency-Key` header.
        path, query: as they came.
        route: the template that matched, for people.
    """

    keys: Sequence[str]
    method: str
    path: bytes
    query: bytes
    body: bytes
    route: str = ""

    @property
    def topic(self) -> str:
        shown = f"{self.method} {self.route}".strip()
        return shown.encode()[:TEXT_BYTES_MAX].decode(errors="ignore")

    @property
    def payload(self) -> bytes:
        return b"\n".join((self.method.encode(), self.path, self.query, self.body))


class Requests:
    """The requests of a route, each of which runs once for each caller and key.

    Args:
        inbox: one for each route, because its consumer is part of the key; with the App's `codec`, answers are
            encrypted.
        begin: begins a transaction and yields its connection or session: `app.transaction`, `engine.begin`.
        is_async: `begin` is an async context manager.
        required: a request without a key is refused; otherwise it runs, in a transaction, each time.
        keep: statuses from 400 on whose answer is kept, and given to repeats. What the route wrote is rolled back all
            the same.
        headers: names of headers that are kept beside KEPT_HEADERS.
        max_bytes: of a body; a larger one fails its request, before the commit.
        retry_after: what a repeat is told while the first request runs; whole seconds, at least one.

    Raises:
        ConfigurationError: an argument makes no sense, or asks to keep cookies.

    Guarantee: the row, the answer in it and what the route wrote are one commit. Without it there is no row.
    """

    def __init__(
        self,
        inbox: Inbox,
        begin: Callable[[], Any],
        *,
        is_async: bool = False,
        required: bool = True,
        keep: Collection[int] = (),
        headers: Iterable[str] = (),
        max_bytes: int = 1024 * 1024,
        retry_after: timedelta = timedelta(seconds=1),
    ) -> None:
        names = {name.lower() for name in headers}
        if names & {"set-cookie", "content-length", "transfer-encoding"}:
            raise ConfigurationError(
                "A kept answer may reach a client by another connection: remove set-cookie, content-length and "
                "transfer-encoding from headers=."
            )
        if wrong := [status for status in keep if not 400 <= status < 600]:
            raise ConfigurationError(f"keep= has {wrong[0]}: name statuses from 400 to 599.")
        check_duration("retry_after", retry_after)
        self.inbox, self.begin, self.is_async = inbox, begin, is_async
        self._required, self._keep = required, frozenset(keep)
        self._headers = KEPT_HEADERS | names
        self._max_bytes = max_bytes
        self._retry_after = str(max(1, math.ceil(retry_after.total_seconds())))
        # those of this process: their repeats take no connection
        self._in_flight: dict[str, object] = {}

    async def claim(self, received: Received, caller: object) -> Claim:
        """Begin the transaction of a request.

        Args:
            caller: who sends it, as the server has authenticated them: a text, number or UUID that never changes; or
                ANONYMOUS.

        Raises:
            Refused: answer with its `answer`; the transaction has ended.
            ConfigurationError: there is no caller.
            StoreError: the database refused, and a repeat would not help.
        """
        key = self._key(received)
        if key is None:
            with self.reached():
                return Claim(self, received, caller, *await self._entered())
        message_id = _identity(caller, key)
        mark = object()
        if self._in_flight.setdefault(message_id, mark) is not mark:
            raise Refused(self._in_progress())
        try:
            with self.reached():
                return await self._claimed(received, caller, key, message_id)
        except BaseException:
            del self._in_flight[message_id]
            raise

    async def _claimed(
        self, received: Received, caller: object, key: str, message_id: str
    ) -> Claim:
        claim = Claim(self, received, caller, *await self._entered())
        first: Answer | None = None
        try:
            accepted = await self._accept(claim.tx, received, key, message_id)
            if accepted:
                await self._run(claim.tx, begin_body)
            else:
                first = _first(await self._kept(claim.tx, accepted))
        except BaseException as error:
            await claim.leave(error)
            match error:
                case PayloadMismatch():
                    raise Refused(_REUSED) from None
                case MessageInProgress():
                    raise Refused(self._in_progress()) from None
                case StoreError(fault=Fault.CONFLICT):
                    raise Refused(self._in_progress()) from error
                case _:
                    raise
        if first is not None:
            # by COMMIT, which waits until what it has read is on disk: see docs/decisions/0064-read-before-durable.md
            await claim.leave(None)
            raise Refused(first)
        claim.accepted, claim.message_id = accepted, message_id
        return claim

    @contextmanager
    def reached(self) -> Generator[None]:
        """Refuse with 503 while the database is away or busy: nothing runs without its protection.

        Raises:
            Refused: in the place of an error after which a repeat may help.
        """
        try:
            yield
        except Exception as error:
            if not is_transient(error):
                raise
            log.warning(
                "A request of %s is answered 503, because of its database: %s: %s",
                self.inbox.consumer, type(error).__name__, redacted(str(error)),
            )  # fmt: skip
            raise Refused(
                self._later(
                    503, "The request was not completed",
                    "The database is away or busy. Send the same request again: it tells what has become of this one.",
                )
            ) from error  # fmt: skip

    def release(self, message_id: str) -> None:
        """The request has ended; called once for each that was claimed."""
        self._in_flight.pop(message_id, None)

    def keeps(self, status: int) -> bool:
        """Whether an answer with this status is kept."""
        return status < 400 or status in self._keep

    def check_size(self, size_bytes: int) -> None:
        """Refuse an answer that is too large to be kept."""
        if size_bytes > self._max_bytes:
            raise ConfigurationError(
                f"An answer of {self.inbox.consumer!r} has more than {self._max_bytes} bytes and cannot be kept: "
                "answer with a reference to what is large, or raise max_bytes."
            )

    def chosen(self, answer: Answer) -> Answer:
        """Return what is kept of an answer.

        Raises:
            ConfigurationError: it is too large.
        """
        self.check_size(len(answer.body))
        headers = tuple(each for each in answer.headers if each[0] in self._headers)
        return replace(answer, headers=headers)

    def _key(self, received: Received) -> str | None:
        if not received.keys:
            if not self._required:
                return None
            raise Refused(
                _problem(
                    400,
                    "Idempotency-Key is missing",
                    "Send a header Idempotency-Key: a new UUID for each operation.",
                )
            )
        match = _KEY.fullmatch(received.keys[0].strip())
        quoted = received.keys[0].count('"')
        if len(received.keys) > 1 or match is None or quoted not in (0, 2):
            raise Refused(
                _problem(
                    400, "Idempotency-Key is malformed",
                    "Send one key of 1 to 255 visible ASCII characters, without comma, backslash or quotation mark.",
                )
            )  # fmt: skip
        return match[1]

    def _in_progress(self) -> Answer:
        return self._later(
            409, "A request is outstanding for this Idempotency-Key",
            "The first request with this key has not ended. Send the same request again later.",
        )  # fmt: skip

    def _later(self, status: int, title: str, detail: str) -> Answer:
        answer = _problem(status, title, detail)
        return replace(answer, headers=(*answer.headers, ("retry-after", self._retry_after)))

    # -- the verbs of either colour -----------------------------------------------------------------

    async def _entered(self) -> tuple[Any, Any]:
        context = self.begin()
        if self.is_async:
            return context, await context.__aenter__()
        return context, context.__enter__()

    async def _accept(self, tx: Any, received: Received, key: str, message_id: str) -> Acceptance:
        dialect = borrow(tx, is_async=self.is_async).dialect
        timeout: timedelta | None = _AT_ONCE
        if dialect.has("try_lock"):
            timeout = (
                None  # nobody writes this row without the lock, so there is nobody to wait for
            )
            if not await self._run(tx, _locked, dialect, self.inbox.consumer, message_id):
                raise MessageInProgress
        known: dict[str, Any] = {
            "payload": received.payload, "topic": received.topic, "key": key[:TEXT_BYTES_MAX], "timeout": timeout,
        }  # fmt: skip
        if self.is_async:
            return await self.inbox.accept_async(tx, message_id, **known)
        return self.inbox.accept(tx, message_id, **known)

    async def _kept(self, tx: Any, accepted: Acceptance) -> bytes | None:
        if self.is_async:
            return await self.inbox.result_async(tx, accepted)
        return self.inbox.result(tx, accepted)

    async def keep_answer(self, tx: Any, accepted: Acceptance, kept: bytes) -> None:
        """Check that the transaction is still that of the claim, and keep the answer in it."""
        await self._run(tx, end_body)
        if self.is_async:
            await self.inbox.keep_result_async(tx, accepted, kept)
        else:
            self.inbox.keep_result(tx, accepted, kept)

    async def _run(self, tx: Any, step: Callable[..., Any], *args: Any) -> Any:
        if self.is_async:
            return await run_async(borrow(tx, is_async=True), step, *args)
        return run(borrow(tx), step, *args)


class Claim:
    """The transaction of a request: `tx` is for the route, then exactly one of `finish` and `abort` follows."""

    def __init__(
        self, requests: Requests, received: Received, caller: object, context: Any, tx: Any
    ) -> None:
        self._requests, self._received, self._caller = requests, received, caller
        self._context, self.tx = context, tx
        self.accepted: Acceptance | None = None
        self.message_id: str | None = None

    def keeps(self, status: int) -> bool:
        """Whether an answer with this status is kept. What is not may be sent as it is made, behind `finish`."""
        return self.accepted is not None and self._requests.keeps(status)

    def check_size(self, size_bytes: int) -> None:
        """Refuse an answer that grows too large to be kept."""
        self._requests.check_size(size_bytes)

    async def finish(self, answer: Answer) -> Answer:
        """Commit with an answer, or roll back because it is an error; returns what is to be sent.

        Raises:
            ConfigurationError: the answer is too large, or a header of it makes no sense; nothing is kept.
            StoreError: COMMIT was refused, or the route left the transaction.

        Guarantee: the answer itself is returned only after its commit, unless it is an error. Another one says what has
        become of the request: 503 if COMMIT was not answered.
        """
        try:
            if answer.status < 400:
                with self._requests.reached():
                    await self._commit(answer)
            else:
                await self.leave(_Undone())
        except Refused as refused:
            return refused.answer
        finally:
            self._release()
        if answer.status < 400 or not self.keeps(answer.status):
            return answer
        # a transaction of its own: a session would write what the route has left in it
        try:
            again = await self._requests.claim(self._received, self._caller)
            return await again._keep(answer)  # noqa: SLF001  # its own kind
        except Refused as refused:
            return refused.answer  # another request came between: what it did counts

    async def _keep(self, answer: Answer) -> Answer:
        try:
            with self._requests.reached():
                await self._commit(answer)
        finally:
            self._release()
        return answer

    async def abort(self, error: BaseException) -> None:
        """Roll back because of an exception, which the caller goes on with."""
        try:
            await self.leave(error)
        finally:
            self._release()

    async def _commit(self, answer: Answer) -> None:
        try:
            if self.accepted is not None:
                kept = self._requests.chosen(answer).encoded()
                await self._requests.keep_answer(self.tx, self.accepted, kept)
        except BaseException as error:
            await self.leave(error)
            raise
        await self.leave(None)

    async def leave(self, error: BaseException | None) -> None:
        """Leave the transaction's context: by commit without an error, else by rollback."""
        details = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        try:
            if self._requests.is_async:
                await self._context.__aexit__(*details)
            else:
                self._context.__exit__(*details)
        except BaseException as raised:
            if raised is not error:
                raise

    def _release(self) -> None:
        if self.message_id is not None:
            self._requests.release(self.message_id)


def _identity(caller: object, key: str) -> str:
    """The id of a caller's key: neither can pass for a part of the other, nor an anonymous one for somebody's."""
    if isinstance(caller, Anonymous):
        return key
    # what else has a text may have another one tomorrow
    if isinstance(caller, bool) or not isinstance(caller, str | int | UUID) or caller == "":
        raise ConfigurationError(
            f"The caller of this request is {with_article(type(caller).__name__)}: return the text, number or UUID "
            "that names the authenticated user; refuse requests that are not authenticated before this route."
        )
    return f"{quote(str(caller), safe='@:/+=|', errors='surrogatepass')} {key}"


def _first(kept: bytes | None) -> Answer:
    """How the first run was answered."""
    if kept is not None:
        try:
            answer = Answer.decoded(kept)
        except (ValueError, KeyError, TypeError):
            pass  # another program's result
        else:
            return replace(answer, headers=(*answer.headers, ("idempotent-replayed", "true")))
    return _problem(
        409,
        "The answer is not kept",
        "A request with this Idempotency-Key has been processed, and its answer is not known any more.",
    )


async def _locked(db: Transaction, dialect: Dialect, consumer: str, message_id: str) -> bool:
    """Lock an id until the transaction ends; False if another request has it."""
    named = {"consumer": consumer, "message_id": message_id}
    return bool((await db.execute(dialect.statement("try_lock", named))).rows[0][0])


def _problem(status: int, title: str, detail: str) -> Answer:
    body = json.dumps({"title": title, "status": status, "detail": detail}).encode()
    return Answer(status, (("content-type", "application/problem+json"),), body)


_REUSED = _problem(
    422, "Idempotency-Key is already used",
    "This key came with another request before: method, path, query or body differ. Send a new key.",
)  # fmt: skip


TOO_LARGE = _problem(
    413,
    "Request is too large",
    "A request with an Idempotency-Key is read whole, and this one is too large for that.",
)


def form(fields: Iterable[tuple[str, str]], files: Iterable[tuple[str, Any]]) -> bytes:
    """What stands for a body that has been parsed as a form, so that its bytes are gone."""
    parts = [list(field) for field in fields]
    for name, upload in files:
        upload.seek(0)
        parts.append([name, str(upload.name), hashlib.sha256(upload.read()).hexdigest()])
        upload.seek(0)
    return json.dumps(parts).encode()


def checked_caller(caller: object) -> Callable[..., object] | Anonymous:
    """Check the argument `caller` of a `once`."""
    if caller == "anonymous":
        return ANONYMOUS
    if not callable(caller):
        raise ConfigurationError(
            'caller= says whose key it is: give a function that returns the id of the user, or "anonymous".'
        )
    return caller


def streamed(name: str) -> TxboxError:
    """The error for an answer whose body is made while it is sent."""
    return ConfigurationError(
        f"{name} answered with a stream, which cannot be kept: return the whole body, or a reference to it."
    )
