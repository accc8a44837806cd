"""The verbs that change messages, in small transactions that each carry their audit row."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast

from txbox.admin import tables
from txbox.admin.reader import Audit, Operator
from txbox.admin.tables import (
    INBOX,
    OUTBOX,
    QUARANTINE,
    Filter,
    InboxFilter,
    OutboxFilter,
    QuarantineFilter,
    Table,
    Verb,
)
from txbox.errors import (
    ConfigurationError,
    Fault,
    Reject,
    StoreError,
    UnreadableMessage,
    UnusableMessage,
)
from txbox.handlers import Handler
from txbox.identity import (
    TOMBSTONE_HASH,
    canonical_id,
    check_fields,
    check_headers,
    checked_consumer,
    payload_hash,
)
from txbox.message import Headers, Message
from txbox.outcome import Status
from txbox.policy import HIDDEN, Limits
from txbox.processing.failure import BROKEN
from txbox.session import Result, Session, Statement
from txbox.store.activity import pause, resume
from txbox.store.codec import Arrival, Row, quarantine_hash
from txbox.store.inbox import InboxStore

T = TypeVar("T")
#: Reads rows, in a transaction or alone.
Read = Callable[[Statement], Awaitable[Result]]
#: What names a row: the columns of `Table.key`.
Key = tuple[Any, ...]
_SAMPLE = 10
_BATCH = 500
# each is a transaction of its own
_ACCEPTED = 50
_CONFLICT_PAUSE_S = 0.05
_PAYLOAD_GONE = (
    "its payload was dropped (Retention.quarantine_bytes): let its producer send it again"
)
_PAYLOAD_CUT = (
    "not all of its payload was kept, or its hash is made in another way: give --app if the handler has "
    "payload_hash=, else let its producer send it again"
)


class ChangeOptions(TypedDict, total=False):
    """The options of every change.

    Keys:
        actor: who, for `txbox_audit`; by default the login name and the host.
        reason: why, for `txbox_audit`.
        dry_run: count, and neither change nor lock anything.
        most: change at most so many, the oldest first.
    """

    actor: str | None
    reason: str | None
    dry_run: bool
    most: int | None


class Matching(NamedTuple):
    """How many rows of one status and consumer a change matches, and how many of them it leaves alone."""

    status: str
    consumer: str | None
    rows: int
    spared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What a change has done so far, or in a dry run would do.

    Attributes:
        count: rows changed.
        spared: rows skipped because their transaction was broken; see `Admin.retry`.
        without_payload: rows that match a retry, and cannot be retried.
        sample: the keys of the first changed rows.
        refused: the keys of rows that cannot be accepted, with the reason.
    """

    action: Verb | Literal["replay"]
    dry_run: bool
    count: int = 0
    spared: int = 0
    sample: tuple[dict[str, str], ...] = ()
    refused: tuple[dict[str, str], ...] = ()
    without_payload: int = 0
    matching: tuple[Matching, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """What an edit changed, or in a dry run would change; pairs are before and after.

    Attributes:
        version: of the message before; pass it as `expected` to edit exactly that.
        payload_hash: SHA-256 in hexadecimal digits.
        headers: the names of those that were set or removed.
    """

    dry_run: bool
    version: str
    payload_bytes: tuple[int | None, int | None]
    payload_hash: tuple[str, str]
    headers: tuple[str, ...]


class MessageChanged(ConfigurationError):
    """The message is no longer the version that an edit expects."""


class Batch(NamedTuple):
    """One batch of a change: its rows, how many were skipped, and the cursor of the next one, if any."""

    keys: list[Key]
    spared: int
    cursor: Any


def result_of(steps: Iterable[T]) -> T:
    """Carry a change out to its end."""
    return deque(steps, maxlen=1).pop()


class Changes(Operator):
    """The verbs that change messages. A filter says which table a verb is about."""

    def retry(self, where: InboxFilter | OutboxFilter, **how: Unpack[ChangeOptions]) -> Changed:
        """Give messages a full new budget of attempts, due at once, under their ids.

        A filter matches dead messages unless it names the status `failed`; with a message id it matches
        both. Rows of a broken transaction (their effects are unknown) are skipped unless the filter
        names the message id or that error type. An outgoing message leaves before the later ones of its key.

        Guarantee: batches are small transactions with their audit row, and never wait for live traffic.
        """
        return result_of(self.batches("retry", where, **how))

    def discard(
        self, where: InboxFilter | OutboxFilter | QuarantineFilter, **how: Unpack[ChangeOptions]
    ) -> Changed:
        """Give messages up for good: they never run or leave, and a copy that arrives later is a duplicate.

        A filter matches dead messages unless it names another status; with a message id it matches every
        status that can be discarded. An outgoing message whose relay died may have been published before.
        A quarantined message loses its payload at once, and its row after `Retention.quarantine`.
        The guarantee is that of `retry`.
        """
        return result_of(self.batches("discard", where, **how))

    def reroute(self, where: OutboxFilter, to: str, **how: Unpack[ChangeOptions]) -> Changed:
        """Give outgoing messages another route, with a full new budget of attempts, under their ids.

        A filter matches unsent messages, and dead ones only if it names the status `dead`; with
        a message id it matches both. The guarantee is that of `retry`.

        Args:
            to: a route as `topics` and `list` show it, or the name= of app.publish; "" is any App that
                publishes or consumes the topic.
        """
        return result_of(self.batches("reroute", where, to=to, **how))

    def accept(
        self,
        where: QuarantineFilter,
        *,
        message_id: str | None = None,
        **how: Unpack[ChangeOptions],
    ) -> Changed:
        """Store quarantined messages as pending, in the order of their arrival, to be processed after all.

        Each keeps its id. One without an id, or under the id of another message (a known id with another
        payload), needs `message_id`. With an App, its handler determines version and hash.

        Args:
            message_id: the id to store it under; then the filter must match one message.

        Raises:
            ConfigurationError: `message_id`, and the filter matches several messages.

        Guarantee: each pending row, the end of its quarantine row and its audit row are one commit.
        """
        return result_of(self.batches("accept", where, message_id=message_id, **how))

    def _accepted(self, key: Key, message_id: str | None, message: Message[Any]) -> Arrival:
        consumer, known, _ = key
        if not consumer:
            raise UnusableMessage("no handler consumed it: send it again with `txbox send`")
        if message_id is None and not known:
            raise UnusableMessage("it has no id: give it one (--id)")
        accepted_id = known if message_id is None else canonical_id(message_id)
        if handler := self.handler_of(message, consumer):
            return handler.accepted(message, accepted_id)
        return Arrival(message, accepted_id, payload_hash(message))

    def edit(
        self,
        consumer: str,
        message_id: str,
        *,
        payload: bytes | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str | None] | None = None,
        expected: str | None = None,
        **how: Unpack[ChangeOptions],
    ) -> Edited:
        """Correct what a dead or failed message carries, and give it a full new budget of attempts, due at once.

        It keeps its id, its order and the hash of the original, whose copies stay duplicates. The original stays in
        the quarantine, as `replaced`, as long as the message itself. With an App, its handler must be able to read
        the new payload, and find the same id and version in it.

        Args:
            payload: the new payload; None keeps the old one.
            content_type: in the same way.
            headers: new values by name, in any case; None removes a header.
            expected: the `version` that a dry run returned; None edits whatever is there.

        Raises:
            MessageChanged: payload, content type or headers are no longer those of `expected`.
            ConfigurationError: nothing to change, no dead or failed message with a payload under this id,
                a payload that the handler refuses, or one copied from redacted text.

        Guarantee: the change, the copy of the original and the audit row are one commit.
        """
        if payload is None and content_type is None and not headers:
            raise ConfigurationError("Nothing to edit: give a payload, a content type or headers.")
        redact, replacements = self.app.store.columns.redact, headers or {}
        hidden = [name for name, value in replacements.items() if value == HIDDEN]
        if any(redact.header(name, "") for name in hidden) or redact.was_shown(payload or b""):
            raise ConfigurationError(
                f"Your edit contains {HIDDEN!r}, which stands for what App(redact=…) hides: give the real value."
            )
        names = {name.lower() for name in replacements}

        def edited(arrival: Arrival) -> Message[Any]:
            message = arrival.message
            if expected not in (None, _version(message)):
                raise MessageChanged("The message has changed since you read it: read it again.")
            kept = [pair for pair in message.headers if pair[0].lower() not in names]
            fresh = [(name, value) for name, value in replacements.items() if value is not None]
            after = replace(
                message,
                payload=message.payload if payload is None else payload,
                content_type=content_type or message.content_type,
                headers=Headers([*kept, *fresh]),
            )
            try:
                check_fields(after)
                check_headers(after.headers)
            except UnusableMessage as error:
                raise ConfigurationError(str(error)) from None
            if handler := self.handler_of(message, consumer):
                _check_edited(handler, arrival, after, self.app.limits)
            return after

        where, audit = InboxFilter(consumer=consumer, message_id=message_id), audit_of(how)
        versions = self.on_database(again, _edit, self.store, where, edited, audit)
        if versions is None:
            raise ConfigurationError(self.why_not("edit", where))
        self.emit("edit", 1, audit)
        before, after = versions
        return Edited(
            dry_run=audit is None,
            version=_version(before),
            payload_bytes=(_length(before), _length(after)),
            payload_hash=(payload_hash(before).hex(), payload_hash(after).hex()),
            headers=tuple(sorted(names)),
        )

    def pause(self, consumer: str, **how: Unpack[ChangeOptions]) -> bool:
        """Stop all workers from running a consumer until it is resumed; returns False when it is paused already.

        Every worker notices within a few seconds, and later ones when they start. Running messages finish; rows
        stay in the table. A source without another consumer is not received from, and keeps its messages;
        messages of a shared source, of `process` or of a webhook are stored as pending.

        Guarantee: the pause and its audit row are one commit.
        """
        return self._paused("pause", pause, consumer, how)

    def resume(self, consumer: str, **how: Unpack[ChangeOptions]) -> bool:
        """Let workers run a consumer again, within a few seconds; returns False when it is not paused.

        Guarantee: the end of the pause and its audit row are one commit.
        """
        return self._paused("resume", resume, consumer, how)

    def _paused(
        self,
        action: str,
        change: Callable[..., Coroutine[Any, Any, bool]],
        consumer: str,
        how: ChangeOptions,
    ) -> bool:
        checked_consumer(consumer)
        audit, dry_run = Audit.of(how.get("actor"), how.get("reason")), how.get("dry_run", False)
        done = self.on_database(
            change, self.dialect, consumer, actor=audit.actor, reason=audit.reason, dry_run=dry_run
        )
        self.emit(action, int(done), None if dry_run else audit)
        return done

    # -- batches ------------------------------------------------------------------------------

    def batches(
        self,
        verb: Verb,
        where: Filter[Any, Any],
        *,
        to: str | None = None,
        message_id: str | None = None,
        **how: Unpack[ChangeOptions],
    ) -> Generator[Changed]:
        """Do what `retry`, `discard`, `reroute` or `accept` does, and yield the change so far after each batch.

        The last one yielded is the result, and there is at least one. Leaving the loop ends the change there: batches
        that were committed stay. Between two of them no connection is in use, and nothing is locked.

        Args:
            to: the new route, for a reroute.
            message_id: as for `accept`.
        """
        for changed, _ in self._batches(verb, where, how, to=to, message_id=message_id):
            yield changed

    def _batches(
        self,
        verb: Verb,
        where: Filter[Any, Any],
        how: ChangeOptions,
        *,
        to: str | None = None,
        message_id: str | None = None,
        sizes: Iterable[int] = (),
    ) -> Generator[tuple[Changed, list[Key]]]:
        """Yield the change so far and the keys of its last batch.

        Args:
            sizes: of the first batches; the last of them is that of the others, too.
        """
        table, audit, most = where.table, audit_of(how), how.get("most")
        meant = where.named or getattr(where, "error_type", None) == BROKEN.error_type
        broken = BROKEN.error_type if verb == "retry" and table is INBOX and not meant else None
        counted = self._matching(verb, where, broken)
        if message_id is not None and (several := _rows(counted)) > 1:
            raise ConfigurationError(
                f"A new id is for one message, and {several} match: give the hash, too."
            )
        bare = 0
        if verb == "retry" and table is INBOX and not where.named:
            bare = _rows(self._matching(verb, where, needs_payload=False)) - _rows(counted)
        done = Changed(
            action=verb, dry_run=audit is None, without_payload=bare, matching=tuple(counted)
        )
        # of a dry run only the sample is read, except where each row may be refused
        only_sample = audit is None and verb != "accept"
        following = iter(sizes)
        size = next(following, _ACCEPTED if verb == "accept" else _BATCH)
        is_quiet = True
        try:
            # the outbox has one order for all statuses
            for matching in counted if table is not OUTBOX else counted[:1]:
                after, more = None, True
                while more and (most is None or done.count < most):
                    if only_sample and len(done.sample) == _SAMPLE:
                        break
                    batch = self.on_database(
                        again, _batch, self.store, verb, where, matching, None if verb == "accept" else audit,
                        spared=broken, after=after, to=to, limit=size if most is None else min(size, most - done.count),
                    )  # fmt: skip
                    after, more = batch.cursor, batch.cursor is not None
                    keys, refused = batch.keys, dict[Key, str]()
                    if verb == "accept":
                        whys = ((key, self._accept(key, message_id, audit)) for key in keys)
                        refused = {key: why for key, why in whys if why is not None}
                        keys = [key for key in keys if key not in refused]
                    named = (_key(table, key) for key in keys[: _SAMPLE - len(done.sample)])
                    reasons = ({**_key(table, key), "reason": why} for key, why in refused.items())
                    done = replace(
                        done,
                        count=done.count + len(keys),
                        spared=done.spared + batch.spared,
                        sample=(*done.sample, *named),
                        refused=(*done.refused, *reasons),
                    )
                    if not only_sample and (keys or refused):
                        is_quiet = False
                        yield done, keys
                        size = next(following, size)
        finally:
            # batches that are done stay done, however this ends
            self.emit(table.audited.format(verb), done.count, audit)
        if only_sample:
            total = sum(matching.rows for matching in counted)
            spared = sum(matching.spared for matching in counted)
            done = replace(done, count=total if most is None else min(most, total), spared=spared)
        if is_quiet:
            yield done, []

    def _accept(self, key: Key, message_id: str | None, audit: Audit | None) -> str | None:
        """Accept one message; returns why it is refused."""
        arrival_of, token = partial(self._accepted, key, message_id), secrets.token_hex(16)
        try:
            self.on_database(again, _accept, self.store, key, arrival_of, audit, token=token)
        except (UnusableMessage, UnreadableMessage) as error:
            return str(error)
        return None

    def _matching(
        self,
        verb: Verb,
        where: Filter[Any, Any],
        spared: str | None = None,
        *,
        needs_payload: bool = True,
    ) -> Sequence[Matching]:
        """Count what a change matches, in the order in which to change it; nothing is locked."""
        statuses = list(_statuses(verb, where))
        params = {
            **where.params(),
            "needs_payload": needs_payload and verb == "retry",
            "spared": spared,
        }
        rows = self.rows(f"{where.table.name}_count", params, {"status": statuses})
        counted = [
            Matching(status, consumer, int(count - skipped), int(skipped))
            for status, consumer, count, skipped in rows
        ]
        return sorted(counted, key=lambda matching: statuses.index(matching.status))

    def why_not(self, verb: str, where: Filter[Any, Any]) -> str:
        """Explain in a sentence why a change or a replay did nothing to the message that a filter names."""
        if where.table is QUARANTINE:
            return "No such quarantined message: `txbox quarantine list` shows what is there."
        consumer = getattr(where, "consumer", None)
        name = str(where.message_id) if consumer is None else f"{consumer} {where.message_id}"
        message: Any = next(iter(self.messages(where)), None)
        if message is None and where.table is OUTBOX:
            return (
                f"The outbox has no message {name!r}: what was sent is deleted, unless "
                "RelayPolicy.keep_sent keeps it."
            )
        if message is None:
            return f"{name}: there is no such message; `txbox list` shows which there are."
        if verb == "replay" and not message.has_payload:
            return f"{name}: its payload was not kept; set keep_payload= on the handler for messages to come."
        if verb == "replay":
            return f"{name} is {message.status}: only processed messages are replayed."
        if verb == "rehearse":
            return (
                f"{name} has no payload to run its handler with: it was not kept (keep_payload=)."
            )
        if verb == "edit" and message.status not in (Status.DEAD, Status.FAILED):
            return f"{name} is {message.status}: only dead and failed messages can be edited."
        if message.status == Status.PROCESSED and verb != "discard":
            if message.has_payload:
                return f"{name} is processed: `txbox replay` runs it again."
            return f"{name} is processed: its payload was not kept, so nothing can run it again."
        if (
            verb != "edit"
            and message.status not in where.table.changes[cast("Verb", verb)].statuses
        ):
            return f"{name} is {message.status}: {verb} does not apply."
        if verb in ("retry", "edit") and where.table is INBOX and not message.has_payload:
            return f"{name} has no payload: send it again from its producer."
        return f"{name} is locked by a transaction or a relay right now: try again."


