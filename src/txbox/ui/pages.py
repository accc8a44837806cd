"""The pages and actions: each shows or changes something with a verb of `admin/`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from time import monotonic
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlencode

from starlette.datastructures import ImmutableMultiDict
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from txbox.admin import Admin, MessageChanged, views
from txbox.admin.activity import Activities, Activity, WorkerStatus, together
from txbox.admin.explain import Explanation, Sentence
from txbox.admin.findings import Crew, grouped
from txbox.admin.tables import (
    COUNTED_MAX,
    INBOX,
    QUARANTINE,
    ConsumerStatus,
    FailureGroup,
    Filter,
    InboxFilter,
    OutboxFilter,
    QuarantineFilter,
    RecordedAttempt,
    Table,
)
from txbox.boundaries import log as _log
from txbox.errors import Fault, SchemaError, StoreError, StoreUnavailable, TxboxError
from txbox.outcome import Status
from txbox.store.activity import Counts, Kind
from txbox.text import CONTROL, UNMATCHED, duration_of
from txbox.ui import security
from txbox.ui.changes import Progress, WantedChange
from txbox.ui.charts import Charts, charts
from txbox.ui.render import differences, names_of, plot, readable, templates, trend
from txbox.ui.security import Access, Grant, Signer, Tokens

_VERSION = version("txbox")
_ROWS = 50
_PICKED_MAX = 200
_SEARCHED = 1_000
# how long a page may look for rows that no index knows
_LOOK_S = 0.1
_REASON_CHARACTERS = 500

T = TypeVar("T")
#: What a template shows, by name.
Values = dict[str, Any]
#: The fields of a form or a query; one may come several times.
Fields = ImmutableMultiDict[str, str]

STATIC = {
    "txbox.css": "text/css; charset=utf-8",
    "txbox.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
#: Sentences of an explanation that the page has in other places.
_SHOWN_ELSEWHERE = ("last error", "received", "staged", "cause", "caused")
#: What charts look back on, and how long a step of them is.
_SPANS = {
    name: (timedelta(minutes=last), timedelta(minutes=step))
    for name, last, step in (
        ("15m", 15, 1), ("1h", 60, 1), ("6h", 360, 5), ("24h", 1_440, 30), ("7d", 10_080, 180),
    )
}  # fmt: skip
#: What stands at the front of a list.
_FRONT = (
    "message_id", "error", "reason", "status", "consumer", "received_at", "staged_at", "topic", "type",
)  # fmt: skip
#: Lists that are looked at often: the words, and the status.
_VIEWS = {
    "inbox": (("Dead", "dead"), ("Retrying", "failed"), ("Waiting", "pending"), ("Running", "processing")),
    "outbox": (("Due", "due"), ("Retrying", "failed"), ("Dead", "dead"), ("Sent", "sent")),
    "quarantine": (("To decide", ""), ("Accepted", "accepted"), ("Discarded", "discarded")),
}  # fmt: skip
#: By what groups of failures are sorted, the largest first.
_SORTED: dict[str, Callable[[FailureGroup], Any]] = {
    "count": lambda group: group.count,
    "trend": lambda group: group.by_hour[::-1],
    "first": lambda group: group.first_at,
    "last": lambda group: group.last_at,
}
#: What the search box calls criteria, beside their names.
_WORDS = {"id": "message_id", "error": "error_type", "older": "older_than"}
_WORD = re.compile(r'([A-Za-z_]+):(?:"([^"]*)"|(\S+))|(\S+)')
# what a filter may name is looked up so often
_NAMES_S = 30.0
#: How long a request may change messages; with a batch more, well below what a page may take.
_CHANGE_S = 15.0
#: More are changed only when their number is typed.
_TYPED = 1_000
#: A payload that is longer is edited on the command line: a form may have no more.
_EDITED_BYTES = 64 * 1024


class Refused(Exception):
    """An answer instead of the page: a status, and a sentence."""

    def __init__(
        self, status: int, sentence: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Asked:
    """An authorized request.

    Args:
        admin: what the pages read with; without the grant “payload” no error text reaches it.
    """

    request: Request
    access: Access
    admin: Admin
    query: Fields
    form: Fields

    def field(self, name: str) -> str:
        """A field of the form; "" when it is missing."""
        return self.form.get(name, "")


class Pages:
    """One method for each path.

    Args:
        tokens: None where a proxy or the host application authenticates.
        login: the address of its login, with `{next}` in place of the page to return to.
    """

    def __init__(
        self, admin: Admin, tokens: Tokens | None, signer: Signer, login: str | None = None
    ) -> None:
        self._login = login
        self._admins = {True: admin, False: admin.without_errors()}
        self._known_names: tuple[float, Mapping[str, Sequence[str]]] = (float("-inf"), {})
        #: Set by another thread: changes end before their next batch.
        self.closing = threading.Event()
        #: A digest of what was open when somebody looked last; "" before that.
        self.seen = ""
        self.static = {
            f"/static/{name}": files("txbox.ui").joinpath("static", name).read_bytes()
            for name in STATIC
        }
        self._tokens = tokens
        self._signer = signer
        self._version = hashlib.sha256(b"".join(self.static.values())).hexdigest()[:12]
        self._templates = templates()

    def on_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop that async connections belong to."""
        for admin in self._admins.values():
            admin.loop = loop

    # -- rendering ----------------------------------------------------------------------------

    def asked(self, request: Request, access: Access, form: Fields) -> Asked:
        """A request with what its user may read."""
        admin = self._admins[access.may("payload")]
        return Asked(request, access, admin, request.query_params, form)

    def answered(self, rule: Rule, asked: Asked) -> Response:
        """Carry a request out; a page is a template with what its method has read."""
        found = rule.answer(self, asked)
        if isinstance(found, Response):
            return found
        return self.page(asked.request, rule.template, asked.access, **found)

    def page(
        self, request: Request, template: str, access: Access | None = None, *, status: int = 200,
        headers: Mapping[str, str] | None = None, **values: Any,
    ) -> Response:  # fmt: skip
        cookie = request.cookies.get(security.FORM) or secrets.token_urlsafe(24)
        base = base_of(request)

        def url(path: str, **query: Any) -> str:
            given = {name: value for name, value in query.items() if value is not None}
            return base + path + (f"?{urlencode(given, quote_via=quote, safe='')}" if given else "")

        def url_of(path: str) -> str:
            return base + path

        def static(name: str) -> str:
            return f"{base}/static/{name}?v={self._version}"

        text = self._templates.get_template(template).render(
            url=url,
            url_of=url_of,
            paths=RULES,
            here=path_of(request),
            again=_address(request),
            seen=getattr(request.state, "seen", ""),
            access=access,
            may_log_out=self._tokens is not None,
            form_field=security.FIELD,
            form_token=self._signer.form_token(cookie, access.actor if access else ""),
            static=static,
            version=_VERSION,
            **values,
        )
        response = Response(text, status, headers, media_type="text/html; charset=utf-8")
        if cookie != request.cookies.get(security.FORM):
            self.set_cookie(request, response, security.FORM, cookie, "strict")
        return response

    def refusal(self, request: Request, refused: Refused) -> Response:
        headers = refused.headers
        if refused.status in (401, 429) and self._tokens is not None:
            headers = {**headers, "www-authenticate": 'Bearer realm="txbox"'}
            is_page = request.method == "GET" and path_of(request) not in ("/live", "/login")
            return self.page(
                request, "login.html", status=refused.status, headers=headers,
                sentence=refused.sentence, to=_address(request) if is_page else "/",
            )  # fmt: skip
        if refused.status == 401 and self._login is not None and path_of(request) != "/live":
            # a form is not sent again: its page is asked for first
            page = _address(request) if request.method == "GET" else "/"
            back = quote(base_of(request) + page, safe="")
            return RedirectResponse(self._login.replace("{next}", back), 303)
        sentence = (
            refused.sentence or "Log in to the proxy or application in front of this dashboard."
        )
        return self.page(
            request, "refused.html", status=refused.status, headers=headers,
            sentence=sentence, code=refused.status,
        )  # fmt: skip

    # -- looking ------------------------------------------------------------------------------

    def overview(self, asked: Asked) -> Values:
        consumers, topics = asked.admin.overview()
        last, time = self._time(asked)
        crew = asked.admin.crew()
        checked = asked.admin.check(crew)
        unfinished = sum(map(_unfinished, consumers))
        return {
            "consumers": consumers, "topics": topics, "live": True, "last": last, "spans": _SPANS,
            "paused": {pause.consumer for pause in crew.paused},
            "plotted": [(each, plot(each, time)) for each in (*time.consumers, *time.routes)],
            "alerts": grouped(checked.findings), "checked": checked, "listed": _MESSAGES.listed, "where": {},
            "drawn": self._drawn(asked, crew, together(time.consumers), time, unfinished),
            "counted_max": COUNTED_MAX, "unmatched": UNMATCHED, "here_too": {}, "as_table": "table" in asked.query,
        }  # fmt: skip

    def _time(self, asked: Asked, only: tuple[Kind, str] | None = None) -> tuple[str, Activities]:
        """What was counted in the time that a page looks back on, and its name."""
        last = asked.query.get("last", "")
        last = last if last in _SPANS else "1h"
        span, step = _SPANS[last]
        return last, asked.admin.activity(span, step=step, only=only)

    def _drawn(
        self, asked: Asked, crew: Crew, activity: Activity, time: Activities, unfinished: int | None
    ) -> Charts:
        changes = asked.admin.pause_changes()
        name, paused = activity.name, crew.paused
        if activity.kind == "route":
            workers, paused, changes = crew.relaying([name]), (), ()
        elif name:
            workers = crew.running(name)
            paused = tuple(pause for pause in paused if pause.consumer == name)
            changes = [change for change in changes if change.filter.get("consumer") == name]
        else:
            workers = list(crew.workers)
        return charts(
            activity, time, workers=workers, paused=paused, changes=changes, unfinished=unfinished
        )

    def one(self, asked: Asked, kind: Kind) -> Values:
        """A consumer, or a route of the outbox."""
        name = asked.query.get("name", "")
        if kind == "consumer":
            _known(name)
        last, time = self._time(asked, (kind, name))
        crew = asked.admin.crew()
        empty = Activity(kind=kind, name=name, total=Counts(), points=())
        activity = next(iter((*time.consumers, *time.routes)), empty)
        counts: dict[str, int] = {}
        groups: Sequence[FailureGroup] = ()
        if kind == "consumer":
            status = asked.admin.open_of(name)
            counts = {**status.counts, "quarantined": status.quarantined}
            groups, unfinished = asked.admin.failures(name), _unfinished(status)
            workers, where = crew.running(name), {"consumer": name}
        else:
            for topic in asked.admin.unsent():
                for state, count in topic.counts.items() if topic.route == name else ():
                    counts[state] = counts.get(state, 0) + count
            workers, where, unfinished = crew.relaying([name]), {"route": name or "any"}, None
        found = [
            one for one in asked.admin.check(crew).findings
            if one.subject == name or (kind == "route" and one.query.get("route") == (name or "any"))
        ]  # fmt: skip
        place = _MESSAGES if kind == "consumer" else _OUTBOX
        away = (trouble for worker in workers for trouble in worker.troubles)
        return {
            "unreachable": any((trouble.kind, trouble.name) == (kind, name) for trouble in away),
            "kind": kind, "name": name, "live": True, "last": last, "spans": _SPANS, "counts": counts, "groups": groups,
            "pause": crew.pause_of(name) if kind == "consumer" else None, "workers": workers,
            "alerts": grouped(found), "listed": place.listed, "where": where, "here_too": {"name": name},
            "drawn": self._drawn(asked, crew, activity, time, unfinished), "as_table": "table" in asked.query,
        }  # fmt: skip

    def _names(self, admin: Admin) -> Mapping[str, Sequence[str]]:
        """What filters may name, read anew twice a minute."""
        at, names = self._known_names
        if monotonic() - at > _NAMES_S:
            names = admin.names()
            self._known_names = monotonic(), names
        return names

    def listed(self, asked: Asked, place: Place) -> Values | Response:
        table, words = place.kind.table, asked.query.get("q", "").strip()
        names = self._names(asked.admin)
        hint = ""
        if words:
            found = self._searched(asked, place, words, names)
            if isinstance(found, Response):
                return found
            hint = found
        where = _filter(place.kind, asked.query)
        if table is QUARANTINE and "status" not in asked.query:
            where = replace(where, status=table.statuses[0])
        before: int | str | None = asked.query.get("before") or None
        if isinstance(before, str) and table.cursor is not None:
            before = _number(before)
        page = asked.admin.page(where, limit=_ROWS, before=before, within_s=_LOOK_S)
        rows = page.rows
        view = views.page(table, rows, _FRONT).filled()
        kept = {
            name: value
            for name, value in asked.query.items()
            if name not in ("before", "q") and value
        }
        criteria = where.criteria()
        of_all = (
            table is QUARANTINE and before is None and criteria == {"status": table.statuses[0]}
        )
        return {
            "table": table, "place": place, "view": view, "listed": list(zip(rows, view.rows, strict=True)),
            "criteria": criteria, "filters": [item.name for item in fields(where)], "given": asked.query,
            "more": None if page.behind is None else {**kept, "before": page.behind},
            "first": before is None, "live": before is None, "nothing": views.nothing(where),
            "hint": hint or ("" if rows else asked.admin.hint(where, names)),
            "stopped": page.behind is not None and len(rows) < _ROWS, "names": names, "words": words,
            "views": _VIEWS[table.name], "label": views.label,
            "extents": views.extents(table, {name: kept.get(name, value) for name, value in criteria.items()}),
            "groups": asked.admin.quarantine_groups() if of_all else (),
            "cut": where.id_prefix is not None and len(rows) == _ROWS and table is not QUARANTINE,
        }  # fmt: skip

    def _searched(
        self, asked: Asked, place: Place, words: str, names: Mapping[str, Sequence[str]]
    ) -> Response | str:
        """Where the words of the search box lead; or a hint to what is wrong with them."""
        kept = {
            name: value
            for name, value in asked.query.items()
            if name not in ("before", "q") and value
        }
        known, terms = [item.name for item in fields(place.kind)], list[str]()
        for match in _WORD.finditer(words[:_SEARCHED]):
            field, quoted, plain, bare = match.groups()
            column = "" if field is None else _WORDS.get(field.lower(), field.lower())
            value = quoted if plain is None else plain
            statuses = place.kind.table.statuses
            if column == "status" and value not in (*statuses, "all"):
                like = get_close_matches(value or "", statuses, 1)
                meant = (
                    f"did you mean '{like[0]}'?" if like else f"there are {', '.join(statuses)}."
                )
                return f"There is no status {value!r}; {meant}"
            if column in known and value:
                kept[column] = (
                    _completed(value, names.get(column, ())) if column == "error_type" else value
                )
            elif field is not None and (like := get_close_matches(column, [*known, *_WORDS], 1)):
                return f"There is no field {field!r}; did you mean {like[0]!r}?"
            else:
                terms.append(bare or match[0])
        if term := " ".join(terms):
            starting = _filter(place.kind, {**kept, "id_prefix": term})
            found = asked.admin.page(starting, limit=2).rows
            if len(found) == 1 and set(kept) <= {"status"} and found[0].message_id == term:
                return self._to(asked, place.shown, **names_of(found[0], place.kind.table))
            kept["id_prefix" if found else "key"] = term
        return self._to(asked, place.listed, **kept)

    def shown(self, asked: Asked, place: Place, *, reveal: bool = False) -> Values | Response:
        table = place.kind.table
        given = asked.form if reveal else asked.query
        # in the quarantine "" is a consumer, too: that of what no handler takes
        named: dict[str, Any] = {name: given[name] for name in table.key if name in given}
        where = place.kind(**named)
        who: dict[str, Any] = {"actor": asked.access.actor, "reason": _reason(asked)}
        message = _found(asked.admin.reveal(where, **who) if reveal else asked.admin.show(where))
        if reveal and asked.field("as") == "file":
            return _file(message)
        named = names_of(message, table)
        aside: Any = ()
        if table is INBOX:
            aside = asked.admin.show(QuarantineFilter(**named))
        sentences, links = list[Sentence](), None
        if message.message_id:
            explanation = asked.admin.explain(message.message_id, consumer=named.get("consumer"))
            places = [found for found in explanation.places if found.table == table.name]
            if table is QUARANTINE:
                # of all copies under this id, this one, which has caused nothing
                places = [
                    found
                    for found, row in zip(places, explanation.found.quarantine, strict=True)
                    if row.hash == message.hash
                ]
            else:
                links = _links(explanation)
            sentences = [said for found in places for said in found.sentences]
        return {
            "table": table, "place": place, "message": message, "links": links, "aside": aside,
            "back": f"{place.shown}?{urlencode(named)}",
            "sentences": [said for said in sentences if said.kind not in _SHOWN_ELSEWHERE],
            "other": self._stored_beside(asked, message, who, reveal=reveal) if table is QUARANTINE else None,
            "record": views.record(message), "attempts": _folded(message) if table is INBOX else (),
            "revealed": reveal, "live": not reveal,
            "payload": readable(message.payload), "result": readable(getattr(message, "result", None)),
            "verbs": self._verbs(asked, table, message),
            "names": self._names(asked.admin) if "reroute" in table.changes else {},
            "rehearsed": table is INBOX and message.has_payload and asked.admin.has_handlers,
            "edited": _editable(message) if reveal and table is INBOX else None,
        }  # fmt: skip

    def _verbs(self, asked: Asked, table: Table, message: Any) -> list[str]:
        """What may be done to a message in its status."""
        verbs: list[str] = [
            verb for verb, change in table.changes.items() if message.status in change.statuses
        ]
        if (
            table is INBOX
            and message.status == Status.PROCESSED
            and message.has_payload
            and asked.admin.has_handlers
        ):
            verbs.append("replay")
        return verbs

    def _stored_beside(
        self, asked: Asked, aside: Any, who: dict[str, Any], *, reveal: bool
    ) -> Values | None:
        """The stored message under the id of a quarantined one, and when revealed, how the payloads differ."""
        if not aside.message_id or not aside.consumer:
            return None
        where = InboxFilter(consumer=aside.consumer, message_id=aside.message_id)
        found = asked.admin.reveal(where, **who) if reveal else asked.admin.show(where)
        if not found:
            return None
        lines = differences(found[0].payload, aside.payload) if reveal else None
        return {"stored": found[0], "lines": lines}

    def reveal(self, asked: Asked) -> Values | Response:
        return self.shown(asked, _place_of(asked), reveal=True)

    def database(self, asked: Asked) -> Values:
        sizes, partitions = asked.admin.sizes()
        return {
            "view": views.sizes(sizes), "partitions": partitions, "missing": views.DEFAULT_PARTITION,
            "schema": asked.admin.schema(), "diagnosis": asked.admin.doctor() if asked.query.get("examine") else None,
        }  # fmt: skip

    def audit(self, asked: Asked) -> Values:
        before = _number(asked.query["before"]) if asked.query.get("before") else None
        rows = asked.admin.audit(limit=_ROWS, before=before)
        more = {"before": rows[-1].number} if len(rows) == _ROWS else None
        return {"rows": rows, "more": more, "first": before is None}

    def failures(self, asked: Asked) -> Values:
        by = asked.query.get("by", "")
        by = by if by in _SORTED else "count"
        groups = sorted(asked.admin.failures(), key=_SORTED[by], reverse=True)
        return {"groups": [(group, trend(group)) for group in groups], "by": by, "live": True}

    def workers(self, asked: Asked) -> Values:
        crew = asked.admin.crew()
        workers, paused = crew.workers, {pause.consumer: pause for pause in crew.paused}
        running = {
            name for worker in workers if worker.state == "running" for name in worker.consumers
        }
        names = {name for worker in workers for name in worker.consumers}
        names |= {*paused, *filter(None, asked.admin.consumers())}
        states = [
            (name, "paused" if name in paused else "running" if name in running else "no worker", paused.get(name))
            for name in sorted(names)
        ]  # fmt: skip
        causes: dict[tuple[str, str, str | None, str], list[tuple[int, WorkerStatus]]] = {}
        for worker in workers:
            for trouble in worker.troubles:
                cause = trouble.kind, trouble.name, trouble.topic, trouble.error
                causes.setdefault(cause, []).append((trouble.since_s, worker))
        troubles = [
            (*cause, min(since_s for since_s, _ in those), [worker for _, worker in those])
            for cause, those in sorted(causes.items(), key=lambda item: min(item[1], key=lambda of: of[0])[0])
        ]  # fmt: skip
        return {"workers": workers, "troubles": troubles, "live": True, "consumers": states}

    # -- one message --------------------------------------------------------------------------

    def edit(self, asked: Asked) -> Values | Response:
        """Show what an edit would change, and ask; or carry it out."""
        consumer, message_id = _one(asked)
        payload, content_type = _typed(asked), asked.field("content_type").strip()
        agreed = asked.field("agreed")
        # before it is read for the page: a change between the two is no longer the version that is agreed to
        edited = asked.admin.edit(
            consumer, message_id, payload=payload, content_type=content_type or None,
            expected=agreed or None, dry_run=not agreed, actor=asked.access.actor, reason=_reason(asked),
        )  # fmt: skip
        if agreed:
            return self._to(asked, "/message", consumer=consumer, message_id=message_id)
        where = InboxFilter(consumer=consumer, message_id=message_id)
        message = _found(asked.admin.reveal(where, actor=asked.access.actor, reason="edit"))
        return {
            "message": message, "edited": edited, "lines": differences(message.payload, payload),
            "payload": payload.decode(), "content_type": content_type,
        }  # fmt: skip

    def rehearse(self, asked: Asked) -> Values:
        """Run a message's handler, with its own payload or that of the form, and commit nothing."""
        payload = _typed(asked) if "payload" in asked.form else None
        done = asked.admin.rehearse(
            *_one(asked), payload=payload, actor=asked.access.actor, reason=_reason(asked)
        )
        return {
            "done": done, "result": readable(done.result), "content_type": asked.field("content_type"),
            "payload": None if payload is None else payload.decode(),
        }  # fmt: skip

    def pause(self, asked: Asked) -> Response:
        """Pause or resume a consumer."""
        change = _known(
            {"pause": asked.admin.pause, "resume": asked.admin.resume}.get(asked.field("action"))
        )
        change(_known(asked.field("consumer")), actor=asked.access.actor, reason=_reason(asked))
        return self._to(asked, "/workers")

    # -- changes ------------------------------------------------------------------------------

    def confirm(self, asked: Asked) -> Values:
        """Say how many messages would change, and ask."""
        wanted = self._wanted(asked)
        changes = wanted.preview(asked.admin)
        count, spared = (
            sum(getattr(change, name) for change in changes) for name in ("count", "spared")
        )
        table = wanted.kind.table
        bare = sum(change.without_payload for change in changes)
        sample = [key for change in changes for key in change.sample][:10]
        refused = [refusal for change in changes for refusal in change.refused]
        left = (
            asked.admin.why_not(wanted.verb, wanted.filters[0])
            if not count and not refused and len(wanted.filters) == 1 and wanted.picked
            else None
        )
        return {
            "table": table, "verb": wanted.verb, "count": count, "left": left, "sample": views.keys(table, sample),
            "spared": views.spared(spared) if spared else None, "refused": views.keys(table, refused),
            "reasons": [item["reason"] for item in refused], "criteria": wanted.criteria, "picked": wanted.picked,
            "bare": views.without_payload(bare) if bare else None, "unserved": _unserved(asked.admin, wanted, sample),
            "options": wanted.options, "canary": wanted.canary, "question": wanted.question(count),
            "back": _back(asked, wanted), "done": views.DONE[wanted.verb], "parts": views.breakdown(changes),
            "label": views.label, "extent": wanted.extent, "needs_reason": wanted.needs_reason(count),
            "typed": count > _TYPED,
        }  # fmt: skip

    def change(self, asked: Asked) -> Values:
        """Change at most as many messages as was agreed to, for a while; what then remains is another request."""
        wanted = self._wanted(asked)
        agreed = _number(asked.field("count"))
        if wanted.needs_reason(agreed) and _reason(asked) is None:
            raise Refused(400, "Nothing was done: say why, for the audit.")
        if agreed > _TYPED and re.sub(r"[\s,.']", "", asked.field("typed")) != str(agreed):
            raise Refused(
                400, f"Nothing was done: type the number of messages, {agreed:,}, to confirm it."
            )
        until = monotonic() + _CHANGE_S
        reason = _reason(asked)
        done, title = Progress(), wanted.question(agreed).removesuffix("?")
        try:
            for progress in wanted.run(
                asked.admin, agreed, {"actor": asked.access.actor, "reason": reason}
            ):
                done = progress
                if monotonic() > until or self.closing.is_set():
                    break
        except TxboxError as error:
            if not done.count:
                raise
            # its text may name rows or the database: the log is for those who may read it
            _log.error("The dashboard's change %r failed: %s", title, error)
            note = "It ended early, and batches that were done stay done: the log of the dashboard says why."
            done = replace(done, notes=[*done.notes, note], state="failed")
        rest = max(0, agreed - done.count)
        if not rest and done.state == "unfinished" and not wanted.canary:
            done = replace(done, state="done")
        return {
            "wanted": wanted, "title": title, "agreed": agreed, "done": done, "rest": rest,
            "reason": reason, "back": _back(asked, wanted), "limit_s": round(_CHANGE_S),
        }  # fmt: skip

    def _wanted(self, asked: Asked) -> WantedChange:
        """Read the change that a form asks for.

        Raises:
            Refused: it is incomplete, or cannot be done.
        """
        kind = _place_of(asked).kind
        verb, _, scope = asked.field("action").partition(" ")
        is_canary = verb == "canary" and kind is InboxFilter and scope == "all"
        verb = "retry" if is_canary else verb
        is_replay = verb == "replay" and kind is InboxFilter and scope == "selected"
        _known(is_replay or verb in kind.table.changes)
        given = {
            name.removeprefix("where."): value
            for name, value in asked.form.items()
            if name.startswith("where.")
        }
        where = _filter(kind, given)
        picked = asked.form.getlist("pick") if scope != "all" else []
        if scope != "all" and not picked:
            raise Refused(400, "Choose messages first, or act on all that match the filter.")
        if len(picked) > _PICKED_MAX:
            raise Refused(400, "Too many messages are chosen: use a filter.")
        message_id = asked.field("message_id") or None
        if message_id is not None and len(picked) != 1:
            raise Refused(400, "A new id is for one message: choose one.")
        options = {"message_id": message_id} if verb == "accept" and message_id else {}
        if verb == "reroute":
            options = {"to": asked.field("to").strip()}
            if not options["to"]:
                raise Refused(400, "Which route? Name one as the overview shows it, or any.")
        return WantedChange(
            kind=kind,
            verb=verb,  # type: ignore[arg-type]  # it is a key of `changes`, or a replay
            filters=[_picked(kind, key) for key in picked] or [where],
            criteria={} if picked else {name: value for name, value in given.items() if value},
            picked=picked,
            options=options,
            canary=is_canary,
        )  # fmt: skip

    def _to(self, asked: Asked, path: str, **query: str) -> Response:
        return RedirectResponse(f"{base_of(asked.request)}{path}?{urlencode(query)}", 303)

    def logout(self, asked: Asked) -> Response:
        if self._tokens is not None:
            self._signer.end(asked.request.cookies.get(security.SESSION, ""), self._tokens)
        response = RedirectResponse(base_of(asked.request) + "/", 303)
        response.delete_cookie(security.SESSION, path=base_of(asked.request) or "/")
        return response

    def set_cookie(
        self, request: Request, response: Response, name: str, value: str, same_site: Any
    ) -> None:
        response.set_cookie(
            name, value, path=base_of(request) or "/", httponly=True, samesite=same_site,
            secure=request.scope.get("scheme") == "https",
        )  # fmt: skip


