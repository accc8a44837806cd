"""One message, wherever it stands: in sentences why it stands there, and what helps.

`look` of `found.py` reads everything; `explained` says what it means. The command line and the pages show the same
sentences.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from txbox.admin.found import Found, Holder, InInbox, InOutbox, Link
from txbox.admin.replay import Application
from txbox.admin.tables import (
    QuarantinedMessage,
)
from txbox.admin.views import age
from txbox.effects import PREFIX
from txbox.handlers import Handler
from txbox.outcome import Status
from txbox.processing.failure import BROKEN

#: What somebody who looks at it should think: it is told, all is well, it goes on by itself, it needs somebody,
#: or this could not be found out.
Severity = Literal["info", "ok", "waits", "stuck", "unchecked"]
#: Every kind of sentence, with its severity.
KINDS: dict[str, Severity] = {
    # done
    "processed": "ok", "discarded": "ok", "sent": "ok", "accepted": "ok", "pruned": "ok",
    # goes on by itself
    "held": "waits", "leased": "waits", "scheduled": "waits", "due": "waits", "delayed": "waits",
    "held key": "waits", "missing version": "waits", "no payload": "waits",
    # needs somebody
    "paused": "stuck",
    "lease expired": "stuck", "overdue": "stuck", "blocked key": "stuck", "no handler": "stuck", "unrouted": "stuck",
    "dead": "stuck", "broken": "stuck", "in doubt": "stuck", "quarantined": "stuck", "unknown": "stuck",
    # what else there is to know
    "received": "info", "staged": "info", "last error": "info", "cause": "info", "caused": "info", "replay": "info",
    "replaced": "info", "dead letter": "info", "blocks key": "info", "payload dropped": "info", "remedy": "info",
    "unchecked": "unchecked",
}  # fmt: skip
_NEVER_ENDED = ("LeaseExpired", "KilledItsProcess")
# what is due for longer than this should have been taken
_LATE_S = 60.0


# -- what it means ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One thing to know.

    Attributes:
        kind: what is said, as one word for programs; docs/reference/cli.md lists them.
        command: what helps, to be completed with --app or --database.
    """

    kind: str
    severity: Severity
    text: str
    command: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One place where the message stands, and what there is to say of it, the cause first.

    Attributes:
        table: "inbox", "outbox" or "quarantine"; "" when it stands nowhere.
    """

    table: str
    consumer: str | None
    status: str | None
    sentences: tuple[Sentence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was found of a message, and what that means."""

    message_id: str
    at: datetime
    places: tuple[Place, ...]
    found: Found

    @property
    def known(self) -> bool:
        """True when it stands anywhere."""
        return any(place.table for place in self.places)

    @property
    def severity(self) -> Severity:
        """The gravest of its sentences."""
        order: Sequence[Severity] = ("stuck", "waits", "unchecked", "ok", "info")
        given = {said.severity for place in self.places for said in place.sentences}
        return next(grave for grave in order if grave in given)


# -- saying -----------------------------------------------------------------------------------


def explained(found: Found, app: Application) -> Explanation:
    """Say what it means that this was found."""
    places = [
        *(_Inbox(found, app, row).place() for row in found.inbox),
        *([] if found.outbox is None else [_Outbox(found, app, found.outbox).place()]),
        *(_quarantined(found, app, row) for row in found.quarantine),
    ]
    return Explanation(
        message_id=found.message_id,
        at=found.at,
        places=tuple(places) or (_unknown(found, app),),
        found=found,
    )


def _command(verb: str, *words: str, **options: str) -> str:
    given = [f"--{name}={value}" for name, value in options.items()]
    dashes = ["--"] if any(word.startswith("-") for word in words) else []
    return shlex.join(["txbox", *verb.split(), *given, *dashes, *words])


def _when(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return "an unknown time"
    seconds = (moment - now).total_seconds()
    told = f"in {age(seconds)}" if seconds > 0 else f"{age(-seconds)} ago"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC ({told})"


def _many(number: int, noun: str) -> str:
    return (
        f"{number} {noun}"
        if number == 1
        else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
    )


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0][:200]


