"""Alerts: what is told about trouble, one for each fingerprint and window, and how Slack, PagerDuty and mail show it.

An alert is staged in the transaction that makes a message dead, sets one aside or pauses a consumer, and sent by the
relay. What is open, and until when nothing more is said of it, is a row of txbox_job: the first transaction of a window
inserts it, and all others find it by its key, without a lock.

Source: docs/decisions/0063-alerts.md
"""

from __future__ import annotations

import json
import secrets
import smtplib
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import SMTP
from hashlib import sha256
from typing import Any, Literal, Self
from urllib.parse import quote, urlencode

from txbox.boundaries import is_contents
from txbox.boundaries import log as _log
from txbox.brokers.base import Destination, Publisher
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    MessageRefused,
    NotTried,
    UnusableMessage,
    check_duration,
)
from txbox.message import Message
from txbox.outbox import Outbox, Outgoing
from txbox.outbox.routes import Routes
from txbox.session import Transaction
from txbox.store import jobs
from txbox.store.dialect import Dialect
from txbox.text import UNMATCHED, age, counted, visible

#: Of the first channel; the others have a number behind it. No alert is about messages of these topics.
TOPIC = "txbox.alerts"
_PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"
# PagerDuty takes 1,024 characters of a summary, Slack 3,000 of a text, and people one line
_SUMMARY_CHARACTERS, _SUBJECT_CHARACTERS = 500, 200
_DIRECT_S = 10.0
# folded, a subject would begin with a space
_MAIL = SMTP.clone(max_line_length=998)
# the reply codes of SMTP from which on another attempt would not help
_FOR_GOOD = 500