def _unserved(admin: Admin, wanted: WantedChange, sample: list[dict[str, str]]) -> str | None:
    """A warning that nobody may do what is wanted."""
    if wanted.verb == "reroute":
        return admin.unserved(wanted.route)
    if wanted.verb != "retry" or wanted.kind is not InboxFilter:
        return None
    consumers = sorted({key["consumer"] for key in sample})
    return " ".join(filter(None, map(admin.idle, consumers))) or None


def _back(asked: Asked, wanted: WantedChange) -> str:
    back = asked.field("back")
    return back if is_ours(back) else _PLACES[wanted.kind.table.name].listed


def is_ours(path: str) -> bool:
    """Whether every browser takes this for a path of this dashboard."""
    return (
        path.startswith("/")
        and not path.startswith("//")
        and "\\" not in path
        and path.isprintable()
    )


def refused_for(error: Exception) -> Refused:
    """The answer to an error, without its text, which may name rows, roles or hosts."""
    if isinstance(error, SchemaError):
        _log.error("The dashboard cannot read the tables: %s", error)
        return Refused(
            503, "The tables are missing or of another version: run `txbox schema check`."
        )
    if isinstance(error, StoreUnavailable):
        _log.error("The dashboard cannot reach the database: %s", error)
        return Refused(503, "The database does not answer.", {"retry-after": "5"})
    if isinstance(error, StoreError):
        _log.error("A page of the dashboard failed: %s", error)
        if error.fault is Fault.TIMEOUT:
            return Refused(
                503, "The database took too long: narrow the filter, by consumer and status."
            )
        if error.lacks_right:
            return Refused(
                500, "The database role of this dashboard lacks a right that this takes: "
                "`txbox schema print --grants` prints those of each kind of role.",
            )  # fmt: skip
        return Refused(500, "The database refused this: the log of the dashboard says why.")
    # the request makes no sense, and the sentence says why
    return Refused(409 if isinstance(error, MessageChanged) else 400, str(error))