def _transaction(holder: Holder) -> str:
    told = [f"server process {holder.pid}"]
    if holder.application:
        told.append(f"application {holder.application!r}")
    if holder.user:
        told.append(f"user {holder.user!r}")
    if holder.state is None:
        told.append("whose state this role may not see")
    else:
        told.append(holder.state)
    if holder.open_s is not None:
        told.append(f"open for {age(holder.open_s)}")
    return ", ".join(told)


def _linked(link: Link) -> str:
    where = "outbox" if link.consumer is None else link.consumer
    return f"{link.message_id} ({where}, topic {link.topic}: {link.status})"


@dataclass(slots=True)
class _Saying:
    """Sentences about one place, in the order in which they are added."""

    found: Found
    app: Application
    sentences: list[Sentence] = field(default_factory=list[Sentence])

    def say(self, kind: str, text: str, command: str | None = None) -> None:
        said = Sentence(kind=kind, severity=KINDS[kind], text=text, command=command)
        self.sentences.append(said)

    def when(self, moment: datetime | None) -> str:
        return _when(moment, self.found.at)

    def past(self, moment: datetime | None) -> bool:
        return moment is not None and moment <= self.found.at

    def at_work(self, *, consumer: str | None = None, route: str | None = None) -> int:
        """How many processes are heard of that run a consumer, that relay a route, or that rescue rows."""
        return sum(
            worker.state != "silent"
            and (consumer is None or consumer in worker.consumers)
            and (route is None or route in worker.routes)
            and (consumer is not None or route is not None or worker.kind != "relay")
            for worker in self.found.workers
        )

    @property
    def has_handlers(self) -> bool:
        return len(self.app.handlers) > 0

    @property
    def has_app(self) -> bool:
        """There is an App, and not only its database: its policies are known, too."""
        return self.has_handlers or (self.app.routes is not None and bool(self.app.routes.all()))


