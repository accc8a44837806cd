"""The status of one message, the reason, and the next step, in sentences for the command line and the pages.

`collect_facts` of `facts.py` reads; `explained` interprets.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from txbox.admin.facts import Holder, InInbox, InOutbox, MessageFacts, MessageRef
from txbox.admin.findings import LATE_S, Cause, Crew, cause_of_inbox, cause_of_outbox
from txbox.admin.reader import Application, has_app
from txbox.admin.tables import InboxMessage, OutboxMessage, QuarantinedMessage
from txbox.handlers import Handler
from txbox.identity import EFFECT_PREFIX
from txbox.outcome import Status
from txbox.processing.failure import BROKEN
from txbox.store.dialect import FIRST, LAST
from txbox.store.order import Waits
from txbox.text import age, capitalized, counted, moment

#: Information; done; continues without help; needs an operator; or unknown.
Severity = Literal["info", "ok", "waits", "stuck", "unchecked"]
#: Every kind of sentence, with its severity.
KINDS: dict[str, Severity] = {
    # done
    "processed": "ok", "discarded": "ok", "sent": "ok", "accepted": "ok", "pruned": "ok",
    # continues without help
    "held": "waits", "leased": "waits", "scheduled": "waits", "due": "waits", "delayed": "waits",
    "held key": "waits", "missing version": "waits", "no payload": "waits", "in doubt": "waits",
    # needs an operator
    "paused": "stuck",
    "lease expired": "stuck", "overdue": "stuck", "blocked key": "stuck", "no handler": "stuck", "unrouted": "stuck",
    "dead": "stuck", "broken": "stuck", "away": "stuck", "quarantined": "stuck", "unknown": "stuck",
    # what else there is to know
    "received": "info", "staged": "info", "last error": "info", "cause": "info", "caused": "info", "replay": "info",
    "replaced": "info", "dead letter": "info", "blocks key": "info", "payload dropped": "info", "remedy": "info",
    "unreadable": "info", "unchecked": "unchecked",
}  # fmt: skip
_NEVER_ENDED = ("LeaseExpired", "KilledItsProcess")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One fact about a message.

    Attributes:
        kind: one word or two for programs; docs/reference/cli.md lists them.
        command: what helps, without --app or --database.
        code: of the finding that `status`, `doctor` and the overview show about it; every stuck sentence of a message
            that exists has one.
    """

    kind: str
    severity: Severity
    text: str
    command: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A table that has the message, and the sentences about it, the cause first.

    Attributes:
        table: "inbox", "outbox" or "quarantine"; "" when it is nowhere.
    """

    table: str
    consumer: str | None
    status: str | None
    sentences: tuple[Sentence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The facts about a message, and their meaning."""

    message_id: str
    at: datetime
    places: tuple[Location, ...]
    found: MessageFacts

    @property
    def known(self) -> bool:
        """Whether any table has it."""
        return any(location.table for location in self.places)

    @property
    def severity(self) -> Severity:
        """The worst of its sentences."""
        order: tuple[Severity, ...] = ("stuck", "waits", "unchecked", "ok", "info")
        present = {said.severity for location in self.places for said in location.sentences}
        return next(grave for grave in order if grave in present)


# -- sentences --------------------------------------------------------------------------------


def explained(facts: MessageFacts, app: Application) -> Explanation:
    """Interpret the facts."""
    explainer = _Explainer(facts, app)
    places = [_location("inbox", row.message, explainer.inbox(row)) for row in facts.inbox]
    if facts.outbox is not None:
        places.append(_location("outbox", facts.outbox.message, explainer.outbox(facts.outbox)))
    places += [_location("quarantine", row, explainer.quarantine(row)) for row in facts.quarantine]
    if not places:
        sentences = tuple(explainer.nowhere())
        places = [Location(table="", consumer=facts.consumer, status=None, sentences=sentences)]
    return Explanation(message_id=facts.message_id, at=facts.at, places=tuple(places), found=facts)


def _location(
    table: str, message: InboxMessage | OutboxMessage | QuarantinedMessage, said: Iterator[Sentence]
) -> Location:
    consumer = None if isinstance(message, OutboxMessage) else message.consumer
    return Location(table=table, consumer=consumer, status=message.status, sentences=tuple(said))