def _filter(kind: type[Filter[Any, Any]], given: Mapping[str, str]) -> Filter[Any, Any]:
    values: dict[str, Any] = {}
    for item in fields(kind):
        value = given.get(item.name, "")
        if not value:
            continue
        if item.name == "older_than":
            try:
                values[item.name] = duration_of(value)
            except ValueError as error:
                raise Refused(400, f"{error}.") from None
        elif item.name in ("since", "until"):
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                raise Refused(400, "A time is written as 2026-01-31T12:00, in UTC.") from None
            values[item.name] = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        elif item.name == "status" and value not in kind.table.statuses:
            if value != "all":
                raise Refused(400, "Unknown status.")
        elif (item.name == "consumer" and value == UNMATCHED) or (
            item.name == "route" and value == "any"
        ):
            values[item.name] = ""
        else:
            values[item.name] = value
    return kind(**values)


def _unfinished(status: ConsumerStatus) -> int:
    return sum(status.counts.get(name, 0) for name in ("pending", "processing", "failed"))


def _completed(value: str, names: Sequence[str]) -> str:
    """The only name that has this in it, whatever the case; or the value itself."""
    alike = [name for name in names if value.lower() in name.lower()]
    return alike[0] if len(alike) == 1 and value not in names else value


class _Attempts(NamedTuple):
    """Attempts in a row that ended alike.

    Attributes:
        times: how many they are.
        cause: the exception, unless the attempts before had the same, or it is the last one, which the page names.
        text: of the error, unless the page has it as the last one.
    """

    first: RecordedAttempt
    last: RecordedAttempt
    times: int
    cause: str | None
    is_last_error: bool
    text: str | None