class _Inbox(_Saying):
    """What there is to say of a message of one consumer."""

    def __init__(self, found: Found, app: Application, row: InInbox) -> None:
        super().__init__(found, app)
        self.row = row
        self.message = row.message
        message = row.message
        matching = app.handlers.matching(message.topic, message.type, message.consumer)
        self.handler: Handler | None = matching[0] if matching else None
        self.key = (message.consumer, message.message_id)

    def place(self) -> Place:
        self._hold()
        match self.message.status:
            case Status.PROCESSING:
                self._processing()
            case Status.PENDING | Status.FAILED:
                self._unfinished()
            case Status.DEAD:
                self._dead()
            case Status.DISCARDED:
                self._discarded()
            case _:
                self._processed()
        self._doubt()
        self._history()
        self._links()
        self._unchecked()
        message = self.message
        return Place(
            table="inbox",
            consumer=message.consumer,
            status=message.status,
            sentences=tuple(self.sentences),
        )

    def _hold(self) -> None:
        if not self.row.held:
            return
        who = " and ".join(map(_transaction, self.row.holders))
        told = (
            f": {who}" if who else "; the server tells who that is to roles with the right PROCESS"
        )
        self.say(
            "held",
            f"An open transaction holds its row{told}. Nobody else can run, retry or discard it until that "
            "transaction ends: a handler that runs, or a client that was left open.",
        )

    # -- by status ----------------------------------------------------------------------------

    def _processing(self) -> None:
        message, until = self.message, self.message.lease_until
        if until is None:
            self.say(
                "broken",
                "Its handler committed in the middle of its own transaction, so what it wrote is unknown. The next "
                "rescue makes it dead, and says so.",
                "txbox rescue",
            )
            return
        every = age(self.app.lease.duration.total_seconds() / 3) if self.has_app else None
        if not self.past(until):
            self.say(
                "leased",
                f"A worker has leased it until {self.when(until)}, and renews that while its handler runs. If the "
                "worker died, the row is rescued after that time.",
            )
            return
        count = self.at_work()
        rescuers = (
            f"{_many(count, 'process')} of these heard of" if count else "none of these is heard of"
        )
        most = self.app.lease.max_starts
        after = (
            f"It then is failed and runs again: {_many(message.starts, 'run')} of it never ended"
        )
        if self.has_app and message.starts >= most:
            after = f"It then is dead: {_many(message.starts, 'run')} of it never ended (Lease.max_starts is {most})"
        elif self.has_app:
            after += f", and with {most} (Lease.max_starts) it is dead"
        held = (
            " A rescue leaves it alone while the transaction that holds it is open."
            if self.row.held
            else ""
        )
        self.say(
            "lease expired",
            f"The worker that leased it is gone or hangs: its lease ran out at {self.when(until)}, without being "
            f"renewed. Any `txbox run` or `txbox maintain` of this database rescues it, "
            f"{f'every {every}' if every else 'each third of Lease.duration'}; {rescuers}. "
            f"{after}.{held}",
            _command("rescue", consumer=message.consumer),
        )

    def _unfinished(self) -> None:
        message = self.message
        self._paused()
        if self.has_handlers and self.handler is None:
            self._no_handler()
        if message.waits_for is not None:
            self._waits()
        if not message.has_payload:
            self.say(
                "no payload",
                "Its payload is not in the table, so no worker can run it from there: it goes on when its broker or "
                "its producer delivers it again.",
            )
            return
        due = message.next_attempt_at
        failures = _many(message.attempts, "failure")
        tried = f"after {failures}, " if message.attempts else ""
        if due is not None and not self.past(due):
            budget = ""
            if self.handler is not None:
                budget = f" of {self.handler.options.retry.max_attempts}"
            what = (
                f"attempt {message.attempts + 1}{budget}" if message.attempts else "its first run"
            )
            self.say(
                "scheduled",
                f"It waits for its time: {tried}{what} is due at {self.when(due)}.",
                _command("retry", *self.key) if message.status == Status.FAILED else None,
            )
        elif message.waits_for is None and not self.row.held:
            waited_s = 0.0 if due is None else (self.found.at - due).total_seconds()
            late = waited_s > _LATE_S
            self.say(
                "overdue" if late else "due",
                (f"After {failures}, it" if message.attempts else "It")
                + f" is due since {self.when(due)}"
                + (
                    f", and no worker has taken it: {self._who_runs()}"
                    if late
                    else ": a worker of its consumer takes it next."
                ),
                "txbox run MODULE:APP" if late else None,
            )
        if message.status == Status.FAILED and message.error_type:
            self._last_error("It failed last with")

    def _who_runs(self) -> str:
        consumer = self.message.consumer
        count = self.at_work(consumer=consumer)
        if not count:
            return f"no process that runs consumer {consumer} has been heard of in the last half minute."
        return (
            f"{_many(count, 'process')} that may run consumer {consumer}, so it is behind; `txbox status` tells how "
            "much waits."
        )

    def _paused(self) -> None:
        pause = next(
            (one for one in self.found.paused if one.consumer == self.message.consumer), None
        )
        if pause is not None:
            why = "" if pause.reason is None else f" ({pause.reason})"
            self.say(
                "paused",
                f"Its consumer {pause.consumer} was paused at {self.when(pause.paused_at)} by {pause.actor}{why}: "
                "nobody runs its messages until it is resumed.",
                _command("resume", pause.consumer),
            )

    def _no_handler(self) -> None:
        message = self.message
        known = message.consumer in self.app.handlers.consumers()
        lacks = (
            f"has no handler of {message.consumer} for topic {message.topic!r} with type {message.type!r} any more"
            if known
            else f"has no consumer {message.consumer}"
        )
        self.say(
            "no handler",
            f"This App {lacks}: none of its workers takes the row. Register the handler again, or give the message up; "
            "if another App consumes it, ask with that one.",
            _command("discard", *self.key),
        )

    def _waits(self) -> None:
        message, ahead, what = self.message, self.row.ahead, self.message.waits_for
        assert what is not None
        if what.message_id is None:
            wait = self.handler.options.gaps.wait if self.handler is not None else None
            until = None if wait is None else message.received_at + wait
            then = (
                ""
                if until is None
                else f" If it has not come by {self.when(until)} (GapPolicy.wait), this one is processed without it, "
                "and the event SequenceGap is raised."
            )
            self.say(
                "missing version",
                f"It is version {message.sequence} of key {message.key!r}, and version {what.version} has not arrived: "
                f"it waits for that one.{then}",
            )
            return
        first = f"It waits for {what.message_id}, an earlier message of its key {message.key!r}, which is {what.status}"
        named = (message.consumer, str(what.message_id))
        helps = _command("explain", str(what.message_id), consumer=message.consumer)
        kind = "held key"
        match what.status:
            case Status.FAILED | Status.PENDING:
                first += f" and due at {self.when(what.next_attempt_at)}"
                if what.status == Status.FAILED:
                    helps = _command("retry", *named)
            case Status.PROCESSING if ahead is not None and self.past(ahead.lease_until):
                first += f" by a worker whose lease ran out at {self.when(ahead.lease_until)}: it must be rescued first"
                kind, helps = "blocked key", _command("rescue", consumer=message.consumer)
            case Status.PROCESSING if ahead is not None and ahead.lease_until is not None:
                first += f" by a worker that has leased it until {self.when(ahead.lease_until)}"
            case Status.DEAD:
                first += "; dead messages hold their key up (dead_blocks=True) until somebody retries or discards them"
                kind, helps = "blocked key", _command("retry", *named)
            case _:
                pass
        if ahead is not None and ahead.error_type:
            first += f". That one failed with {ahead.error_type}: {_first_line(ahead.error)}"
        self.say(kind, f"{first.rstrip('.')}.", helps)

    def _dead(self) -> None:
        message = self.message
        since = self.when(message.updated_at)
        if message.error_type == BROKEN.error_type:
            self.say(
                "broken",
                f"It is dead since {since}: its handler ended the transaction that txbox began, so what it wrote is "
                "unknown. Look at its effects; then retry it if they are not there, or discard it if they are.",
                _command("retry", *self.key),
            )
        else:
            count = (
                f"{_many(message.starts, 'run')} of it never ended"
                if message.error_type == "KilledItsProcess"
                else f"after {_many(message.attempts, 'attempt')}"
            )
            self.say(
                "dead",
                f"It is dead since {since}, {count}: nobody runs it again by itself.",
                _command("retry", *self.key)
                if message.has_payload
                else _command("discard", *self.key),
            )
            self._last_error("Its last error was")
        alike = (
            f" `txbox retry --fingerprint {shlex.quote(message.fingerprint)}` means all that failed alike."
            if message.fingerprint
            else ""
        )
        self.say(
            "remedy",
            (
                "A retry gives it a full new budget of attempts, due at once, under its id; `txbox rehearse` shows "
                f"beforehand what its handler would do, and `txbox edit` corrects its payload.{alike}"
                if message.has_payload
                else "Its payload was not kept, so it cannot be retried: send it again under another id, or discard it."
            ),
        )
        if self.row.letter is not None:
            self.say("dead letter", f"A dead letter about it is {_linked(self.row.letter)}.")
        options = None if self.handler is None else self.handler.options
        if options is not None and options.dead_blocks and message.key is not None:
            self.say(
                "blocks key",
                f"While it is dead, the later messages of its key {message.key!r} wait (dead_blocks=True).",
                _command("discard", *self.key),
            )

    def _discarded(self) -> None:
        self.say(
            "discarded",
            f"An operator gave it up at {self.when(self.message.processed_at)}: it never runs, and a copy that arrives "
            "is a duplicate. `txbox_audit` has who did it and why.",
        )
        if self.message.error_type:
            self._last_error("Before that it failed with")

    def _processed(self) -> None:
        message = self.message
        failures = [past for past in message.history if past.status in ("failed", "dead")]
        tries = f" after {_many(len(failures), 'recorded failure')}" if failures else ""
        kept = (
            f"; what it returned is kept ({message.result_bytes} bytes)"
            if message.result_bytes
            else ""
        )
        self.say(
            "processed",
            f"It was processed at {self.when(message.processed_at)}{tries}{kept}. Its effects in the database were "
            "committed with that; a copy that arrives is a duplicate.",
        )
        if message.has_payload:
            self.say(
                "replay",
                "Its payload is kept: a replay runs its handler once more.",
                _command("replay", *self.key),
            )
        else:
            why = (
                f" (keep_payload={self.handler.options.keep_payload!r})"
                if self.handler is not None
                else ""
            )
            self.say("replay", f"Its payload is not kept{why}: it cannot be replayed.")

    def _doubt(self) -> None:
        """Say of work outside of a transaction that it may have been done."""
        message = self.message
        effect = message.consumer.startswith(PREFIX)
        outside = effect or (self.handler is not None and not self.handler.options.transactional)
        if not outside or message.status in (Status.PROCESSED, Status.DISCARDED):
            return
        leased = message.status == Status.PROCESSING and not self.past(message.lease_until)
        if leased or not (message.starts or message.error_type in _NEVER_ENDED):
            return
        what = "effect" if effect else "handler, which has no transaction,"
        self.say(
            "in doubt",
            f"Its {what} may have been carried out: a run began, and its end was not recorded. It is carried out "
            f"again, under the same idempotency key {message.consumer}:{message.message_id}: ask the other side by it "
            "whether it has happened, and discard it if so.",
            None if message.status == Status.PROCESSING else _command("discard", *self.key),
        )

    # -- for all ------------------------------------------------------------------------------

    def _last_error(self, begins: str) -> None:
        message = self.message
        alike = f" (fingerprint {message.fingerprint!r})" if message.fingerprint else ""
        self.say(
            "last error",
            f"{begins} {message.error_type}{alike}: {_first_line(message.error)}",
            _command("show", *self.key),
        )

    def _history(self) -> None:
        message = self.message
        about = f"topic {message.topic!r}"
        about += f", type {message.type!r}" if message.type is not None else ""
        about += f", key {message.key!r}" if message.key is not None else ""
        about += f", version {message.sequence}" if message.sequence is not None else ""
        origin = ", ".join(f"{name} {value}" for name, value in message.origin.items())
        come = (
            f" It came from {origin}; the broker has been told that it is stored." if origin else ""
        )
        self.say(
            "received",
            f"It arrived at {self.when(message.received_at)}, with {about}.{come}",
        )

    def _links(self) -> None:
        row = self.row
        if row.cause_id is not None:
            where = (
                " and ".join(map(_linked, row.causes)) or f"{row.cause_id}, which has no row here"
            )
            self.say("cause", f"It follows from {where}.")
        if row.caused:
            self.say("caused", f"It has caused {'; '.join(map(_linked, row.caused))}.")
        elif row.message.status == Status.PROCESSED:
            self.say(
                "caused",
                "Nothing that it staged is here any more, if it staged anything: what a relay has sent is deleted, "
                "unless RelayPolicy.keep_sent keeps it.",
            )

    def _unchecked(self) -> None:
        message, row = self.message, self.row
        if row.held is None:
            self.say(
                "unchecked",
                "Whether an open transaction holds its row could not be checked: "
                + (
                    "this role may not lock rows."
                    if self.app.store.dialect.has("explain_locked")
                    else "this database has one writer at a time, and does not say who."
                ),
            )
        if not self.has_handlers and message.status in (Status.PENDING, Status.FAILED, Status.DEAD):
            self.say(
                "unchecked",
                "Whether a handler still takes it, and whether it waits for others of its key, could not be checked: "
                "only the App knows its handlers. Give --app.",
            )


