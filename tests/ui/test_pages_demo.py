"""The pages of a bad night: what an operator sees first, where it leads, and what is asked before much is changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.databases import Raw
from tests.support.demo_data import CONSUMERS, STREAMS, fill
from tests.ui.conftest import Answer, Browser, Serve
from tests.ui.test_pages import PAGES, Elements, carried_out
from txbox import App, Message
from txbox.admin import Admin, look
from txbox.store.dialect import Dialect, as_time
from txbox.ui import pages


@pytest.fixture
def night(database_url: str, raw: Callable[[str], Raw]) -> Iterator[App]:
    """Two thousand messages of the demo, once for every database."""
    fill(raw(database_url), scale=0.001)
    with App(database_url) as app:
        for stream in STREAMS:
            for consumer in stream.consumers:
                app.handler(stream.topic, consumer=consumer)(handle)
        yield app


@pytest.fixture
def night_sqlite(sqlite_url: str, raw: Callable[[str], Raw]) -> Iterator[App]:
    fill(raw(sqlite_url), scale=0.005)
    with App(sqlite_url) as app:
        yield app


def handle(_message: Message[Any], _tx: Any) -> None: ...


def ids(answer: Answer) -> list[str]:
    """The ids of the messages that a list shows."""
    assert answer.status == 200, answer.text
    return [
        unescape(parse_qs(urlsplit(unescape(address)).query)["message_id"][0])
        for address in re.findall(r'<th scope="row" class="id"[^>]*><a href="([^"]*)"', answer.text)
    ]


def followed(browser: Browser, path: str) -> Answer:
    answer = browser.get(path)
    assert answer.status == 303, answer.text
    return browser.get(answer.headers["location"])


@pytest.mark.every_database
def test_from_the_overview_to_the_messages_of_a_time(
    night: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    browser = serve(night)
    spans = [f"/?last={last}" for last in ("15m", "6h", "7d")]
    for path in (
        *PAGES,
        *spans,
        "/?last=7d&table=1",
        "/route?name=rabbitmq",
        "/route?name=",
        "/consumer?name=nobody",
    ):
        answer = browser.get(path)
        assert answer.status == 200, path
        assert not re.search(r"\bNone\b", answer.text), path
    overview = browser.get("/?last=7d").text
    # the worst first, each name a link
    lines = re.findall(r'<li class="notice alert (\w*)">(.*?)</li>', overview, re.DOTALL)
    assert [kind for kind, _ in lines] == sorted(
        (kind for kind, _ in lines), key=["bad", "warn", ""].index
    )
    assert "ACCESS_REFUSED" in lines[0][1]
    assert 'href="/workers"' in lines[0][1]
    assert any("status=dead" in text for _, text in lines)
    assert overview.count('<figure class="chart">') == 3
    assert "gdpr-erasure paused by ann" in overview
    assert "processes with txbox" in overview
    every = [
        (consumer, message_id, as_time(at))
        for consumer, message_id, at in raw(database_url).rows(
            "SELECT consumer, message_id, received_at FROM txbox_inbox"
        )
    ]
    for page in ("/?last=7d", "/consumer?name=billing&last=7d"):
        text = browser.get(page).text
        links = re.findall(r'<a href="(/messages\?since=[^"]*)" tabindex="-1">', text)
        link = unescape(links[-3])
        asked = {name: values[0] for name, values in parse_qs(urlsplit(link).query).items()}
        assert asked.get("consumer") == ("billing" if "billing" in page else None)
        since, until = (
            datetime.fromisoformat(asked[name]).replace(tzinfo=UTC) for name in ("since", "until")
        )
        expected = [
            message_id.decode() if isinstance(message_id, bytes) else message_id
            for consumer, message_id, at in every
            if at is not None and since <= at < until and (page == "/?last=7d" or consumer in ("billing", b"billing"))
        ]  # fmt: skip
        assert sorted(ids(browser.get(link))) == sorted(expected)
        assert page != "/?last=7d" or expected


@pytest.mark.every_database
def test_the_search_box_takes_an_id_its_beginning_a_key_or_criteria(
    night: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    browser, view = serve(night), raw(database_url)
    found = view.value(
        "SELECT max(message_id) FROM txbox_inbox WHERE status = 'dead' AND error_type = 'KeyError'"
    )
    dead = found.decode() if isinstance(found, bytes) else str(found)
    assert set(ids(followed(browser, f"/messages?q={dead}"))) == {dead}
    assert dead in ids(followed(browser, f"/messages?q={dead[:-1]}"))
    criteria = followed(browser, "/messages?q=status:dead+consumer:billing+error:keyerr")
    assert dead in ids(criteria)
    assert 'name="where.error_type" value="KeyError"' in criteria.text
    key = view.value("SELECT max(id) FROM txbox_outbox WHERE status = 'dead'")
    outgoing = key.decode() if isinstance(key, bytes) else str(key)
    answer = browser.get(f"/outbox?q={outgoing}")
    assert answer.status == 303
    assert answer.headers["location"].startswith("/outgoing?"), "there is one"
    assert browser.get("/messages?q=customer-1").headers["location"] == "/messages?key=customer-1"
    for typed, hint in (
        ("statsu:dead", "did you mean &#39;status&#39;?"),
        ("status:deda", "did you mean &#39;dead&#39;?"),
    ):
        assert hint in browser.get(f"/messages?q={typed}").text
    assert (
        "did you mean &#39;billing&#39;?"
        in browser.get("/messages?consumer=biling&status=dead").text
    )
    assert (
        "did you mean &#39;KeyError&#39;?"
        in browser.get("/messages?error_type=KeyErorr&status=dead").text
    )
    assert browser.get("/messages?since=yesterday").status == 400


@pytest.mark.every_database
def test_what_failed_and_what_is_aside_is_grouped(
    night: App, serve: Serve, raw: Callable[[str], Raw], database_url: str
) -> None:
    browser, view = serve(night), raw(database_url)
    dead = view.value("SELECT count(*) FROM txbox_inbox WHERE fingerprint LIKE 'KeyError at %'")
    page = browser.get("/failures").text
    (group,) = [row for row in page.split("<tr>") if "KeyError at billing.py:take_payment" in row]
    assert f'data-label="Messages">{dead}<' in group
    assert f"failed in the last 24 hours: {dead}" in group, "the deploy was five hours ago"
    for by, heading in (("count", "Messages"), ("first", "First received"), ("trend", "Last 24")):
        page = browser.get(f"/failures?by={by}").text
        assert re.search(rf'aria-sort="descending"><a href="[^"]*by={by}">{heading}', page)
    begun = view.rows(
        "SELECT fingerprint, min(received_at) FROM txbox_inbox WHERE fingerprint IS NOT NULL"
        " AND status IN ('dead', 'failed') GROUP BY fingerprint ORDER BY 2 DESC"
    )
    page = browser.get("/failures?by=first").text
    assert re.findall(r'class="what">([^<]+)<', page) == [
        name.decode() if isinstance(name, bytes) else name for name, _ in begun
    ]
    # one producer of several whose ids are reused
    aside = "SELECT count(*) FROM txbox_quarantine WHERE message_id LIKE "
    page = browser.get("/quarantine").text
    assert "legacy-crm" in page
    assert "No handler consumes it." in page
    for producer in ("//legacy-crm", "//shop-web"):
        (row,) = [row for row in page.split("<tr>") if f">{producer}<" in row]
        count = view.value(
            f"{aside}'{producer} %'".replace("%", "%%" if view.product != "sqlite" else "%")
        )
        assert f'data-label="Messages">{count}<' in row
        link = re.search(r'<th scope="row"><a href="([^"]*)"', row)
        assert link
        listed = ids(browser.get(unescape(link[1])))
        assert listed
        assert all(name.startswith(f"{producer} ") for name in listed)
        assert len(listed) == min(count, 50)
    # the groups are of all that wait, not of what a filter leaves
    assert "By reason and producer" not in browser.get("/quarantine?topic=customers").text


def test_a_flood_elsewhere_does_not_cut_a_group(
    night_sqlite: App, raw: Callable[[str], Raw], sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_GROUPED", "_GROUPED_MIN"):
        monkeypatch.setattr(look, name, {"_GROUPED": 60, "_GROUPED_MIN": 2}[name])
    counts = dict(
        raw(sqlite_url).rows(
            "SELECT fingerprint, count(*) FROM txbox_inbox WHERE status IN ('dead', 'failed') GROUP BY 1"
        )
    )
    assert max(counts.values()) > 60 // 26, "a share for each consumer and status is less"
    groups = Admin(night_sqlite).failures()
    assert {group.fingerprint: group.count for group in groups} == counts
    assert not any(group.more for group in groups)
    monkeypatch.setattr(look, "_GROUPED", 2)
    assert any(group.more for group in Admin(night_sqlite).failures())


def test_attempts_that_failed_alike_are_one_line(
    night_sqlite: App, serve: Serve, raw: Callable[[str], Raw], sqlite_url: str
) -> None:
    dead = raw(sqlite_url).value(
        "SELECT max(message_id) FROM txbox_inbox WHERE status = 'dead' AND error_type = 'KeyError'"
    )
    page = serve(night_sqlite).get(f"/message?consumer=billing&message_id={dead}").text
    timeline = page[page.index("Timeline") : page.index("</ol>")]
    assert "attempts 6 and 7" in timeline
    assert "attempt 8" in timeline
    # the exception stands in the section of the last error, and its text, too
    assert "KeyError" not in timeline
    assert "currency" not in timeline
    assert page.count("<code>KeyError at billing.py:take_payment</code>") == 1
    workers = serve(night_sqlite).get("/workers").text
    assert workers.count("ACCESS_REFUSED") == 1
    assert "<summary>11 consumers</summary>" in workers


def test_a_search_that_stops_early_hints_at_a_typing_error_all_the_same(
    night_sqlite: App, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_LOOK_S", 0.0)
    page = serve(night_sqlite).get("/messages?error_type=KeyErorr").text
    assert "No match among recent messages." in page
    assert "did you mean &#39;KeyError&#39;?" in page


def test_who_is_at_work_is_read_once_for_a_page(
    night_sqlite: App, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, statement, names = serve(night_sqlite), Dialect.statement, list[str]()

    def remembered(dialect: Dialect, name: str, *args: Any) -> Any:
        names.append(name)
        return statement(dialect, name, *args)

    monkeypatch.setattr(Dialect, "statement", remembered)
    for page in ("/", "/consumer?name=billing", "/route?name=rabbitmq", "/workers"):
        names.clear()
        browser.get(page)
        assert (names.count("workers"), names.count("pauses")) == (1, 1), page


def test_an_unreachable_route_is_not_called_running_and_no_chart_is_empty(
    night_sqlite: App, serve: Serve
) -> None:
    browser = serve(night_sqlite)
    page = browser.get("/route?name=rabbitmq&last=15m").text
    assert '<span class="status unreachable">unreachable</span>' in page
    assert "Nothing in this time." in page
    for route in ("/route?name=kafka", "/consumer?name=billing"):
        assert '<span class="status running">running</span>' in browser.get(route).text


def test_a_consumer_and_a_route_are_shown_in_the_time_that_was_chosen(
    night_sqlite: App, serve: Serve
) -> None:
    browser = serve(night_sqlite)
    page = browser.get("/?last=24h").text
    for link in ("/consumer?name=billing", "/route?name=rabbitmq"):
        assert f'href="{link}&amp;last=24h"' in page
        assert f'href="{link}"' not in page
    assert (
        'href="/?last=24h">Overview</a> / consumer'
        in browser.get("/consumer?name=billing&last=24h").text
    )


def test_a_list_begins_with_what_is_looked_for(night_sqlite: App, serve: Serve) -> None:
    page = serve(night_sqlite).get("/messages?status=dead").text
    heads = re.findall(r'<th scope="col"[^>]*>([^<]+)</th>', page)
    assert heads[:3] == ["Id", "Error", "Status"]
    # what a list says of times needs no script
    assert re.search(r'<time datetime="[^"]+" title="[^"]+ UTC">\d+[dhms][^<]* ago</time>', page)
    for consumer in CONSUMERS:
        assert f'<option value="{consumer}">' in page
    assert "Retry and discard all matching: every dead message" in page


def test_much_is_changed_only_with_a_reason_and_the_typed_number(
    night_sqlite: App,
    serve: Serve,
    raw: Callable[[str], Raw],
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "_TYPED", 3)
    browser, view = serve(night_sqlite), raw(sqlite_url)
    dead = "SELECT count(*) FROM txbox_inbox WHERE status = 'dead'"
    count = view.value(dead)
    assert count > 3
    confirm = browser.post(
        "/confirm", on="/messages", table="inbox", action="discard all", **{"where.status": "dead"}
    )
    assert "Discarding cannot be undone." in confirm.text
    cells = re.findall(r"<td>billing</td><td>dead</td><td class=\"n\">(\d+)</td>", confirm.text)
    assert cells == [str(view.value(f"{dead} AND consumer = 'billing'"))]
    assert "<i>status</i> dead" in confirm.text
    form = {
        str(attributes["name"]): attributes["value"]
        for tag, attributes in Elements(confirm.text).found
        if tag == "input" and attributes.get("type") == "hidden"
    }
    for typed in (
        {},
        {"reason": "why not"},
        {"reason": "why not", "typed": str(count - 1)},
        {"typed": str(count)},
    ):
        assert browser.ask("POST", "/change", {**form, **typed}).status == 400
    assert view.value(dead) == count
    assert f"{count} messages discarded." in carried_out(
        browser, confirm, reason="why not", typed=str(count)
    )
    assert view.value(dead) == 0


def test_whoever_may_not_see_texts_of_errors_sees_none(night_sqlite: App, serve: Serve) -> None:
    paths = (
        "/?last=7d",
        "/consumer?name=billing",
        "/consumer?name=audit-trail",
        "/messages?status=dead",
        "/failures",
    )
    for grants, sees in (((), False), (("change",), False), (("payload",), True)):
        browser = serve(night_sqlite, grants=grants)
        texts = [browser.get(path).text for path in paths]
        assert any("currency" in text for text in texts) is sees
        # nor is a text found by them: only the type of an error is a criterion
        assert ids(browser.get("/messages?status=dead&error_type='currency'")) == []