def _folded(message: Any) -> list[_Attempts]:
    folded: list[_Attempts] = []
    before: str | None = None
    of_page = message.fingerprint or message.error_type
    for past in message.history:
        cause = past.fingerprint or past.error_type
        last = folded[-1].last if folded else None
        if last and (cause, past.error, past.status) == (before, last.error, last.status):
            folded[-1] = folded[-1]._replace(last=past, times=folded[-1].times + 1)
            continue
        is_last = cause == of_page
        named = None if is_last or cause == before else cause
        text = None if past.error == message.error else past.error
        folded.append(_Attempts(past, past, 1, named, is_last and cause is not None, text))
        before = cause
    return folded


def _known(given: T | None) -> T:
    """What a form of ours always has.

    Raises:
        Refused: it is missing or empty.
    """
    if not given:
        raise Refused(400, "This form is incomplete or damaged: load its page again.")
    return given


def _picked(kind: type[Filter[Any, Any]], key: str) -> Filter[Any, Any]:
    names = kind.table.key
    values: Any = None
    with suppress(ValueError, RecursionError):
        found = json.loads(key)
        # JSON can name lone surrogates, which no database stores
        json.dumps(found, ensure_ascii=False).encode()
        values = found
    match values:
        case [str(), *_] if len(values) == len(names):
            named: dict[str, Any] = dict(zip(names, map(str, values), strict=True))
            return kind(**named)
        case _:
            return _known(None)