class _Outbox(_Saying):
    """What there is to say of an outgoing message."""

    def __init__(self, found: Found, app: Application, row: InOutbox) -> None:
        super().__init__(found, app)
        self.row = row
        self.message = row.message

    def place(self) -> Place:
        message = self.message
        retry, discard = (
            _command(f"outbox {verb}", message.message_id) for verb in ("retry", "discard")
        )
        match message.status:
            case "due":
                self._behind()
                self._due()
            case "delayed":
                self.say(
                    "delayed",
                    f"It was staged with a delay: it leaves at {self.when(message.next_attempt_at)}, and not before.",
                )
                self._route()
            case "leased":
                self.say(
                    "leased",
                    f"A relay has leased it until {self.when(message.lease_until)} and is sending it. If that relay "
                    "died, another one sends it after that time, under the same id.",
                )
            case "failed":
                self.say(
                    "scheduled",
                    f"Its destination did not confirm it, {_many(message.attempts, 'attempt')} so far: the next one is "
                    f"due at {self.when(message.next_attempt_at)}.",
                    retry,
                )
                self._error("It failed last with")
                self._behind()
                self._route()
            case "dead":
                self.say(
                    "dead",
                    f"It was given up after {_many(message.attempts, 'attempt')}: nobody sends it by itself. A retry "
                    "gives it a full new budget, and it leaves under its id, before the later ones of its key.",
                    retry,
                )
                self._error("Its last error was")
            case "discarded":
                self.say(
                    "discarded",
                    "An operator gave it up: it is not sent. `txbox_audit` has who did it and why.",
                )
            case _:
                self.say("sent", f"Its destination confirmed it at {self.when(message.sent_at)}.")
        if message.status in ("due", "failed") and self.row.ahead is not None:
            self.say("remedy", "Giving it up lets its key go on.", discard)
        self._origin()
        return Place(
            table="outbox", consumer=None, status=message.status, sentences=tuple(self.sentences)
        )

    def _due(self) -> None:
        message = self.message
        waited_s = (self.found.at - (message.next_attempt_at or message.staged_at)).total_seconds()
        late = waited_s > _LATE_S and self.row.ahead is None
        takes = self._route()
        if takes is False:
            return
        count = self.at_work(route=message.route)
        relays = (
            f"the relays with the route {message.route or 'any'!r} are behind ({_many(count, 'process')} heard of)"
            if count
            else f"no relay with the route {message.route or 'any'!r} has been heard of in the last half minute"
        )
        self.say(
            "overdue" if late else "due",
            f"It was staged at {self.when(message.staged_at)} and may leave"
            + (f": {relays}, or its destination is away." if late else "."),
            "txbox relay MODULE:APP" if late else None,
        )

    def _route(self) -> bool | None:
        """Say where it goes; returns whether a relay of this App takes it, None where that is not known."""
        message, routes = self.message, self.app.routes
        named = message.route or "any"
        if routes is None or not self.has_app:
            self.say(
                "unchecked",
                f"Its route is {named!r}. Which App has a relay for that could not be checked: only the App knows its "
                "routes. Give --app.",
            )
            return None
        served = routes.all()
        if any(route.name == message.route for route in served):
            return True
        unrouted = not message.route and any(route.names(message.topic) for route in served)
        if unrouted or routes.adopts(
            message.route, message.topic, message.type, message.cause_consumer
        ):
            return True
        if message.route and self.at_work(route=message.route):
            return True
        have = ", ".join(repr(route.name) for route in served) or "none"
        self.say(
            "unrouted",
            f"No relay of this App takes it: its route is {named!r}, its topic {message.topic!r}, and this App's "
            f"routes are {have}. It waits until an App with that route runs; or send it another way.",
            _command("outbox reroute", message.message_id, to="ROUTE"),
        )
        return False

    def _behind(self) -> None:
        message, ahead, what = self.message, self.row.ahead, self.message.waits_for
        if what is None:
            return
        told = f"It is behind {what.message_id}, which is of its key {message.key!r} and must leave first"
        command: str | None = _command("explain", str(what.message_id))
        if ahead is not None:
            told += f" and is {ahead.status}"
            if ahead.lease_until is not None:
                told += f" until {self.when(ahead.lease_until)}"
            if ahead.next_attempt_at is not None:
                told += f" until {self.when(ahead.next_attempt_at)}"
            if ahead.status == "failed":
                command = _command("outbox retry", ahead.message_id)
        self.say("held key", f"{told}.", command)

    def _error(self, begins: str) -> None:
        message = self.message
        if message.error_type:
            self.say(
                "last error",
                f"{begins} {message.error_type}: {_first_line(message.error)}",
                _command("outbox show", message.message_id),
            )

    def _origin(self) -> None:
        message = self.message
        key = f", key {message.key!r}" if message.key is not None else ""
        self.say(
            "staged",
            f"It was staged at {self.when(message.staged_at)} for topic {message.topic!r}{key}, "
            f"to go by route {message.route or 'any'!r}.",
        )
        if message.cause_id is not None:
            where = " and ".join(map(_linked, self.row.causes)) or (
                f"{message.cause_consumer or ''} {message.cause_id}".strip()
                + ", which has no row here"
            )
            self.say("cause", f"It follows from {where}.")


