"""A shop with a month behind it and a bad night in front of it, so that everybody looks at the same pages.

`make demo-data DATABASE=sqlite:///demo-shop.db` fills an empty database, and `txbox ui --database …` shows it. With
scale 1 there are two million rows of twelve consumers in the inbox and 300,000 in the outbox. A deploy broke billing
five hours ago, and the search behind search-index is down; gdpr-erasure is paused, nobody runs loyalty, a producer of
crm-sync reuses its ids, and RabbitMQ refuses the login. One seed and one time make the same rows on every database.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import txbox
from tests.support.databases import Raw
from txbox import App
from txbox.identity import scoped_id
from txbox.maintenance.pruning import FOLDED_AFTER_S
from txbox.store.activity import BOUNDS_S, COUNTED, Histogram, bucket_of

INBOX, OUTBOX, QUARANTINED = 2_000_000, 300_000, 12_000
DAYS = 30
#: How long before now things began.
DEPLOYED, PAUSED, FLOODED, REFUSED, SEARCH_DOWN, UNSERVED = (
    timedelta(minutes=minutes) for minutes in (320, 185, 95, 47, 35, 70)
)
DEPLOYED_BEFORE = timedelta(days=3, hours=2)
#: Of counts by the minute.
_COUNTED_DAYS = 7
_STEPS = {**FOLDED_AFTER_S, 1: 0}
# rows at a time, each with its transaction
_AT_ONCE = 20_000


class Stream(NamedTuple):
    """Events of a topic, how many of a hundred they are, and who consumes them."""

    topic: str
    type: str
    share: int
    consumers: tuple[str, ...]


STREAMS = (
    Stream("orders", "order.placed", 32, ("billing", "ledger", "fraud-check", "analytics")),
    Stream("payments", "payment.captured", 20, ("ledger", "loyalty", "audit-trail")),
    Stream("shipments", "shipment.sent", 16, ("shipping", "mailer")),
    Stream("customers", "customer.changed", 15, ("crm-sync", "search-index", "audit-trail")),
    Stream("stock", "stock.moved", 16, ("inventory", "search-index")),
    Stream("erasures", "erasure.requested", 1, ("gdpr-erasure",)),
)
CONSUMERS = tuple(sorted({name for stream in STREAMS for name in stream.consumers}))
_PER_EVENT = sum(stream.share * len(stream.consumers) for stream in STREAMS) / 100


class Failure(NamedTuple):
    """How a consumer fails, for how long before now, and for which share of its messages."""

    since: timedelta
    share: float
    error_type: str
    error: str
    line: str
    status: str


#: The last one that applies counts.
FAILURES: dict[str, tuple[Failure, ...]] = {
    "billing": (
        Failure(
            timedelta(days=DAYS), 0.0004, "CardDeclined", "the card of order {n} was declined", "billing.py:charge",
            "dead",
        ),
        Failure(DEPLOYED, 0.35, "KeyError", "'currency'", "billing.py:take_payment", "dead"),
        Failure(timedelta(minutes=18), 0.5, "KeyError", "'currency'", "billing.py:take_payment", "failed"),
    ),
    "audit-trail": (
        Failure(
            timedelta(days=DAYS), 0.0004, "ValidationError", "1 validation error for Entry: actor is required",
            "audit.py:record", "dead",
        ),
    ),
    "search-index": (
        Failure(
            SEARCH_DOWN, 1.0, "ConnectionError", "search-1.internal:9200 refused the connection", "search.py:index",
            "failed",
        ),
    ),
    "mailer": (
        Failure(
            timedelta(days=6), 0.002, "SMTPServerDisconnected", "Connection unexpectedly closed", "mail.py:send",
            "dead",
        ),
    ),
    "crm-sync": (
        Failure(
            timedelta(days=2), 0.001, "TimeoutError", "crm.example.com did not answer within 10 s", "crm.py:push",
            "discarded",
        ),
    ),
}  # fmt: skip
#: Since when messages of a consumer only wait.
WAITING = {"gdpr-erasure": PAUSED, "loyalty": UNSERVED}
#: Seconds that most messages of a consumer take.
USUAL_S = {"billing": 0.4, "mailer": 1.5, "crm-sync": 0.8, "analytics": 0.006}
#: Who sends what is quarantined: most of it one producer.
_FLOODS = ("//legacy-crm", "//shop-web")
ROUTES = ("kafka", "partners", "rabbitmq")
_TOPICS_OUT = {"kafka": "invoices", "partners": "partner.orders", "rabbitmq": "mails"}


def fill(view: Raw, *, scale: float = 1.0, seed: int = 7, now: datetime | None = None) -> None:
    """Fill the tables, which must be empty.

    Args:
        scale: 1 for two million rows of the inbox.
        now: until when the shop ran; by default this moment.
    """
    shop = _Shop(scale, seed, now or datetime.now(UTC))
    if view.product == "postgresql":
        # the guard takes these rows for those of a handler that has closed its transaction
        view.execute("SET txbox.token = 'demo'")
        view.execute("SET txbox.closed = 'demo'")
    _insert(view, "inbox", _INBOX_COLUMNS, shop.inbox())
    for table, (columns, rows) in shop.beside().items():
        _insert(view, table, columns, rows)
    match view.product:
        case "postgresql":
            view.execute("VACUUM ANALYZE")
        case "mysql":
            view.rows("ANALYZE TABLE txbox_inbox, txbox_outbox, txbox_quarantine, txbox_activity")
        case _:
            view.execute("ANALYZE")


_INBOX_COLUMNS = (
    "consumer", "message_id", "status", "topic", "type", "key", "received_at", "updated_at", "processed_at",
    "payload_hash", "attempts", "next_attempt_at", "lease_until", "token", "error_type", "error", "fingerprint",
    "content_type", "payload", "has_payload",
)  # fmt: skip
_ATTEMPT_COLUMNS = (
    "consumer", "message_id", "attempt", "status", "error_type", "error", "fingerprint", "recorded_at",
)  # fmt: skip
_HASH = sha256(b"{}").digest()


class _Shop:
    """What one seed makes of it; the rows of the inbox are counted while they are made."""

    def __init__(self, scale: float, seed: int, now: datetime) -> None:
        self._scale, self._pick, self._now = scale, Random(seed), now
        self._events = max(200, round(INBOX * scale / _PER_EVENT))
        self._counted_from = now - timedelta(days=_COUNTED_DAYS)
        self._minute = int(now.timestamp()) // 60
        self._counts: dict[tuple[int, str, str], list[int]] = defaultdict(
            lambda: [0] * len(COUNTED)
        )
        self._times: dict[tuple[int, str, str], list[int]] = defaultdict(
            lambda: [0] * (len(BOUNDS_S) + 1)
        )
        self._attempts: list[tuple[Any, ...]] = []

    def inbox(self) -> Iterator[tuple[Any, ...]]:
        """In order of arrival."""
        pick = self._pick
        streams = pick.choices(STREAMS, [stream.share for stream in STREAMS], k=self._events)
        for n, stream in enumerate(streams):
            # more by day than by night
            day = DAYS * (n + 0.5) / self._events
            ago = timedelta(days=DAYS - day + 0.1 * math.sin(2 * math.pi * day))
            at = self._now - max(ago, timedelta(seconds=1))
            for consumer in stream.consumers:
                yield self._message(n, stream, consumer, at)

    def _message(self, n: int, stream: Stream, consumer: str, at: datetime) -> tuple[Any, ...]:
        pick, ago = self._pick, self._now - at
        failure = next(
            (one for one in reversed(FAILURES.get(consumer, ())) if ago <= one.since and pick.random() < one.share),
            None,
        )  # fmt: skip
        took_s = USUAL_S.get(consumer, 0.03) * pick.lognormvariate(0, 0.7)
        message_id = f"{stream.type.partition('.')[0]}-{n:07x}"
        key = f"customer-{pick.randrange(5_000)}"
        payload = b'{"customer": "%d", "items": [{"sku": "A-%d", "count": 1}]}' % (
            n % 5000,
            n % 300,
        )
        self._count("consumer", consumer, at, "received")
        if failure is not None:
            attempts = 8 if failure.status == "dead" else 1 + pick.randrange(4)
            fingerprint = f"{failure.error_type} at {failure.line}"
            error = failure.error.format(n=n)
            tried = at
            for attempt in range(1, attempts + 1):
                tried = min(at + timedelta(seconds=20 * (attempt - 1) ** 2), self._now)
                is_last = attempt == attempts and failure.status == "dead"
                became = "dead" if is_last else "failed"
                self._count("consumer", consumer, tried, became)
                if attempts - attempt < 3:
                    self._attempts.append(
                        (consumer, message_id, attempt, became, failure.error_type, error, fingerprint, tried)
                    )  # fmt: skip
            due = (
                self._now + timedelta(minutes=pick.randrange(1, 40))
                if failure.status == "failed"
                else None
            )
            ended = tried if failure.status == "discarded" else None
            return (
                consumer, message_id, failure.status, stream.topic, stream.type, key, at, tried, ended, _HASH, attempts,
                due, None, None, failure.error_type, error, fingerprint, "application/json", payload, True,
            )  # fmt: skip
        if (since := WAITING.get(consumer)) is not None and ago <= since:
            return (
                consumer, message_id, "pending", stream.topic, stream.type, key, at, at, None, _HASH, 0, at, None, None,
                None, None, None, "application/json", payload, True,
            )  # fmt: skip
        if consumer == "billing" and ago <= DEPLOYED:
            took_s *= 6
        if pick.random() < 0.01:
            self._count("consumer", consumer, at, "received", "duplicate")
        done = min(at + timedelta(seconds=took_s), self._now)
        self._count("consumer", consumer, done, "processed", took_s=took_s)
        return (
            consumer, message_id, "processed", stream.topic, stream.type, key, at, done, done, _HASH, 0, None, None,
            None, None, None, None, None, None, False,
        )  # fmt: skip

    def _count(self, kind: str, name: str, at: datetime, *what: str, took_s: float | None = None) -> None:  # fmt: skip
        if at < self._counted_from:
            return
        minute = int(at.timestamp()) // 60
        # as maintenance keeps them
        age_s = 60 * (self._minute - minute)
        step = max(step for step, after_s in _STEPS.items() if age_s >= after_s)
        place = minute - minute % step, kind, name
        for each in what:
            self._counts[place][COUNTED.index(each)] += 1
        if took_s is not None:
            self._times[place][bucket_of(took_s)] += 1

    def beside(self) -> dict[str, tuple[tuple[str, ...], Iterable[tuple[Any, ...]]]]:
        """The rows of the other tables, by table; once the inbox has been made."""
        return {
            "attempt": (_ATTEMPT_COLUMNS, self._attempts),
            "outbox": (
                (
                    "id", "status", "topic", "type", "key", "payload", "staged_at", "available_at", "sent_at",
                    "attempts", "error_type", "error", "cause_consumer", "cause_id", "route",
                ),
                [*self._outbox()],
            ),
            "quarantine": (
                (
                    "consumer", "message_id", "hash", "reason", "topic", "type", "key", "payload", "seen",
                    "received_at", "updated_at", "kept_bytes", "status",
                ),
                self._quarantine(),
            ),
            "activity": (
                ("minute", "kind", "name", "worker", *COUNTED, "latency", "run", "oldest_s"),
                self._activity(),
            ),
            "worker": (
                (
                    "worker", "kind", "host", "pid", "version", "app", "consumers", "sources", "routes", "lanes",
                    "state", "busy", "leases", "in_flight", "started_at", "seen_at",
                ),
                self._workers(),
            ),
            "pause": (
                ("consumer", "actor", "reason", "paused_at"),
                [("gdpr-erasure", "ann", "legal hold until Monday: ask Petra", self._now - PAUSED)],
            ),
            "audit": (("recorded_at", "actor", "action", "filter", "affected", "reason"), self._audit()),
        }  # fmt: skip

    def _outbox(self) -> Iterator[tuple[Any, ...]]:
        count = max(60, round(OUTBOX * self._scale))
        for n in range(count):
            ago = timedelta(days=DAYS * (count - n - 0.5) / count)
            at, route = self._now - ago, ROUTES[n % 3]
            self._count("route", route, at, "received")
            waits = route == "rabbitmq" and ago <= REFUSED
            dead = route == "partners" and n % 4_001 < 3
            status = "pending" if waits else "dead" if dead else "sent"
            if status == "sent":
                self._count("route", route, at, "processed", took_s=0.02)
            yield (
                f"out-{n:07x}", status, _TOPICS_OUT[route], None, f"customer-{n % 5_000}", b"{}", at, at,
                at if status == "sent" else None, 8 if dead else 0, "HTTPError" if dead else None,
                "the partner answered 422 Unprocessable Entity" if dead else None,
                "billing", f"order-{n:07x}", route,
            )  # fmt: skip

    def _quarantine(self) -> Iterator[tuple[Any, ...]]:
        reused = "A known id came with another payload: the producer reuses ids, or the message was altered."
        count = max(20, round(QUARANTINED * self._scale))
        for n in range(count):
            payload = b'{"source": "legacy-crm", "number": %d}' % n
            at = self._now - FLOODED * ((count - n) / count)
            self._count("consumer", "crm-sync", at, "received", "quarantined")
            message_id = scoped_id(_FLOODS[n % 16 == 0], f"customer-{n % (count // 2 + 1):07x}")
            yield (
                "crm-sync", message_id, sha256(payload).digest(), reused, "customers",
                "customer.changed", f"customer-{n % 5_000}", payload, 1, at, at, len(payload), "quarantined",
            )  # fmt: skip
        for n in range(9):
            payload, at = b"<xml>%d</xml>" % n, self._now - timedelta(days=n + 1)
            yield (
                "", "", sha256(payload).digest(), "No handler consumes it.", "orders", "order.exported", None, payload,
                1, at, at, len(payload), "quarantined",
            )  # fmt: skip

    def _activity(self) -> Iterator[tuple[Any, ...]]:
        until = int(self._now.timestamp()) // 60
        waiting = {("consumer", name): since for name, since in WAITING.items()}
        waiting |= {("route", "rabbitmq"): REFUSED}
        minutes = {(minute, kind, name) for minute, kind, name in self._counts}
        for (kind, name), since in waiting.items():
            minutes |= {
                (until - ago, kind, name) for ago in range(int(since.total_seconds()) // 60)
            }
        for minute, kind, name in sorted(minutes):
            place = minute, kind, name
            times = Histogram(self._times.get(place, ())).as_text()
            since = waiting.get((kind, name), timedelta())
            overdue_s = since.total_seconds() - 60.0 * (until - minute)
            yield (
                minute, kind, name, "", *self._counts.get(place, [0] * len(COUNTED)), times, times,
                overdue_s if overdue_s > 0 else 0.4 if self._counts.get(place) else None,
            )  # fmt: skip

    def _workers(self) -> Iterator[tuple[Any, ...]]:
        now = self._now
        # nobody beats for these: a day from now they begin to be silent
        seen = now + timedelta(days=1)
        named = json.dumps([name for name in CONSUMERS if name != "loyalty"])
        sources = json.dumps({"kafka": {"topics": [stream.topic for stream in STREAMS]}})
        refused = (
            int((now - REFUSED).timestamp()),
            "ProbableAuthenticationError: ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN",
            None,
        )
        for number in range(1, 5):
            started = now - DEPLOYED + timedelta(seconds=20 * number)
            yield (
                f"run{number:013x}", "run", f"shop-worker-{number}", 1, txbox.__version__, "shop.app:app", named,
                sources, "{}", 8, "running", number + 2, 0, 20 * number, started, seen,
            )  # fmt: skip
        routes = json.dumps({"kafka": {}, "partners": {}, "rabbitmq": {"away": [refused]}})
        yield (
            "relay", "relay", "shop-relay-1", 1, txbox.__version__, "shop.app:app", "[]", "{}", routes, 1, "running",
            1, 0, 0, now - DEPLOYED, seen,
        )  # fmt: skip
        yield (
            "maintain", "maintain", "shop-maintain-1", 1, txbox.__version__, "shop.app:app", "[]", "{}", "{}", 1,
            "running", 0, 0, 0, now - DEPLOYED_BEFORE, seen,
        )  # fmt: skip

    def _audit(self) -> Iterator[tuple[Any, ...]]:
        done = [
            (timedelta(days=6), "bob", "retry", {"consumer": "mailer", "status": "dead"}, 214, "mail is back"),
            (timedelta(days=2, hours=4), "ann", "pause", {"consumer": "mailer"}, 1, "the mail server moves"),
            (timedelta(days=2, hours=3), "ann", "resume", {"consumer": "mailer"}, 1, "it has moved"),
            (timedelta(days=2), "cat", "discard", {"consumer": "crm-sync", "status": "dead"}, 37, "test data"),
            (PAUSED, "ann", "pause", {"consumer": "gdpr-erasure"}, 1, "legal hold until Monday: ask Petra"),
        ]  # fmt: skip
        for ago, actor, action, where, affected, reason in done:
            yield self._now - ago, actor, action, json.dumps(where), affected, reason


def _insert(view: Raw, table: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """By COPY, or by statements with many rows; each batch is a transaction."""
    began, count, left = time.monotonic(), 0, iter(rows)
    quote = "`" if view.product == "mysql" else '"'
    names = ", ".join(f"{quote}{column}{quote}" for column in columns)
    connection: Any = view._connection  # what it can do that a test's view does not
    while batch := [*islice(left, _AT_ONCE)]:
        count += len(batch)
        if view.product == "postgresql":
            with connection.cursor().copy(f"COPY txbox_{table} ({names}) FROM STDIN") as copy:
                for row in batch:
                    copy.write_row(row)
            continue
        shape = "%Y-%m-%d %H:%M:%S.%f"
        plain = [
            tuple(
                value.strftime(shape)[:23] if isinstance(value, datetime) else value
                for value in row
            )
            for row in batch
        ]
        mark = "%s" if view.product == "mysql" else "?"
        sql = f"INSERT INTO txbox_{table} ({names}) VALUES ({', '.join([mark] * len(columns))})"
        view.execute("BEGIN")
        connection.cursor().executemany(sql, plain)
        view.execute("COMMIT")
    print(
        f"{table}: {count:,} rows in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Fill an empty database with a month of a shop, for the dashboard.",
    )
    parser.add_argument("--database", required=True, help="such as sqlite:///demo-shop.db")
    parser.add_argument("--scale", type=float, default=1.0, help="1 is 2,000,000 rows of the inbox")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(given)
    with App(args.database) as app:
        app.init()
    with Raw(args.database) as view:
        if view.rows("SELECT 1 FROM txbox_inbox LIMIT 1"):
            print("There are messages in this database: name an empty one.", file=sys.stderr)
            return 1
        if view.product == "sqlite":
            view.execute("PRAGMA synchronous = OFF")
        fill(view, scale=args.scale, seed=args.seed)
    print(f"Now look: txbox ui --database {args.database}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