def _rows(counted: Sequence[Matching]) -> int:
    return sum(matching.rows + matching.spared for matching in counted)


def audit_of(how: ChangeOptions) -> Audit | None:
    """Who changes something and why; None in a dry run."""
    return None if how.get("dry_run") else Audit.of(how.get("actor"), how.get("reason"))


def _key(table: Table, key: Key) -> dict[str, str]:
    values = (
        bytes(value).hex() if name == "hash" else str(value)
        for name, value in zip(table.key, key, strict=True)
    )
    return dict(zip(table.key, values, strict=True))


def _statuses(verb: Verb, where: Filter[Any, Any]) -> tuple[str, ...]:
    """The statuses to change, in the order in which to change them."""
    change = where.table.changes[verb]
    if where.status is None:
        return change.statuses if where.named else change.meant
    if where.status not in change.statuses:
        raise ConfigurationError(
            f"{verb} does not apply to the status {where.status!r}: use {' or '.join(change.statuses)}."
        )
    return (where.status,)


def _length(message: Message[Any]) -> int | None:
    return None if message.payload is None else len(message.payload)


def _version(message: Message[Any]) -> str:
    """Of what an edit may change: 32 hexadecimal digits."""
    content = (message.payload, message.content_type, list(message.headers))
    return sha256(repr(content).encode()).hexdigest()[:32]