def _quarantined(found: Found, app: Application, row: QuarantinedMessage) -> Place:
    saying = _Saying(found, app)
    words, mark = (row.consumer, row.message_id), row.hash[:12]
    when = saying.when(row.received_at)
    if row.status == "replaced":
        saying.say(
            "replaced",
            f"Its payload was {mark} until {saying.when(row.updated_at)}; it was {row.reason}. Copies of what came "
            "first are duplicates all the same; `txbox quarantine show --reveal` prints what was there.",
        )
    elif row.status != "quarantined":
        saying.say(
            row.status,
            f"A copy with payload {mark}, set aside at {when}, was {row.status} at {saying.when(row.updated_at)}: "
            f"{row.reason}",
        )
    else:
        original = any(first.message.consumer == row.consumer for first in found.inbox)
        times = f", and came {row.seen} times" if row.seen > 1 else ""
        saying.say(
            "quarantined",
            f"A copy with payload {mark} was set aside at {when}{times}: {row.reason}"
            + (
                " The message that came first under this id is untouched: the copy needs an id of its own."
                if original
                else ""
            ),
            _command(
                "quarantine accept", *words, hash=mark, **({"id": "NEW-ID"} if original else {})
            ),
        )
        if row.payload_bytes is None:
            saying.say(
                "payload dropped",
                "It has no payload, or that was dropped: then it must be sent again.",
            )
        saying.say(
            "remedy",
            "It waits until somebody accepts or discards it. `txbox quarantine show --reveal` prints its payload.",
            _command("quarantine discard", *words, hash=mark),
        )
    return Place(
        table="quarantine",
        consumer=row.consumer,
        status=row.status,
        sentences=tuple(saying.sentences),
    )