def _one(asked: Asked) -> tuple[str, str]:
    """The consumer and the id of the message that a form names."""
    return _known(asked.field("consumer")), _known(asked.field("message_id"))


def _found(rows: Sequence[Any]) -> Any:
    if not rows:
        raise Refused(404, "There is no such message any more.")
    return rows[0]


def _typed(asked: Asked) -> bytes:
    """The payload of a form; browsers send line ends as CR LF."""
    return asked.field("payload").replace("\r\n", "\n").encode()


def _editable(message: Any) -> str | None:
    """The payload, if it can be edited and a form can carry it there and back unchanged."""
    payload = message.payload
    if payload is None or message.redacted or message.status not in (Status.DEAD, Status.FAILED):
        return None
    if len(payload) > _EDITED_BYTES:
        return None
    try:
        text: str = payload.decode()
    except UnicodeDecodeError:
        return None
    # invisible characters cannot be edited, and browsers change line ends
    return None if CONTROL.search(text) else text


def _reason(asked: Asked) -> str | None:
    return asked.field("reason").strip()[:_REASON_CHARACTERS] or None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refused(400, "Not a number.")
    return int(text)


def _file(message: Any) -> Response:
    """A payload as a download: no browser opens it as a page."""
    name = "".join(
        char if char.isascii() and char.isalnum() else "_" for char in message.message_id
    )[:80]
    return Response(
        message.payload or b"",
        media_type="application/octet-stream",
        headers={"content-disposition": f'attachment; filename="{name or "payload"}.bin"'},
    )