def _check_edited(handler: Handler, arrival: Arrival, after: Message[Any], limits: Limits) -> None:
    """Check that a handler can read an edited message, and finds the same id and version in it.

    Raises:
        ConfigurationError: it does not.
    """
    try:
        if handler.options.message_id is not None:
            made = handler.arrival(replace(after, id=None), limits)
        else:
            made = handler.accepted(after, arrival.message_id)
        handler.bound(replace(made, message=after))
    except (UnusableMessage, Reject) as error:
        raise ConfigurationError(
            f"{handler.consumer} could not read the edited message: {error}"
        ) from None
    if made.message_id != arrival.message_id or made.message.sequence != arrival.message.sequence:
        raise ConfigurationError(
            f"The new payload has another id or version for {handler.consumer}: leave these as they are, or send a "
            "new message."
        )
    if after.payload is not None and len(after.payload) > limits.payload_bytes:
        raise ConfigurationError(
            f"The new payload has {len(after.payload)} bytes, the limit is {limits.payload_bytes}: raise "
            "Limits.payload_bytes."
        )


# -- transactions -----------------------------------------------------------------------------


@asynccontextmanager
async def transaction(db: Session, *, commit: bool = True) -> AsyncGenerator[Read]:
    """A transaction that ends with this block, rolled back when the change is refused; a dry run has none.

    Yields: what reads the rows to change.
    """
    if not commit:
        yield db.alone
        return
    await db.begin()
    try:
        yield db.execute
    except (ConfigurationError, UnusableMessage, UnreadableMessage):
        await db.rollback()
        raise
    await db.commit()