def _unknown(found: Found, app: Application) -> Place:
    saying = _Saying(found, app)
    where = (
        f"the inbox of {_many(len(found.searched), 'consumer')}, the outbox or the quarantine"
        if found.consumer is None
        else f"the inbox or the quarantine of {found.consumer}"
    )
    saying.say(
        "unknown",
        f"No row of this id is in {where}. Ids are compared byte by byte, and those of CloudEvents begin with "
        "their source.",
        "txbox list",
    )
    if found.held_for:
        saying.say(
            "held",
            f"An open transaction holds this id in the inbox of {', '.join(found.held_for)}: it is being processed for "
            "the first time, and is seen once that commits.",
        )
    elif found.writers:
        saying.say(
            "held",
            "It may be processed for the first time right now: a row is seen once its transaction commits, and these "
            f"have written to the inbox: {'; '.join(map(_transaction, found.writers))}.",
        )
    if found.last_attempt_at is not None:
        saying.say(
            "pruned",
            f"It was here: an attempt of {saying.when(found.last_attempt_at)} is recorded. Its row was pruned.",
        )
    kept = _retention(app) if saying.has_app else "Retention.processed, 30 days by default"
    keeps_sent = app.relaying.keep_sent > timedelta(0)
    saying.say(
        "remedy",
        "It never arrived; or it arrived so long ago that it was pruned (processed and discarded messages are kept for "
        f"{kept}); or it was outgoing and has been sent"
        + (
            f" (kept for {age(app.relaying.keep_sent.total_seconds())})."
            if keeps_sent
            else ", which deletes its row."
        ),
    )
    if not app.store.dialect.has("explain_writers") and not app.store.dialect.has("explain_locked"):
        saying.say(
            "unchecked",
            "Whether an open transaction has just inserted it could not be checked: this database does not say.",
        )
    if not saying.has_handlers:
        saying.say(
            "unchecked",
            "Whether a handler would take it, and which id that would give it, could not be checked: give --app.",
        )
    return Place(table="", consumer=found.consumer, status=None, sentences=tuple(saying.sentences))


def _retention(app: Application) -> str:
    return f"{age(app.retention.processed.total_seconds())}, Retention.processed"
