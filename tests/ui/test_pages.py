"""What the pages show, on every database, and what an action does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html import unescape
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.dashboard import HOSTILE, order, shop
from tests.support.databases import Raw
from tests.ui.conftest import Answer, Browser, Serve
from txbox import App, Message, RetryPolicy
from txbox.admin import Admin, changes
from txbox.admin.activity import Activities, Activity, Point
from txbox.session import drive
from txbox.store.activity import Counts, Kind
from txbox.ui import Grant
from txbox.ui import pages as dashboard

PAGES = (
    "/", "/?last=24h", "/messages", "/failures", "/outbox", "/quarantine", "/workers", "/database",
    "/database?examine=1", "/audit",
)  # fmt: skip


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def carried_out(browser: Browser, confirm: Answer, **fields: object) -> str:
    """Agree to a change as its page asks for it."""
    assert confirm.status == 200, confirm.text
    form: dict[str, object] = {}
    for tag, attributes in Elements(confirm.text).found:
        if tag == "input" and attributes.get("type") == "hidden":
            name = str(attributes["name"])
            form[name] = [*form.get(name, []), attributes["value"]]  # type: ignore[misc]
    form["reason"] = "a test"
    answer = browser.ask("POST", "/change", {**form, **fields})
    assert answer.status == 200, answer.text
    page: str = answer.text
    return page


# -- every database -------------------------------------------------------------------------------


def test_every_page_shows_what_is_there(filled: App, serve: Serve) -> None:
    browser = serve(filled)
    for path in PAGES:
        answer = browser.get(path)
        assert answer.status == 200, path
        assert not re.search(r"\bNone\b", answer.text), path
        assert "`" not in answer.text, path
    overview = browser.get("/").text
    assert "billing has 3 dead messages, the oldest received " in overview
    assert "billing has 2 messages in quarantine, the oldest for " in overview
    assert 'href="/messages?consumer=billing&amp;status=dead"' in overview
    assert "invoices" in overview
    assert "order-0051" in browser.get("/messages?status=dead&consumer=billing").text
    assert "order-0051" in browser.get("/messages?message_id=order-0051").text
    assert "parcel-0" not in browser.get("/messages?consumer=billing").text
    assert "invoices" in browser.get("/outbox?status=due").text
    assert "order-0003" in browser.get("/quarantine").text
    message = browser.get("/message?consumer=billing&message_id=order-0011").text
    assert "the gateway did not answer within 5 s for order 11" in message
    assert "order.placed" in message


def test_a_route_may_be_called_like_a_consumer(
    filled_sqlite: App, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment, hour = datetime(2026, 1, 31, tzinfo=UTC), timedelta(hours=1)

    def activity(kind: Kind, **counts: Any) -> tuple[Activity]:
        points = (Point(at=moment, counts=Counts(**counts)),)
        return (Activity(kind=kind, name="same", total=Counts(**counts), points=points),)

    found = Activities(
        since=moment, until=moment + hour, step=hour,
        consumers=activity("consumer", processed=7), routes=activity("route", failed=3),
    )  # fmt: skip
    monkeypatch.setattr(Admin, "activity", lambda *_, **__: found)
    page = serve(filled_sqlite).get("/").text
    assert "same: 7 processed and 0 failed" in page
    assert "same: 0 processed and 3 failed" in page


def test_failures_stand_together_and_a_consumer_is_paused(filled: App, serve: Serve) -> None:
    browser = serve(filled)
    page = browser.get("/failures").text
    assert page.index("TimeoutError at dashboard.py:bill") < page.index(
        "Reject at dashboard.py:host"
    )
    assert "the gateway did not answer within 5 s" in page
    confirm = browser.post(
        "/confirm", on="/failures", table="inbox", action="canary all",
        **{"where.consumer": "billing", "where.fingerprint": "Reject at dashboard.py:bill"},
    )  # fmt: skip
    assert ": one, then ten, then the rest?" in confirm.text
    assert confirm.value("count") == "3"
    assert browser.post("/pause", on="/workers", consumer="billing", action="stop").status == 400
    paused = browser.post(
        "/pause", on="/workers", consumer="billing", action="pause", reason="the bank is away"
    )
    assert paused.status == 303
    assert "the bank is away; 5 messages are waiting." in browser.get("/").text
    assert "the bank is away" in browser.get("/workers").text
    assert browser.post("/pause", on="/workers", consumer="billing", action="resume").status == 303
    assert "the bank is away" not in browser.get("/workers").text
    assert "the bank is away" in browser.get("/audit").text


def test_both_payloads_of_a_quarantined_message_stand_side_by_side(
    filled: App, serve: Serve
) -> None:
    browser = serve(filled)
    link = re.search(
        r'<a href="(/quarantined[^"]*order-0003[^"]*)"', browser.get("/quarantine").text
    )
    assert link
    page = browser.get(unescape(link[1]))
    assert "The stored message with this id" in page.text
    named = {name: page.value(name) for name in ("consumer", "message_id", "hash")}
    revealed = browser.post(
        "/reveal", on=unescape(link[1]), table="quarantine", reason="why?", **named
    )
    assert re.search(r'<tr class="(changed|only aside)">.*?changed', revealed.text, re.DOTALL)
    # the stored one was looked at, too
    assert browser.get("/audit").text.count("why?") == 2


def test_a_quarantined_message_is_the_one_of_its_link(
    filled: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    """Not another consumer's with the same id and payload, nor the first message under this id."""
    changed = replace(order(5, changed=True), topic="strange")
    assert filled.database.sync is not None
    drive(filled.database.sync, filled.intake.unmatched, changed, "No handler consumes it.")
    filled.process(order(5, changed=True), consumer="billing")
    filled.process(order(5, changed="again"), consumer="billing")
    browser = serve(filled)
    links = [
        unescape(link)
        for link in re.findall(
            r'<a href="(/quarantined[^"]*order-0005[^"]*)"', browser.get("/quarantine").text
        )
    ]
    nobody, *billing = sorted(links, key=lambda link: "consumer=billing" in link)
    assert len(billing) == 2
    for link in links:
        page = browser.get(link).text
        assert "Cause and effects" not in page, "the first message has caused them"
        assert page.count("was set aside at") == 1, "the other copies have pages of their own"
        assert ("No handler consumes it." in page) is (link == nobody)
    page = browser.get(nobody).text
    assert "The stored message with this id" not in page
    pick = re.search(r'name="pick" value="([^"]*)"', page)
    assert pick
    assert json.loads(unescape(pick[1]))[0] == ""
    confirm = browser.post(
        "/confirm", on=nobody, table="quarantine", action="discard selected", pick=unescape(pick[1])
    )
    assert "1 quarantined message discarded." in carried_out(browser, confirm)
    rows = raw(database_url).rows("SELECT status FROM txbox_quarantine WHERE consumer = ''")
    assert rows == [("discarded",)]
    assert (
        "Cause and effects" in browser.get("/message?consumer=billing&message_id=order-0005").text
    )