async def _batch(
    db: Session,
    store: InboxStore,
    verb: Verb,
    where: Filter[Any, Any],
    matching: Matching,
    audit: Audit | None,
    *,
    spared: str | None,
    after: Any,
    limit: int,
    to: str | None = None,
) -> Batch:
    """Change one batch in a transaction of its own, the oldest rows first.

    Args:
        where: what the operator asked for, possibly for all consumers.
        matching: the status and consumer of this batch; of the outbox it takes all statuses.
        audit: None only reads the batch, without locks.
        spared: rows with this error type are counted and skipped.
        after: the `cursor` of the batch before; None for the first.
        limit: rows that are looked at.
        to: the new route, for a reroute.

    Guarantee: rows locked or leased by a delivery or a relay are skipped without waiting; the change
        and its audit row are one commit.
    """
    table = where.table
    params = {
        **where.params(),
        **tables.mark_params(after),
        "status": matching.status,
        "consumer": matching.consumer,
        # without its payload a retried row would wait for ever
        "needs_payload": verb == "retry",
        "after": -1 if after is None else after,
        "limit": limit,
    }
    async with transaction(db, commit=audit is not None) as read:
        rows = {"status": _statuses(verb, where)} if table is OUTBOX else None
        query = f"{table.name}_{'preview' if audit is None else 'select'}"
        selected = await read(store.dialect.statement(query, params, rows))
        keys = [tuple(key) for *key, _, error in selected.rows if spared is None or error != spared]
        if audit is not None and keys:
            chosen = dict(zip(table.key, zip(*keys, strict=True), strict=True))
            name, named = f"{table.name}_{verb}", {"to": to}
            if table is QUARANTINE:
                name, named = "quarantine_end", {"status": "discarded"}
            await db.execute(store.dialect.statement(name, named, chosen))
            await db.execute(audit.row(store.dialect, table.audited.format(verb), where, len(keys)))
    cursor = None
    if len(selected.rows) == limit:
        *last, number, _ = selected.rows[-1]
        cursor = tuple(last) if table.cursor is None else number
    return Batch(keys, len(selected.rows) - len(keys), cursor)