def _say(
    kind: str, text: str, command: str | None = None, *, code: str | None = None, late: bool = True
) -> Sentence:
    """One sentence; what is not late yet is not stuck."""
    severity = KINDS[kind] if late or KINDS[kind] != "stuck" else "waits"
    return Sentence(
        kind=kind, severity=severity, text=text, command=command, code=code if severity == "stuck" else None,
    )  # fmt: skip


def _command(verb: str, *words: str, **options: str) -> str:
    flags = [f"--{name}={value}" for name, value in options.items()]
    dashes = ["--"] if any(word.startswith("-") for word in words) else []
    return shlex.join(["txbox", *verb.split(), *flags, *dashes, *words])


def _first_line(text: str | None) -> str:
    """The first line of an error text, behind a colon; "" without a text, as for people who may not see it."""
    line = (text or "").partition("\n")[0][:200]
    return line and f": {line}"


def _transaction(holder: Holder) -> str:
    words = (
        f"server process {holder.pid}",
        holder.application and f"application {holder.application!r}",
        holder.user and f"user {holder.user!r}",
        holder.state or "whose state this role may not see",
        holder.open_s is not None and f"open for {age(holder.open_s)}",
    )
    return ", ".join(word for word in words if word)


def _linked(link: MessageRef) -> str:
    where = "outbox" if link.consumer is None else link.consumer
    return f"{link.message_id} ({where}, {link.topic}, {link.status})"


def _cause(named: str, links: Sequence[MessageRef]) -> Sentence:
    causes = " and ".join(map(_linked, links))
    return _say("cause", f"Caused by {causes or f'{named}, which has no row here'}.")


def _last_error(
    begins: str, message: InboxMessage | OutboxMessage, show: str
) -> Iterator[Sentence]:
    if message.error_type:
        fingerprint = getattr(message, "fingerprint", None)
        alike = f" (fingerprint {fingerprint!r})" if fingerprint else ""
        said = f"{begins} {message.error_type}{alike}{_first_line(message.error)}"
        yield _say("last error", said, show)