def _links(explanation: Explanation) -> Values:
    """The causes and effects of a message that still have a row."""
    found = explanation.found
    causes = [link for row in found.inbox for link in row.causes]
    if found.outbox is not None:
        causes += found.outbox.causes
    caused = [link for row in found.inbox for link in row.caused]
    return {"causes": list(dict.fromkeys(causes)), "caused": list(dict.fromkeys(caused))}


class Place(NamedTuple):
    """Where the rows of a table are listed, where one of them is shown, and the titles of both pages."""

    kind: type[Filter[Any, Any]]
    listed: str
    title: str
    shown: str
    one: str


_MESSAGES = Place(InboxFilter, "/messages", "Messages", "/message", "Message")
_OUTBOX = Place(OutboxFilter, "/outbox", "Outbox", "/outgoing", "Outgoing message")
_QUARANTINE = Place(
    QuarantineFilter, "/quarantine", "Quarantine", "/quarantined", "Quarantined message"
)
_PLACES = {place.kind.table.name: place for place in (_MESSAGES, _OUTBOX, _QUARANTINE)}


def _place_of(asked: Asked) -> Place:
    """The table that a form is about."""
    return _known(_PLACES.get(asked.field("table")))


class Rule(NamedTuple):
    """The method, template and grants of a path, and what answers it."""

    method: str
    template: str
    answer: Callable[[Pages, Asked], Values | Response]
    grants: tuple[Grant, ...] = ()