async def _accept(
    db: Session,
    store: InboxStore,
    key: Key,
    arrival_of: Callable[[Message[Any]], Arrival],
    audit: Audit | None,
    *,
    token: str,
) -> None:
    """Store one quarantined message as pending.

    Args:
        arrival_of: gives the message the id and the hash to store it with.
        audit: None makes it a dry run.

    Raises:
        UnusableMessage: it cannot be accepted.
        UnreadableMessage: it was written through a codec that this app does not have, or that fails on it.

    Guarantee: the pending row, the end of the quarantine row and the audit row are one commit.
    """
    consumer, message_id, hashed = key
    hashed = bytes(hashed)
    named = {"consumer": consumer, "message_id": message_id, "hash": hashed}
    async with transaction(db, commit=audit is not None) as read:
        query = "quarantine_read" if audit is None else "quarantine_lock"
        waiting = await read(store.dialect.statement(query, named))
        if not waiting.rows:
            raise UnusableMessage("already accepted or discarded")
        kept_bytes, message = tables.quarantined(store.columns, waiting.rows[0])
        arrival = arrival_of(message)
        if not _whole(message, message_id, hashed, arrival):
            raise UnusableMessage(_PAYLOAD_CUT if kept_bytes else _PAYLOAD_GONE)
        if audit is None:
            stored = {"consumer": [consumer], "message_id": [arrival.message_id]}
            is_new = not (await read(store.dialect.statement("inbox_states", {}, stored))).rows
        else:
            is_new = bool(await store.store(db, consumer, [arrival], token=token))
        if not is_new:
            raise UnusableMessage(
                f"{consumer} has another message under the id {arrival.message_id}: give it one of its own (--id)"
            )
        if audit is not None:
            rows = {name: [value] for name, value in named.items()}
            ended = store.dialect.statement("quarantine_end", {"status": "accepted"}, rows)
            await db.execute(ended)
            where = QuarantineFilter(consumer=consumer, message_id=message_id, hash=hashed.hex())
            await db.execute(audit.row(store.dialect, "quarantine accept", where, 1))