State = Literal["open", "still", "resolved"]
_WORDS: dict[State, str] = {"open": "", "still": "Still: ", "resolved": "Resolved: "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """What is told: printable, in one line each, and without the content of any message.

    Attributes:
        key: the same for all alerts about one trouble: what PagerDuty calls dedup_key.
        state: "open" at once, "still" at the end of a window in which more came, "resolved".
        severity: "error" or "warning", as `txbox doctor` has it.
        code: as `txbox doctor` has it, or "database-away".
        subject: a consumer, a source, a route.
        count: how many messages it is about, where it is about messages.
        remedy: what to do.
        url: where the dashboard shows it; "" if nobody said where that is.
    """

    key: str
    state: State = "open"
    severity: str
    code: str
    subject: str
    summary: str
    count: int | None = None
    remedy: str = ""
    url: str = ""

    @classmethod
    def about(
        cls,
        code: str,
        subject: str,
        summary: str,
        *,
        group: str = "",
        page: str = "",
        **fields: Any,
    ) -> Self:
        """Describe a trouble.

        Args:
            group: tells apart what is alike otherwise, such as the fingerprint of a failure.
            page: of the dashboard, with its query.
        """
        digest = sha256(json.dumps([code, subject, group]).encode()).hexdigest()[:32]
        return cls(
            key=digest, code=code, subject=_line(subject, _SUBJECT_CHARACTERS),
            summary=_line(summary, _SUMMARY_CHARACTERS), url=page, **fields,
        )  # fmt: skip

    @property
    def title(self) -> str:
        return f"{_WORDS[self.state]}{self.summary}"


def commits_lost(
    consumer: str, count: int, since: datetime, until: datetime, *, complete: bool
) -> Alert:
    """The alert about messages that were settled, and that a failover or restore of the database has lost."""
    some = f"{'' if complete else 'at least '}{counted(count, 'message')}"
    return Alert.about(
        "commits-lost", consumer,
        f"{consumer}: the database has lost {some}, settled from {since:%Y-%m-%d %H:%M:%S} to {until:%H:%M:%S} UTC",
        group=since.isoformat(), severity="error", count=count,
        remedy="Have them sent again: the log of the worker has their ids. What is still there is a duplicate.",
    )  # fmt: skip


def page(name: str, query: Mapping[str, str]) -> str:
    """A page of the dashboard with what it is to show, relative to its root."""
    return f"{name}?{urlencode(query, quote_via=quote)}" if query else name


def dead(
    consumer: str, fingerprint: str | None, error_type: str, count: int = 1, *, more: bool = False
) -> Alert:
    """The alert about dead messages of a consumer that failed alike; with `more`, `count` is the least there are."""
    some = f"{'at least ' if more else ''}{counted(count, 'dead message')}"
    return Alert.about(
        "dead-messages", consumer, f"{consumer}: {some}: {fingerprint or error_type}",
        group=fingerprint or "", severity="warning", count=count,
        remedy="Look at the error, then retry or discard.",
        page=page("messages", {"consumer": consumer, "status": "dead"}),
    )  # fmt: skip


def quarantined(consumer: str) -> Alert:
    """The alert about a message that was set aside; the reason quotes strangers, so it stays in the table."""
    name = consumer or UNMATCHED
    return Alert.about(
        "quarantined-messages", name, f"{name}: a message was quarantined.", severity="warning", count=1,
        remedy="`txbox quarantine list` shows why; then accept or discard it.",
        page=page("quarantine", {"consumer": name}),
    )  # fmt: skip


def paused(consumer: str, reason: str) -> Alert:
    """The alert about a consumer that txbox pauses."""
    return Alert.about(
        "consumer-paused", consumer, f"{consumer} is paused: {reason}.", severity="warning",
        remedy="Mend the cause, then resume it.", page="workers",
    )  # fmt: skip


def database_away(name: str, for_s: float) -> Alert:
    """The alert that does not need the database."""
    return Alert.about(
        "database-away", name, f"The database {name} has not answered for {age(for_s)}.", severity="error",
        remedy="Nothing is processed, acknowledged or lost until it is back.",
    )  # fmt: skip


def _line(text: str, characters: int) -> str:
    shown = " ".join(visible(text[: characters + 1]).split())
    return shown if len(shown) <= characters else f"{shown[: characters - 1]}…"


# -- where they go ----------------------------------------------------------------------------

#: Makes the body of an alert, and says its content type.
Template = Callable[[Alert], tuple[bytes, str]]


def as_json(alert: Alert) -> tuple[bytes, str]:
    """The fields of `Alert` as JSON, for a destination that has no template of its own."""
    return json.dumps(asdict(alert), sort_keys=True).encode(), "application/json"


@dataclass(frozen=True, slots=True)
class Channel:
    """A destination of alerts, and how they look there.

    Args:
        template: applied when an alert is sent, so that secrets in it are in no table.
        name: of its route; by default the address of the destination.
    """

    destination: Destination
    template: Template = as_json
    name: str | None = None

    def rendered(self, message: Message[Any]) -> Message[Any]:
        """The message as it is sent, of a staged alert."""
        body, content_type = self.template(Alert(**json.loads(message.payload or b"")))
        return replace(message, payload=body, content_type=content_type)


def slack(webhook: str | Destination) -> Channel:
    """A channel of Slack (or Mattermost), by the address of an incoming webhook."""

    def template(alert: Alert) -> tuple[bytes, str]:
        sign = {"resolved": ":white_check_mark:"}.get(
            alert.state, ":red_circle:" if alert.severity == "error" else ":warning:"
        )
        lines = [f"{sign} {_for_slack(alert.title)}"]
        if alert.state != "resolved":
            lines += [_for_slack(alert.remedy)] if alert.remedy else []
            lines += [f"<{_for_slack(alert.url)}|Open the dashboard>"] if alert.url else []
        text = "\n".join(lines)
        return json.dumps({"text": text, "unfurl_links": False}).encode(), "application/json"

    return Channel(_http(webhook), template)


def _for_slack(text: str) -> str:
    # what is not escaped pings everybody, with <!channel>
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def pagerduty(routing_key: str, url: str | Destination = _PAGERDUTY) -> Channel:
    """A service of PagerDuty, by the key of its Events API v2 integration. `resolved` ends the incident."""

    def template(alert: Alert) -> tuple[bytes, str]:
        event: dict[str, Any] = {
            "routing_key": routing_key,
            "event_action": "resolve" if alert.state == "resolved" else "trigger",
            "dedup_key": alert.key,
            "client": "txbox",
            "payload": {
                "summary": alert.title, "source": alert.subject, "severity": alert.severity, "component": "txbox",
                "class": alert.code, "custom_details": {"count": alert.count, "remedy": alert.remedy},
            },
        }  # fmt: skip
        if alert.url:
            event["client_url"] = alert.url
            event["links"] = [{"href": alert.url, "text": "Dashboard"}]
        return json.dumps(event).encode(), "application/json"

    return Channel(_http(url), template)


def email(server: Smtp | Destination, sender: str, *to: str) -> Channel:
    """Mail, by a server; or by a destination that takes a whole message of RFC 5322 as its payload."""
    if not to or any(not address.strip() or "\n" in address for address in (sender, *to)):
        raise ConfigurationError("email() needs a sender, and at least one address to send to.")

    def template(alert: Alert) -> tuple[bytes, str]:
        mail = EmailMessage(policy=_MAIL)
        mail["Subject"] = f"[txbox] {alert.title}"
        mail["From"], mail["To"] = sender, ", ".join(to)
        mail["Auto-Submitted"] = "auto-generated"
        # mail clients put what is about one trouble together
        mail["References"] = f"<{alert.key}@txbox>"
        mail.set_content("\n\n".join(filter(None, (alert.title, alert.remedy, alert.url))) + "\n")
        return bytes(mail), "message/rfc822"

    return Channel(server, template)


def _http(to: str | Destination) -> Destination:
    if not isinstance(to, str):
        return to
    from txbox.brokers.http import Http

    return Http(to)


@dataclass(frozen=True, slots=True)
class Smtp:
    """A mail server, for `email`.

    Args:
        port: 465 speaks TLS from the start, any other begins it with STARTTLS.
        tls: False for a server on this machine that has none.
    """

    host: str
    port: int = 587
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = True

    def publisher(self) -> _Mailer:
        return _Mailer(self)


class _Mailer:
    """Sends each message as the mail that its payload is, on a connection for all of them."""

    event_prefix = ""

    def __init__(self, server: Smtp) -> None:
        self._server = server
        self.name = f"smtp:{server.host}:{server.port}"

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        try:
            client = self._connected(within_s / 2)
        except OSError as error:
            raise BrokerUnavailable(f"{self.name} cannot be used: {_said(error)}") from error
        answers: list[BrokerError | None] = []
        with suppress(OSError), client:
            for message in messages:
                try:
                    self._send(client, message)
                    answers.append(None)
                except (smtplib.SMTPResponseException, smtplib.SMTPRecipientsRefused) as error:
                    refusal = MessageRefused if min(_codes(error)) >= _FOR_GOOD else BrokerError
                    answers.append(refusal(f"The mail server refused: {_said(error)}"))
                except OSError as error:
                    # as all of smtplib's are
                    answers.append(BrokerError(f"The mail server broke off: {_said(error)}"))
                    break
        untried = NotTried("The mail server broke off before it.")
        return answers + [untried] * (len(messages) - len(answers))

    def _connected(self, timeout_s: float) -> smtplib.SMTP:
        server, context = self._server, ssl.create_default_context()
        if server.tls and server.port == smtplib.SMTP_SSL_PORT:
            client: smtplib.SMTP = smtplib.SMTP_SSL(
                server.host, server.port, timeout=timeout_s, context=context
            )
        else:
            client = smtplib.SMTP(server.host, server.port, timeout=timeout_s)
        try:
            if server.tls and server.port != smtplib.SMTP_SSL_PORT:
                client.starttls(context=context)
            if server.user is not None:
                client.login(server.user, server.password or "")
        except BaseException:
            client.close()
            raise
        return client

    def _send(self, client: smtplib.SMTP, message: Message[Any]) -> None:
        mail = message_from_bytes(message.payload or b"", policy=_MAIL)
        # the same each time: a copy is seen to be one
        mail["Message-ID"] = f"<{message.id}@txbox>"
        client.send_message(mail)

    def close(self) -> None: ...


def _codes(error: Exception) -> list[int]:
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return [code for code, _ in error.recipients.values()]
    return [error.smtp_code] if isinstance(error, smtplib.SMTPResponseException) else []


def _said(error: Exception) -> str:
    # without the server's words, which may quote addresses, or a password that was refused
    return " ".join([type(error).__name__, *map(str, _codes(error))])


# -- what an App has --------------------------------------------------------------------------


class Alerts:
    """Where alerts go, and how often.

    Args:
        channels: a destination gets the alert as JSON; `slack`, `pagerduty` and `email` make channels with templates.
        after: how long a source, a route or the database is in trouble before that is an alert.
        window: after an alert, nothing more is said of the same trouble for so long.
        dashboard: the address of its first page, for links.
    """

    def __init__(
        self,
        *channels: Channel | Destination,
        after: timedelta = timedelta(minutes=2),
        window: timedelta = timedelta(minutes=5),
        dashboard: str = "",
    ) -> None:
        if not channels:
            raise ConfigurationError("Alerts() needs a channel: slack(…), Http(…), email(…).")
        check_duration("after", after)
        check_duration("window", window)
        if min(after, window) <= timedelta(0):
            raise ConfigurationError("after= and window= must be longer than zero.")
        self.channels = [
            channel if isinstance(channel, Channel) else Channel(channel) for channel in channels
        ]
        self.after, self.window = after, window
        self.dashboard = dashboard.rstrip("/") + "/" if dashboard else ""

    @classmethod
    def of(cls, alerts: Alerts | Channel | Destination | None) -> Alerts | None:
        """What `App(alerts=…)` takes."""
        return alerts if alerts is None or isinstance(alerts, Alerts) else Alerts(alerts)


def _state(alert: Alert, newest: str | None = None) -> str:
    return json.dumps({"count": alert.count, "newest": newest, "alert": asdict(alert)})


class Alerting:
    """Stages the alerts of one App.

    Guarantee: an alert commits or rolls back with what it is about. Of all transactions in which a trouble is new, one
    stages it; none waits for another but for its COMMIT, and a transaction that stages several has nothing else to do
    before its own.
    """

    def __init__(self, alerts: Alerts, outbox: Outbox, routes: Routes) -> None:
        self.alerts = alerts
        self._outbox = outbox
        #: A topic for each channel.
        self.topics = [
            TOPIC if not number else f"{TOPIC}.{number + 1}"
            for number in range(len(alerts.channels))
        ]
        for topic, channel in zip(self.topics, alerts.channels, strict=True):
            routes.add(
                channel.destination, [topic], None, None, channel.name, render=channel.rendered
            )
        self._of = routes.of
        self._prefix = ""

    @property
    def routes(self) -> set[str]:
        """The routes on which alerts are sent; about their own trouble they cannot tell."""
        return {str(self._of(topic, None)) for topic in self.topics}

    @property
    def names(self) -> str:
        """What the rows of these channels begin with: another App on this database may have other ones."""
        if not self._prefix:
            digest = sha256(json.dumps(sorted(self.routes)).encode()).hexdigest()
            self._prefix = f"alert:{digest[:8]}:"
        return self._prefix

    async def opened(self, db: Transaction, dialect: Dialect, alerts: Iterable[Alert]) -> int:
        """Stage those that are not open, in a transaction that ends next; returns how many."""
        # sorted: two transactions that open several wait for each other instead of deadlocking
        by_name = {self.names + alert.key: alert for alert in alerts}
        count = 0
        for name in sorted(by_name):
            alert, token = by_name[name], secrets.token_hex(16)
            if await jobs.alert_row(db, dialect, name) is not None:
                continue
            await jobs.open_alert(
                db, dialect, name, token=token, state=_state(alert), window_s=self._window_s
            )
            row = await jobs.alert_row(db, dialect, name)
            if row is not None and row.token == token:
                await self._staged(db, dialect, alert)
                count += 1
        return count

    async def listed(self, db: Transaction, dialect: Dialect) -> dict[str, jobs.OpenAlert]:
        """The open alerts of these channels, by their keys."""
        rows = await jobs.alert_rows(db, dialect, self.names + "%")
        return {row.name.removeprefix(self.names): row for row in rows}

    async def said(
        self,
        db: Transaction,
        dialect: Dialect,
        row: jobs.OpenAlert,
        alert: Alert,
        newest: str | None,
    ) -> bool:
        """Begin the next window of an open alert, and stage it again if more came since it was last told.

        Args:
            newest: when the newest came; without it, their number tells.
        """
        said = json.loads(row.state)
        grown, waits = (alert.count or 0) > (said["count"] or 0), False
        if newest and said["newest"]:
            grown = newest > said["newest"]
        if grown:
            where = {"route": self._of(self.topics[0], None), "topic": self.topics[0]}
            found = await db.execute(dialect.statement("alert_waits", {**where, "key": alert.key}))
            waits = bool(found.rows[0][0])
        # what is not told now is told at the end of a later window
        state = row.state if waits else _state(alert, newest)
        mine = await jobs.say_alert(db, dialect, row.name, state=state, window_s=self._window_s)
        tell = mine and grown and not waits
        if tell:
            await self._staged(db, dialect, replace(alert, state="still"))
        return tell

    async def closed(self, db: Transaction, dialect: Dialect, alert: Alert) -> bool:
        """Close an alert whose window has ended, and stage that it is resolved."""
        mine = await jobs.close_alert(db, dialect, self.names + alert.key)
        if mine:
            await self._staged(db, dialect, replace(alert, state="resolved"))
        return mine

    @property
    def _window_s(self) -> float:
        return self.alerts.window.total_seconds()

    async def _staged(self, db: Transaction, dialect: Dialect, alert: Alert) -> None:
        body = self._linked(alert)
        messages = [
            Outgoing(topic, asdict(body), type=alert.code, key=alert.key) for topic in self.topics
        ]
        try:
            await self._outbox.staging(db, dialect, messages)
        except UnusableMessage as error:
            # a codec that fails on it must not keep the message from being recorded
            _log.error("The alert %r cannot be staged: %s", alert.title, error)

    def _linked(self, alert: Alert) -> Alert:
        where = self.alerts.dashboard
        return replace(alert, url=f"{where}{alert.url}" if where else "")

    def send(self, alert: Alert, message_id: str, topics: Collection[str]) -> dict[str, Exception]:
        """Send an alert at once, past the outbox: for when the database is away.

        Args:
            topics: of the channels that get it.

        Returns: topic → why it was not sent.
        """
        body, _ = as_json(self._linked(alert))
        errors: dict[str, Exception] = {}
        for topic, channel in zip(self.topics, self.alerts.channels, strict=True):
            if topic not in topics:
                continue
            message: Message[Any] = Message(
                id=message_id, topic=topic, type=alert.code, key=alert.key, payload=body
            )
            try:
                publisher: Publisher = channel.destination.publisher()
                try:
                    (answer,) = publisher.publish([channel.rendered(message)], _DIRECT_S)
                finally:
                    publisher.close()
                if answer is not None:
                    errors[topic] = answer
            except Exception as error:
                if not is_contents(error):
                    raise
                errors[topic] = error
        return errors