def test_pages_go_on_where_they_ended(filled: App, serve: Serve) -> None:
    browser = serve(filled)
    seen: list[str] = []
    path = "/messages"
    while path:
        page = browser.get(path).text
        seen += re.findall(r'<th scope="row" class="id"[^>]*><a href="([^"]*)"', page)
        more = re.search(r'<a href="([^"]*)" rel="next"', page)
        path = unescape(more[1]) if more else ""
    assert len(seen) == len(set(seen)) == 60 * 2 + 3 + 1


def test_all_that_match_are_retried_and_audited(
    filled: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    browser = serve(filled)
    confirm = browser.post(
        "/confirm", on="/messages", table="inbox", action="retry all", back="/messages",
        **{"where.consumer": "billing"},
    )  # fmt: skip
    assert "Retry 3 dead messages of consumer billing?" in confirm.text
    page = carried_out(browser, confirm, reason="the bank is back")
    assert "3 messages retried." in page
    view = raw(database_url)
    dead = "SELECT count(*) FROM txbox_inbox WHERE consumer = 'billing' AND status = 'dead'"
    assert view.value(dead) == 0
    ((actor, action, affected, reason),) = view.rows(
        "SELECT actor, action, affected, reason FROM txbox_audit"
    )
    assert (actor, action, affected, reason) == ("ann", "retry", 3, "the bank is back")
    audit = browser.get("/audit").text
    assert "the bank is back" in audit
    assert "ann" in audit


def test_a_change_touches_no_more_than_was_agreed_to(
    filled: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    browser = serve(filled)
    confirm = browser.post(
        "/confirm", on="/messages", table="inbox", action="discard all", back="/messages",
        **{"where.consumer": "billing", "where.status": "dead"},
    )  # fmt: skip
    page = carried_out(browser, confirm, count="2")
    assert "2 messages discarded." in page
    counted = "SELECT count(*) FROM txbox_inbox WHERE consumer = 'billing' AND status = ?"
    assert raw(database_url).value(counted, ("discarded",)) == 2
    assert raw(database_url).value(counted, ("dead",)) == 1


def test_a_change_ends_with_its_request_and_any_process_goes_on_with_it(
    filled: App,
    serve: Serve,
    raw: Callable[[str], Raw],
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "_BATCH", 1)
    monkeypatch.setattr(dashboard, "_CHANGE_S", 0.0)
    monkeypatch.setattr(dashboard, "_TYPED", 1)
    secret = "the same in all processes of it"
    browser = serve(filled, secret=secret)
    page = browser.post(
        "/confirm", on="/messages", table="inbox", action="retry all", back="/messages",
        **{"where.consumer": "billing"},
    )  # fmt: skip
    fields: dict[str, object] = {"typed": "3", "action": "retry all"}
    dead = "SELECT count(*) FROM txbox_inbox WHERE consumer = 'billing' AND status = 'dead'"
    for rest in (2, 1, 0):
        page = browser.ask("POST", "/change", {**hidden(page, "/change"), "reason": "x", **fields})
        fields = {"action": "retry all"}
        assert page.status == 200
        assert "1 message retried." in page.text
        assert raw(database_url).value(dead) == rest
        assert (f"Retry the other {rest}" in page.text) is bool(rest)
        # a restart, or another process: nothing of the change was in its memory
        other = serve(filled, secret=secret)
        other.cookies = browser.cookies
        browser = other
    assert 'class="status done"' in page.text


def test_a_reroute_goes_exactly_where_the_form_says(
    filled_sqlite: App, serve: Serve, raw: Callable[[str], Raw], sqlite_url: str
) -> None:
    browser, view = serve(filled_sqlite), raw(sqlite_url)
    view.execute("UPDATE txbox_outbox SET route = 'gone'")
    routes = "SELECT DISTINCT route FROM txbox_outbox"
    for to, route in (("anycast", "anycast"), ("any", "")):
        confirm = browser.post("/confirm", table="outbox", action="reroute all", to=to)
        assert f"to {to}?" in confirm.text
        assert ("No relay is known to have the route" in confirm.text) is (to == "anycast")
        carried_out(browser, confirm)
        assert view.rows(routes) == [(route,)]
    nowhere = browser.post("/confirm", table="outbox", action="reroute all", to=" ")
    assert nowhere.status == 400
    assert "Which route?" in nowhere.text
    # the page of one completes the names that are known
    view.execute("UPDATE txbox_outbox SET route = 'elsewhere'")
    page = serve(filled_sqlite).get(
        f"/outgoing?message_id={view.value('SELECT min(id) FROM txbox_outbox')}"
    )
    assert '<option value="elsewhere">' in page.text


def test_a_quarantined_message_is_accepted_under_another_id(
    filled: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    browser = serve(filled)
    page = browser.get("/quarantine?consumer=billing").text
    picks = re.findall(r'name="pick" value="([^"]*)"', page)
    assert len(picks) == 2
    confirm = browser.post(
        "/confirm", on="/messages", table="quarantine", action="accept selected",
        pick=unescape(picks[0]), message_id="order-again",
    )  # fmt: skip
    page = carried_out(browser, confirm)
    assert "1 quarantined message accepted." in page
    status = "SELECT status FROM txbox_inbox WHERE message_id = 'order-again'"
    assert raw(database_url).value(status) == "pending"


def test_a_payload_takes_its_grant_and_leaves_its_mark(filled: App, serve: Serve) -> None:
    browser = serve(filled)
    path = "/message?consumer=billing&message_id=order-0011"
    hidden = browser.get(path).text
    assert "A-11" not in hidden
    assert "a" * 32 not in hidden
    named = {"table": "inbox", "consumer": "billing", "message_id": "order-0011"}
    revealed = browser.post("/reveal", on=path, reason="a complaint", **named)
    assert revealed.status == 200
    assert '"sku": "A-11"' in unescape(revealed.text)
    assert "a" * 32 in revealed.text
    assert browser.get(revealed.value("back")).status == 200  # where a change leads back to
    file = browser.ask(
        "POST", "/reveal", {**named, "form_token": revealed.value("form_token"), "as": "file"}
    )
    assert file.headers["content-type"] == "application/octet-stream"
    assert file.headers["content-disposition"].startswith("attachment")
    assert json.loads(file.body)["number"] == 11
    audit = browser.get("/audit").text
    assert audit.count("reveal") == 2
    assert "a complaint" in audit


def hidden(answer: Answer, action: str = "/edit") -> dict[str, object]:
    """The hidden fields of the last form of a page."""
    form = answer.text.rpartition(f'<form method="post" action="{action}"')[2]
    return {
        str(attributes["name"]): attributes["value"]
        for tag, attributes in Elements(form).found
        if tag == "input" and attributes.get("type") == "hidden"
    }


def text_of(answer: Answer) -> str:
    """What a browser has in the text area of a page: without the end of line that follows its tag."""
    found = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", answer.text, re.DOTALL)
    assert found, answer.text
    return unescape(found[1])


def test_a_dead_message_is_edited_and_retried(
    filled: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    browser = serve(filled)
    path = "/message?consumer=billing&message_id=order-0017"
    named = {"consumer": "billing", "message_id": "order-0017"}
    page = browser.post("/reveal", on=path, table="inbox", **named)
    # a browser ends lines in its own way
    corrected = text_of(page).replace("17", "18") + "\r\n"
    asked = browser.post(
        "/edit", on=path, payload=corrected, content_type="application/json", **named
    )
    assert "Edit 1 message and retry it?" in asked.text
    assert "order-0017" in asked.text
    status = (
        "SELECT status FROM txbox_inbox WHERE consumer = 'billing' AND message_id = 'order-0017'"
    )
    view = raw(database_url)
    assert view.value(status) == "dead"
    form = {**hidden(asked), "payload": text_of(asked), "reason": "a typing error"}
    assert browser.ask("POST", "/edit", form).status == 303
    assert view.value(status) == "failed"
    payload = view.value(status.replace("SELECT status", "SELECT payload"))
    assert json.loads(payload)["number"] == 18
    assert b"\r" not in bytes(payload)
    audit = browser.get("/audit").text
    assert "a typing error" in audit
    # what was agreed to was about another payload
    assert browser.ask("POST", "/edit", form).status == 409


def test_of_two_who_edit_a_message_the_second_is_told(
    filled: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    path = "/message?consumer=billing&message_id=order-0017"
    named = {"consumer": "billing", "message_id": "order-0017"}
    asked: list[tuple[Browser, dict[str, object]]] = []
    for payload in ('{"number": 1}', '{"number": 2}'):
        browser = serve(filled)
        page = browser.post(
            "/edit", on=path, payload=payload, content_type="application/json", **named
        )
        asked.append((browser, {**hidden(page), "payload": payload}))
    assert [browser.ask("POST", "/edit", form).status for browser, form in asked] == [303, 409]
    stored = (
        "SELECT payload FROM txbox_inbox WHERE consumer = 'billing' AND message_id = 'order-0017'"
    )
    assert json.loads(raw(database_url).value(stored)) == {"number": 1}


def test_what_no_form_can_carry_is_edited_on_the_command_line(
    serve: Serve, sqlite_url: str
) -> None:
    with shop(sqlite_url) as app:
        for name, payload in {
            "bytes": b"\xff\xfe",
            "lines": b"a\r\nb",
            "large": b"1" * 70_000,
        }.items():
            message = Message(id=name, topic="shipments", payload=payload)
            assert app.process(message, consumer="parcels") == "dead"
            page = serve(app).post(
                "/reveal", on="/audit", table="inbox", consumer="parcels", message_id=name
            )
            assert page.status == 200
            assert "/edit" not in page.text


def test_a_rehearsal_is_shown_and_leaves_nothing(filled_sqlite: App, serve: Serve) -> None:
    browser = serve(filled_sqlite)
    path = "/message?consumer=billing&message_id=order-0017"
    assert "Rehearse" in browser.get(path).text
    named = {"consumer": "billing", "message_id": "order-0017"}
    page = browser.post("/rehearse", on=path, **named)
    assert 'class="status dead"' in page.text
    assert "the card was declined" in page.text
    before = browser.get("/outbox").text.count("invoices")
    page = browser.post("/rehearse", on=path, payload=json.dumps({"number": 20}), **named)
    assert 'class="status processed"' in page.text
    assert "invoices" in page.text
    assert browser.get("/outbox").text.count("invoices") == before
    assert 'class="status dead"' in browser.get(path).text
    assert browser.get("/audit").text.count("rehearse") == 2


def test_a_processed_message_is_replayed(filled_sqlite: App, serve: Serve) -> None:
    browser = serve(filled_sqlite)
    path = "/message?consumer=billing&message_id=order-0010"
    page = browser.get(path)
    assert "Replay…" in page.text
    confirm = browser.post(
        "/confirm",
        on=path,
        table="inbox",
        action="replay selected",
        back="/messages",
        pick=page.value("pick"),
    )
    assert "Replay 1 message?" in confirm.text
    assert "1 message replayed." in carried_out(browser, confirm, reason="the invoice was lost")
    assert "the invoice was lost" in browser.get("/audit").text


@pytest.mark.parametrize("grants", [(), ("change",)])
def test_no_page_has_a_text_of_an_error_for_users_without_the_grant(
    database_url: str, serve: Serve, grants: tuple[Grant, ...]
) -> None:
    """Nor that of the message ahead, of what a canary met, or of an outgoing message."""
    secret = "4111-1111"
    with App(database_url) as app:

        @app.handler(
            "orders", consumer="billing", ordered=True, dead_blocks=True, keep_payload="always",
            retry=RetryPolicy(max_attempts=1),
        )  # fmt: skip
        def bill(message: Message[Any], tx: Any) -> None:
            raise ValueError(f"card {secret} was declined")

        for number in (1, 2):
            app.process(Message(id=f"o-{number}", topic="orders", key="k", payload=secret.encode()))
        app.process(Message(id="o-1", topic="orders", key="k", payload=b"x" + secret.encode()))
        for browser, sees in (
            (serve(app), True),
            (serve(app, grants=grants), False),
        ):
            named = "message_id=o-1&consumer=billing"
            asked = browser.get("/quarantine").text
            aside = re.search(r'href="(/quarantined[^"]+)"', asked)
            assert aside
            pages = [
                *PAGES, f"/message?{named}", "/message?message_id=o-2&consumer=billing", unescape(aside[1]),
            ]  # fmt: skip
            texts = {page: browser.get(page).text for page in pages}
            if "change" in grants or sees:
                confirm = browser.post(
                    "/confirm", on="/messages", table="inbox", action="replay selected",
                    pick=json.dumps(["billing", "o-1"]),
                )  # fmt: skip
                texts["confirm"] = confirm.text
            shows = {page for page, text in texts.items() if secret in text}
            if sees:
                assert {"/messages", "/failures", pages[-3], pages[-2]} <= shows
            else:
                assert not shows
                assert "That one failed with ValueError" in texts[pages[-2]]


def test_without_the_grant_no_text_of_an_error_is_shown(filled: App, serve: Serve) -> None:
    browser = serve(filled, grants=())
    for path in ("/messages", "/message?consumer=billing&message_id=order-0011"):
        page = browser.get(path).text
        assert "TimeoutError" in page
        assert "the gateway did not answer" not in page
        assert 'name="pick"' not in page
        assert "/reveal" not in page


# -- strangers ------------------------------------------------------------------------------------


def test_nothing_of_a_hostile_message_gets_out_of_its_cell(
    filled: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    browser = serve(filled)
    # a role that may write the audit may name what it likes
    raw(database_url).execute(
        "INSERT INTO txbox_audit (actor, action, filter, affected) VALUES ('eve', 'retry', ?, 1)",
        (json.dumps({HOSTILE: HOSTILE}),),
    )
    consumer, named = "<b>guests</b>", quote(HOSTILE, safe="")
    path = f"/message?consumer={quote(consumer, safe='')}&message_id={named}"
    pages = {path: browser.get(path) for path in (*PAGES, path, f"/messages?key={named}")}
    pages["/reveal"] = browser.post(
        "/reveal", on=path, table="inbox", consumer=consumer, message_id=HOSTILE, reason=HOSTILE
    )
    pages["/audit"] = browser.get("/audit")
    pages["/confirm"] = browser.post(
        "/confirm", on=path, table="inbox", action="retry selected",
        pick=json.dumps([consumer, HOSTILE]), back="//evil.example",
    )  # fmt: skip
    for where, answer in pages.items():
        assert answer.status == 200, where
        elements = Elements(answer.text).found
        assert "b" not in {tag for tag, _ in elements}, where
        for tag, attributes in elements:
            assert not any(name.startswith("on") for name in attributes), where
            if tag == "script":
                assert str(attributes["src"]).startswith("/static/"), where
            if tag == "img":
                assert str(attributes["src"]).startswith("/static/"), where
            for name in ("href", "action", "src"):
                assert not str(attributes.get(name, "/")).startswith(("//", "javascript")), where
        # what a form sends back is sent as it is
        shown = re.sub(r"<input[^>]*>", "", answer.text)
        assert not set("\x1b\u202e\u200b") & set(shown), where
    assert '<span class="unseen">\\x202e</span>' in pages[path].text


def test_a_large_payload_is_cut_and_bytes_are_shown_as_such(serve: Serve, sqlite_url: str) -> None:
    with shop(sqlite_url) as app:
        for message_id, payload in (("large", b"x" * 1_000_000), ("bytes", b"\x00\xff<b>\x1b")):
            app.process(Message(id=message_id, topic="hostile", payload=payload))
        browser = serve(app)
        named = {"table": "inbox", "consumer": "<b>guests</b>"}
        large = browser.post("/reveal", on="/messages", message_id="large", **named)
        assert len(large.body) < 400_000
        assert "cut" in large.text
        shown = browser.post("/reveal", on="/messages", message_id="bytes", **named)
        assert "00 ff 3c 62 3e 1b" in shown.text


@pytest.mark.parametrize("path", ["/static/txbox.css", "/static/txbox.js", "/static/icon.svg"])
def test_what_pages_are_made_of_needs_no_login(path: str, filled_sqlite: App, serve: Serve) -> None:
    browser = serve(filled_sqlite)
    browser.cookies.clear()
    answer = browser.get(path)
    assert answer.status == 200
    assert answer.headers["x-content-type-options"] == "nosniff"