async def _edit(
    db: Session,
    store: InboxStore,
    where: InboxFilter,
    edited: Callable[[Arrival], Message[Any]],
    audit: Audit | None,
) -> tuple[Message[Any], Message[Any]] | None:
    """Give one dead or failed message other content and a full new budget of attempts.

    Args:
        where: consumer and id.
        edited: makes the new message of the stored one.
        audit: None makes it a dry run.

    Returns:
        The message before and after; None when it is missing, locked, or neither dead nor failed.

    Raises:
        ConfigurationError: it cannot be read; or what `edited` raises.

    Guarantee: the change, the row that keeps what was there before and the audit row are one commit.
    """
    columns, named = store.columns, where.params()
    async with transaction(db, commit=audit is not None) as read:
        query = "edit_read" if audit is None else "edit_lock"
        stored = await read(store.dialect.statement(query, named))
        if not stored.rows:
            return None
        arrival = columns.arrival(str(where.consumer), stored.rows[0]).arrival
        if arrival.unreadable is not None:
            raise ConfigurationError(f"This message cannot be edited. {arrival.unreadable}")
        after = edited(arrival)
        bound = Row(str(where.consumer), arrival.message_id)
        if audit is not None:
            before = arrival.message.payload
            hashed = TOMBSTONE_HASH if before is None else sha256(before).digest()
            reason = f"edited by {audit.actor}" + (f": {audit.reason}" if audit.reason else "")
            kept = {
                **named,
                # encoded anew: a text is bound to its table
                **columns.content(arrival.message, bound._replace(hash=hashed)),
                "key_id": columns.key_id,
                "hash": hashed,
                "reason": reason,
            }
            await db.execute(store.dialect.statement("edit_set_aside", kept))
            content = {**named, **columns.content(after, bound), "key_id": columns.key_id}
            await db.execute(store.dialect.statement("edit_write", content))
            await db.execute(audit.row(store.dialect, "edit", where, 1))
    return arrival.message, after


async def again(
    db: Session, operation: Callable[..., Awaitable[T]], *args: Any, **options: Any
) -> T:
    """Repeat a small transaction that lost to another."""
    for tried in range(10):
        try:
            return await operation(db, *args, **options)
        except StoreError as error:
            if error.fault not in (Fault.CONFLICT, Fault.LOCK_TIMEOUT) or tried == 9:
                raise
            db.discard()
            await db.wait(_CONFLICT_PAUSE_S * (tried + 1))
    raise AssertionError("the last try returned or raised")


def _whole(message: Message[Any], message_id: str, hashed: bytes, arrival: Arrival) -> bool:
    """Say whether this is the payload that was hashed; without one, whether there was none."""
    if hashed == quarantine_hash(message, message_id):
        return True
    if message.payload is None:
        return hashed in (TOMBSTONE_HASH, sha256(b"").digest())
    return hashed == arrival.hash