#: Every path that needs a login.
RULES: dict[str, Rule] = {
    "/": Rule("GET", "overview.html", Pages.overview),
    "/consumer": Rule("GET", "one.html", partial(Pages.one, kind="consumer")),
    "/route": Rule("GET", "one.html", partial(Pages.one, kind="route")),
    _MESSAGES.listed: Rule("GET", "list.html", partial(Pages.listed, place=_MESSAGES)),
    _MESSAGES.shown: Rule("GET", "message.html", partial(Pages.shown, place=_MESSAGES)),
    _OUTBOX.listed: Rule("GET", "list.html", partial(Pages.listed, place=_OUTBOX)),
    _OUTBOX.shown: Rule("GET", "message.html", partial(Pages.shown, place=_OUTBOX)),
    _QUARANTINE.listed: Rule("GET", "list.html", partial(Pages.listed, place=_QUARANTINE)),
    _QUARANTINE.shown: Rule("GET", "message.html", partial(Pages.shown, place=_QUARANTINE)),
    "/failures": Rule("GET", "failures.html", Pages.failures),
    "/workers": Rule("GET", "workers.html", Pages.workers),
    "/pause": Rule("POST", "", Pages.pause, ("change",)),
    "/database": Rule("GET", "database.html", Pages.database),
    "/audit": Rule("GET", "audit.html", Pages.audit),
    "/reveal": Rule("POST", "message.html", Pages.reveal, ("payload",)),
    "/confirm": Rule("POST", "confirm.html", Pages.confirm, ("change",)),
    "/change": Rule("POST", "changed.html", Pages.change, ("change",)),
    # they show payloads
    "/edit": Rule("POST", "edit.html", Pages.edit, ("change", "payload")),
    "/rehearse": Rule("POST", "rehearsal.html", Pages.rehearse, ("change", "payload")),
    "/logout": Rule("POST", "", Pages.logout),
}