@dataclass(slots=True)
class _Explainer:
    """Writes the sentences about each location, the cause first."""

    facts: MessageFacts
    app: Application

    @property
    def crew(self) -> Crew:
        return self.facts.crew

    def when(self, at: datetime | None) -> str:
        if at is None:
            return "an unknown time"
        if at in (FIRST, LAST):
            return f"a time {moment(at)}"
        seconds = (at - self.facts.at).total_seconds()
        distance = f"in {age(seconds)}" if seconds > 0 else f"{age(-seconds)} ago"
        return f"{moment(at)} ({distance})"

    def past(self, at: datetime | None) -> bool:
        return at is not None and at <= self.facts.at

    def late(self, due: datetime | None) -> bool:
        return due is not None and (self.facts.at - due).total_seconds() > LATE_S

    @property
    def has_handlers(self) -> bool:
        return len(self.app.handlers) > 0

    @property
    def has_app(self) -> bool:
        """There is an App, and not only its database: its policies and routes are known, too."""
        return has_app(self.app)

    # -- the inbox ----------------------------------------------------------------------------

    def inbox(self, row: InInbox) -> Iterator[Sentence]:
        message = row.message
        matching = self.app.handlers.matching(message.topic, message.type, message.consumer)
        handler = matching[0] if matching else None
        if row.held:
            who = " and ".join(map(_transaction, row.holders))
            yield _say(
                "held",
                "An open transaction holds its row"
                + (f": {who}" if who else "; the server names it to roles with the right PROCESS")
                + ". Nobody else can run, retry or discard it until that transaction ends: a running handler, or a "
                "client that was left open.",
            )
        match message.status:
            case Status.PROCESSING:
                yield from self._processing(row)
            case Status.PENDING | Status.FAILED:
                yield from self._unfinished(row, handler)
            case Status.DEAD:
                yield from self._dead(row, handler)
            case Status.DISCARDED:
                yield _say(
                    "discarded",
                    f"An operator gave it up at {self.when(message.processed_at)}: it never runs, and a copy that "
                    "arrives is a duplicate. `txbox_audit` has who did it and why.",
                )
                yield from _last_error("Before that it failed with", message, _show(message))
            case _:
                yield from self._processed(message, handler)
        if message.unreadable is not None:
            yield _say(
                "unreadable", f"{message.unreadable} A run of it fails, and costs an attempt."
            )
        yield from self._doubt(message, handler)
        yield from self._received(message)
        yield from self._links(row)
        yield from self._inbox_unchecked(row)

    def _processing(self, row: InInbox) -> Iterator[Sentence]:
        message, until, most = row.message, row.message.lease_until, self.app.lease.max_starts
        if until is None:
            yield _say(
                "broken",
                "Its handler committed in the middle of its own transaction, so what it wrote is unknown. The next "
                "rescue makes it dead, and says so.",
                "txbox rescue",
                code="lease-expired",
            )
            return
        if not self.past(until):
            at_work = self.crew.running(message.consumer)
            if not at_work:
                said = (
                    f"Leased until {self.when(until)}, but no process that runs {message.consumer} has been seen in "
                    "the last half minute: its worker is probably gone, and the row is rescued after that time."
                )
            else:
                by = (
                    f"worker {at_work[0].host}:{at_work[0].pid}"
                    if len(at_work) == 1
                    else "a worker"
                )
                said = (
                    f"Held by {by} until {self.when(until)} (renewed while it runs). If that worker is gone, the row "
                    "is rescued then."
                )
            yield _say("leased", said)
            return
        starts = f"{counted(message.starts, 'run')} of it never ended"
        after, every = f"failed and runs again: {starts}", "each third of Lease.duration"
        if self.has_app:
            every = f"every {age(self.app.lease.duration.total_seconds() / 3)}"
            after += f", and with {most} (Lease.max_starts) it is dead"
            if message.starts >= most:
                after = f"dead: {starts} (Lease.max_starts is {most})"
        locked = " A rescue skips it while a transaction locks it." if row.held else ""
        yield _say(
            "lease expired",
            f"Its worker is gone or hangs: the lease ran out at {self.when(until)}, without being renewed. Any "
            f"`txbox run` or `txbox maintain` of this database rescues it, {every}; of these, "
            f"{len(self.crew.rescuing()) or 'none'} {'is' if len(self.crew.rescuing()) < 2 else 'are'} running. "
            f"It then is {after}.{locked}",
            _command("rescue", consumer=message.consumer),
            code="lease-expired",
            late=self.late(until),
        )

    def _unfinished(self, row: InInbox, handler: Handler | None) -> Iterator[Sentence]:
        message, due, consumer = row.message, row.message.next_attempt_at, row.message.consumer
        key = (consumer, message.message_id)
        pause = self.crew.pause_of(consumer)
        if pause is not None:
            why = "" if pause.reason is None else f" ({pause.reason})"
            yield _say(
                "paused",
                f"Its consumer {consumer} was paused at {self.when(pause.paused_at)} by {pause.actor}{why}: "
                "nobody runs its messages until it is resumed.",
                _command("resume", consumer),
                code="consumer-paused",
            )
        cause = cause_of_inbox(self.crew, self.app, consumer, message.topic, message.type)
        orphan = cause.code.startswith("orphan")
        if orphan:
            yield _say(
                "no handler",
                f"No worker takes it: {cause.why}. {cause.remedy}, or discard the message.",
                _command("discard", *key),
                code=cause.code,
                late=pause is None and message.has_payload and self.late(due),
            )
        if message.waits_for is not None:
            yield self._waits(row, message.waits_for, handler)
        if not message.has_payload:
            yield _say(
                "no payload",
                "Its payload is not in the table, so no worker can run it from there: it goes on when its broker or "
                "its producer delivers it again.",
            )
            return
        failures = f"after {counted(message.attempts, 'failure')}, " if message.attempts else ""
        if due is not None and not self.past(due):
            budget = f" of {handler.options.retry.max_attempts}" if handler is not None else ""
            what = f"attempt {message.attempts + 1}{budget}" if failures else "its first run"
            yield _say(
                "scheduled",
                f"It waits for its time: {failures}{what} is due at {self.when(due)}.",
                _command("retry", *key) if message.status == Status.FAILED else None,
            )
        elif message.waits_for is None and not row.held:
            since = capitalized(f"{failures}it has been due since {self.when(due)}")
            if due is None:
                said = "No time is set at which it is due, so no worker takes it: something else has written its row."
                yield _say("overdue", said, _command("retry", *key), code="never-due")
            elif pause is not None or orphan:
                pass
            elif not self.late(due):
                takes = "a worker of its consumer takes it next"
                if cause.code == "consumer-unserved":
                    takes += ", once one runs: none has been seen in the last half minute"
                yield _say("due", f"{since}: {takes}.")
            else:
                said = f"{since}, and was not taken: {cause.why}. {cause.remedy}."
                yield _say("overdue", said, "txbox run MODULE:APP", code=cause.code)
        if message.status == Status.FAILED:
            yield from _last_error("It failed last with", message, _show(message))

    def _waits(self, row: InInbox, what: Waits, handler: Handler | None) -> Sentence:
        message, ahead = row.message, row.ahead
        if what.message_id is None:
            then = ""
            if handler is not None:
                until = self.when(message.received_at + handler.options.gaps.wait)
                then = (
                    f" If it has not come by {until} (GapPolicy.wait), this one is processed without it, and the "
                    "event SequenceGap is raised."
                )
            return _say(
                "missing version",
                f"It is version {message.sequence} of key {message.key!r}, and version {what.version} has not "
                f"arrived: it waits for that one.{then}",
            )
        first, kind, code, late = "", "held key", None, True
        helps = _command("explain", what.message_id, consumer=message.consumer)
        retry = _command("retry", message.consumer, what.message_id)
        lease = None if ahead is None else ahead.lease_until
        if what.status in (Status.FAILED, Status.PENDING):
            first = f" and due at {self.when(what.next_attempt_at)}"
            helps = retry if what.status == Status.FAILED else helps
        elif what.status == Status.PROCESSING and self.past(lease):
            first = (
                f" by a worker whose lease ran out at {self.when(lease)}: it must be rescued first"
            )
            kind, helps = "blocked key", _command("rescue", consumer=message.consumer)
            code, late = "lease-expired", self.late(lease)
        elif what.status == Status.PROCESSING and lease is not None:
            first = f" by a worker, leased until {self.when(lease)}"
        elif what.status == Status.DEAD:
            first = "; dead messages hold their key up (dead_blocks=True) until somebody retries or discards them"
            kind, helps, code = "blocked key", retry, "dead-messages"
        if ahead is not None and ahead.error_type:
            first += f". That one failed with {ahead.error_type}{_first_line(ahead.error)}"
        return _say(
            kind,
            f"It waits for {what.message_id}, an earlier message of its key {message.key!r}, which is {what.status}"
            f"{first.rstrip('.')}.",
            helps,
            code=code,
            late=late,
        )

    def _dead(self, row: InInbox, handler: Handler | None) -> Iterator[Sentence]:
        message, key = row.message, (row.message.consumer, row.message.message_id)
        retry, discard = _command("retry", *key), _command("discard", *key)
        since = f"Dead since {self.when(message.updated_at)}"
        if message.error_type == BROKEN.error_type:
            yield _say(
                "broken",
                f"{since}: its handler ended the transaction that txbox began, so what it wrote is unknown. Look at "
                "its effects; then retry it if they are not there, or discard it if they are.",
                retry,
                code="dead-messages",
            )
        else:
            count = f"after {counted(message.attempts, 'attempt')}"
            if message.error_type == "KilledItsProcess":
                count = f"{counted(message.starts, 'run')} of it never ended"
            yield _say(
                "dead",
                f"{since}, {count}. It will not run again unless you retry it.",
                retry if message.has_payload else discard,
                code="dead-messages",
            )
            yield from _last_error("Its last error was", message, _show(message))
        remedy = "Its payload was not kept, so it cannot be retried: send it again under another id, or discard it."
        if message.has_payload:
            remedy = (
                "A retry gives it a full new budget of attempts, due at once, under its id; `txbox rehearse` shows "
                "beforehand what its handler would do, and `txbox edit` corrects its payload."
            )
        if message.fingerprint:
            same = shlex.quote(message.fingerprint)
            remedy += f" `txbox retry --fingerprint {same}` means all that failed in the same way."
        yield _say("remedy", remedy)
        if row.letter is not None:
            yield _say("dead letter", f"A dead letter about it is {_linked(row.letter)}.")
        if handler is not None and handler.options.dead_blocks and message.key is not None:
            yield _say(
                "blocks key",
                f"While it is dead, the later messages of its key {message.key!r} wait (dead_blocks=True).",
                discard,
            )

    def _processed(self, message: InboxMessage, handler: Handler | None) -> Iterator[Sentence]:
        failures = sum(past.status in ("failed", "dead") for past in message.history)
        tries = f" after {counted(failures, 'recorded failure')}" if failures else ""
        size = message.result_bytes
        kept = f"; what it returned is kept ({size} bytes)" if size else ""
        yield _say(
            "processed",
            f"It was processed at {self.when(message.processed_at)}{tries}{kept}. Its effects in the database were "
            "committed with that; a copy that arrives is a duplicate.",
        )
        if message.has_payload:
            replay = _command("replay", message.consumer, message.message_id)
            said = "Its payload is kept: a replay runs its handler once more."
            yield _say("replay", said, replay)
        else:
            why = f" (keep_payload={handler.options.keep_payload!r})" if handler is not None else ""
            yield _say("replay", f"Its payload is not kept{why}: it cannot be replayed.")

    def _doubt(self, message: InboxMessage, handler: Handler | None) -> Iterator[Sentence]:
        """Say of work outside of a transaction that it may have been done."""
        effect = message.consumer.startswith(EFFECT_PREFIX)
        outside = effect or (handler is not None and not handler.options.transactional)
        if not outside or message.status in (Status.PROCESSED, Status.DISCARDED):
            return
        leased = message.status == Status.PROCESSING and not self.past(message.lease_until)
        if leased or not (message.starts or message.error_type in _NEVER_ENDED):
            return
        key = (message.consumer, message.message_id)
        what = "effect" if effect else "handler, which has no transaction,"
        yield _say(
            "in doubt",
            f"Its {what} may have been carried out: a run began, and its end was not recorded. It is carried out "
            f"again, under the same idempotency key {':'.join(key)}: ask the other side whether it has happened, and "
            "discard it if so.",
            None if message.status == Status.PROCESSING else _command("discard", *key),
        )

    def _received(self, message: InboxMessage) -> Iterator[Sentence]:
        about = {"type": message.type, "key": message.key, "version": message.sequence}
        words = [f", {name} {value!r}" for name, value in about.items() if value is not None]
        origin = ", ".join(f"{name} {value}" for name, value in message.origin.items())
        came = f" Its event happened at {self.when(message.time)}." if message.time else ""
        if origin:
            came += f" It came from {origin}; the broker has been told that it is stored."
        yield _say(
            "received",
            f"It arrived at {self.when(message.received_at)}, with topic {message.topic!r}{''.join(words)}.{came}",
        )

    def _links(self, row: InInbox) -> Iterator[Sentence]:
        if row.cause_id is not None:
            yield _cause(row.cause_id, row.causes)
        if row.caused:
            yield _say("caused", f"It has caused {'; '.join(map(_linked, row.caused))}.")
        elif row.message.status == Status.PROCESSED:
            yield _say(
                "caused",
                "Nothing that it staged is here any more, if it staged anything: what a relay has sent is deleted, "
                "unless RelayPolicy.keep_sent keeps it.",
            )

    def _inbox_unchecked(self, row: InInbox) -> Iterator[Sentence]:
        if row.held is None:
            why = "this database has one writer at a time, and does not say who."
            if self.app.store.dialect.has("explain_locked"):
                why = "this role may not lock rows."
            said = f"Whether an open transaction holds its row could not be checked: {why}"
            yield _say("unchecked", said)
        unfinished = (Status.PENDING, Status.FAILED, Status.DEAD)
        if not self.has_handlers and row.message.status in unfinished:
            yield _say(
                "unchecked",
                "Whether a handler still takes it, and whether it waits for others of its key, could not be checked: "
                "only the App knows its handlers. Give --app.",
            )

    # -- the outbox ---------------------------------------------------------------------------

    def outbox(self, row: InOutbox) -> Iterator[Sentence]:
        message = row.message
        attempts = counted(message.attempts, "attempt")
        retry, discard, show = (
            _command(f"outbox {verb}", message.message_id) for verb in ("retry", "discard", "show")
        )
        match message.status:
            case "due":
                yield from self._behind(row)
                yield from self._due(row)
            case "delayed":
                yield _say(
                    "delayed",
                    f"It was staged with a delay: it leaves at {self.when(message.next_attempt_at)}, and not before.",
                )
                yield from self._unrouted(message)
            case "leased":
                yield _say(
                    "leased",
                    f"A relay is sending it, leased until {self.when(message.lease_until)}. If that relay is gone, "
                    "another one sends it then, under the same id.",
                )
            case "failed":
                yield _say(
                    "scheduled",
                    f"Its destination did not confirm it, {attempts} so far: the next one is due at "
                    f"{self.when(message.next_attempt_at)}.",
                    retry,
                )
                yield from _last_error("It failed last with", message, show)
                yield from self._behind(row)
                yield from self._unrouted(message)
            case "dead":
                yield _say(
                    "dead",
                    f"It was given up after {attempts}: it does not leave by itself. A retry gives it a full new "
                    "budget, and it leaves under its id, before the later ones of its key.",
                    retry,
                    code="dead-outgoing",
                )
                yield from _last_error("Its last error was", message, show)
            case "discarded":
                yield _say(
                    "discarded",
                    "An operator gave it up: it is not sent. `txbox_audit` has who did it and why.",
                )
            case _:
                yield _say("sent", f"Its destination confirmed it at {self.when(message.sent_at)}.")
        if message.status in ("due", "failed") and row.ahead is not None:
            yield _say("remedy", "Discarding it unblocks the key.", discard)
        key = f", key {message.key!r}" if message.key is not None else ""
        yield _say(
            "staged",
            f"It was staged at {self.when(message.staged_at)} for topic {message.topic!r}{key}, "
            f"to go by route {message.route or 'any'!r}.",
        )
        if message.cause_id is not None:
            yield _cause(f"{message.cause_consumer or ''} {message.cause_id}".strip(), row.causes)

    def _due(self, row: InOutbox) -> Iterator[Sentence]:
        message = row.message
        late = row.ahead is None and self.late(message.next_attempt_at or message.staged_at)
        unrouted = list(self._unrouted(message, late=late))
        yield from unrouted
        if any(said.kind != "unchecked" for said in unrouted):
            return
        cause = self._cause(message)
        if not late:
            rest = "." if row.ahead is not None else "; waiting for a relay."
            yield _say("due", f"Ready to send since {self.when(message.staged_at)}{rest}")
            return
        yield _say(
            "overdue",
            f"Ready to send since {self.when(message.staged_at)}, and not sent: {cause.why}. {cause.remedy}.",
            "txbox relay MODULE:APP",
            code=cause.code,
        )

    def _cause(self, message: OutboxMessage) -> Cause:
        sort = message.route, message.topic, message.type, message.cause_consumer
        return cause_of_outbox(self.crew, self.app, *sort)

    def _unrouted(self, message: OutboxMessage, *, late: bool = False) -> Iterator[Sentence]:
        """Say that no relay takes it, that its relay cannot send, or that this is not known; nothing where one does."""
        cause = self._cause(message)
        if cause.code == "relay-away":
            yield _say(
                "away", f"It waits: {cause.why}. {cause.remedy}.", "txbox workers", code=cause.code
            )
        elif cause.code == "orphan-route":
            yield _say(
                "unrouted",
                f"No relay takes topic {message.topic!r} from there: {cause.why}. It waits until one does; or send it "
                "another way.",
                _command("outbox reroute", message.message_id, to="ROUTE"),
                code=cause.code,
                late=late,
            )
        elif not self.has_app and cause.code == "route-unserved":
            yield _say(
                "unchecked",
                f"Its route is {message.route or 'any'!r}. Which App has a relay for that could not be checked: only "
                "the App knows its routes. Give --app.",
            )

    def _behind(self, row: InOutbox) -> Iterator[Sentence]:
        message, ahead, what = row.message, row.ahead, row.message.waits_for
        if what is None:
            return
        text = f"Waiting for {what.message_id} (same key {message.key!r}), which must be sent first"
        command = _command("explain", str(what.message_id))
        if ahead is not None:
            text += f" and is {ahead.status}"
            for until in (ahead.lease_until, ahead.next_attempt_at):
                text += "" if until is None else f" until {self.when(until)}"
            if ahead.status == "failed":
                command = _command("outbox retry", ahead.message_id)
        yield _say("held key", f"{text}.", command)

    # -- the quarantine, and nowhere ----------------------------------------------------------

    def quarantine(self, row: QuarantinedMessage) -> Iterator[Sentence]:
        words, mark = (row.consumer, row.message_id), row.hash[:12]
        when = self.when(row.received_at)
        if row.status == "replaced":
            yield _say(
                "replaced",
                f"Its payload was {mark} until {self.when(row.updated_at)}; it was {row.reason}. Copies of what came "
                "first are duplicates all the same; `txbox quarantine show --reveal` prints what was there.",
            )
            return
        if row.status != "quarantined":
            yield _say(
                row.status,
                f"A copy with payload {mark}, set aside at {when}, was {row.status} at "
                f"{self.when(row.updated_at)}: {row.reason}",
            )
            return
        times = f", and came {row.seen} times" if row.seen > 1 else ""
        text = f"A copy with payload {mark} was set aside at {when}{times}: {row.reason}"
        options = {"hash": mark}
        if any(first.message.consumer == row.consumer for first in self.facts.inbox):
            text += " The message that came first under this id is untouched: the copy needs an id of its own."
            options["id"] = "NEW-ID"
        accept = _command("quarantine accept", *words, **options)
        yield _say("quarantined", text, accept, code="quarantined-messages")
        if row.payload_bytes is None:
            said = "It has no payload, or that was dropped: then it must be sent again."
            yield _say("payload dropped", said)
        yield _say(
            "remedy",
            "It waits until somebody accepts or discards it. `txbox quarantine show --reveal` prints its payload.",
            _command("quarantine discard", *words, hash=mark),
        )

    def nowhere(self) -> Iterator[Sentence]:
        facts, app = self.facts, self.app
        where = f"the inbox or the quarantine of {facts.consumer}"
        if facts.consumer is None:
            where = f"the inbox of {counted(len(facts.searched), 'consumer')}, the outbox or the quarantine"
        yield _say(
            "unknown",
            f"No row of this id is in {where}. Ids are compared byte by byte, and those of CloudEvents begin with "
            "their source.",
            "txbox list",
        )
        if facts.held_for:
            yield _say(
                "held",
                f"An open transaction holds this id in the inbox of {', '.join(facts.held_for)}: it is being "
                "processed for the first time, and is seen once that commits.",
            )
        elif facts.writers:
            yield _say(
                "held",
                "It may be processed for the first time right now: a row is seen once its transaction commits, and "
                f"these have written to the inbox: {'; '.join(map(_transaction, facts.writers))}.",
            )
        if facts.last_attempt_at is not None:
            yield _say(
                "pruned",
                f"It was here: an attempt of {self.when(facts.last_attempt_at)} is recorded. Its row was pruned.",
            )
        kept = "Retention.processed, 30 days by default"
        if self.has_app:
            kept = f"{age(app.retention.processed.total_seconds())}, Retention.processed"
        sent = ", which deletes its row."
        if app.relaying.keep_sent > timedelta(0):
            sent = f" (kept for {age(app.relaying.keep_sent.total_seconds())})."
        yield _say(
            "remedy",
            "It never arrived; or it arrived so long ago that it was pruned (processed and discarded messages are "
            f"kept for {kept}); or it was outgoing and has been sent{sent}",
        )
        if not any(map(app.store.dialect.has, ("explain_writers", "explain_locked"))):
            yield _say(
                "unchecked",
                "Whether an open transaction has just inserted it could not be checked: this database does not say.",
            )
        if not self.has_handlers:
            yield _say(
                "unchecked",
                "Whether a handler would take it, and which id that would give it, could not be checked: give --app.",
            )


def _show(message: InboxMessage) -> str:
    return _command("show", message.consumer, message.message_id)