# -- requests -----------------------------------------------------------------------------------------


def _address(request: Request) -> str:
    """The path below where this application is mounted, with its query."""
    query = request.scope.get("query_string", b"").decode("ascii", "replace")
    return path_of(request) + (f"?{query}" if query else "")


def base_of(request: Request) -> str:
    """The prefix where this application is mounted, as a browser writes it."""
    # a browser takes a leading // for another host
    return quote(re.sub("/+", "/", _place(request)[0]))


def path_of(request: Request) -> str:
    """The path below where this application is mounted."""
    return _place(request)[1]


def _place(request: Request) -> tuple[str, str]:
    """Where this application is mounted, and the path below.

    By ASGI `root_path` says where, and `path` begins with it. Two do otherwise: Starlette mounts below a `root_path`
    that the server or FastAPI has not put into `path`; Litestar cuts its mount off `path` and leaves `root_path` as it
    was, so that only `raw_path` has it.

    Source: https://asgi.readthedocs.io/en/latest/specs/www.html#http-connection-scope
    """
    scope = request.scope
    path, root, above = (
        str(scope.get(name, "")).rstrip("/") for name in ("path", "root_path", "app_root_path")
    )
    for mount in (root, root.removeprefix(above)):
        if mount and f"{path}/".startswith(f"{mount}/"):
            return root, path.removeprefix(mount) or "/"
    asked = unquote((scope.get("raw_path") or b"").decode("ascii", "replace")).rstrip("/")
    if asked.endswith(path):
        mount = asked.removesuffix(path)
        root = mount if mount.startswith(root) else root + mount
    return root, path or "/"
