"""The dashboard in a real browser: how it looks, whether everybody can use it, and an operator's night."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.support import browser as installed
from tests.support import demo_data
from tests.support.dashboard import TOKEN, Broken, fill, order, shop
from tests.support.databases import NewDatabase, Raw, require
from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from tests.ui.conftest import ALL, Serve
from txbox import App, ui
from txbox.admin import Admin
from txbox.ui import Token, Tokens, pages

pytestmark = pytest.mark.slow
expect.set_options(timeout=DEADLINE_S * 1000)

SHOTS = ROOT / "build" / "ui"
PAGES = {
    "overview": "/",
    "overview-table": "/?table=1",
    "consumer": "/consumer?name=billing",
    "route": "/route?name=",
    "messages": "/messages",
    "dead": "/messages?status=dead",
    "message": "/message?consumer=billing&message_id=order-0017",
    "failures": "/failures",
    "quarantine": "/quarantine",
    "consumer-table": "/consumer?name=billing&table=1",
    "outbox": "/outbox",
    "workers": "/workers",
    "database": "/database?examine=1",
    "audit": "/audit",
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    require(installed.missing())
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=installed.chromium(), args=["--no-sandbox"]
        )
        yield launched
        launched.close()


@pytest.fixture
def broken() -> Broken:
    return Broken()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, new_database: NewDatabase) -> str:
    """Once for each database that can rehearse."""
    return new_database(request.param)


@pytest.fixture
def busy(url: str, broken: Broken) -> Iterator[App]:
    """A shop with everything in it, and a worker that works."""
    with shop(url, broken) as app:
        fill(app)
        app.process(order(3), consumer="billing")
        with running(worker(app)):
            yield app


def opened(
    chromium: Browser,
    port: int,
    *,
    width: int = 1280,
    scheme: Literal["light", "dark"] = "light",
    scripts: bool = True,
) -> Page:
    """A page of a browser that has just been started; whatever it complains about fails the test."""
    context = chromium.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        base_url=f"http://127.0.0.1:{port}",
        java_script_enabled=scripts,
    )
    page = context.new_page()
    page.set_default_timeout(DEADLINE_S * 1000)
    return page


def complaints(page: Page) -> list[str]:
    """What the page says on the console from now on: refused scripts and styles are told there."""
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "console", lambda message: said.append(message.text) if message.type == "error" else None
    )
    return said


def log_in(page: Page, secret: str = TOKEN) -> None:
    page.goto("/")
    page.locator("input[name=secret]").fill(secret)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")


def violations(page: Page, *, again: bool = True) -> list[str]:
    """What axe-core finds serious or worse.

    Args:
        again: load the page once more, without its policy against scripts that are not its own; else its
            script is run where a page has none.
    """
    if again:
        page.context.new_cdp_session(page).send("Page.setBypassCSP", {"enabled": True})
        page.reload()
    page.evaluate(installed.axe().read_text() + "\n0")
    found: Any = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['help']}: {each['nodes'][0]['html']}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_and_everybody_can_use_it(
    scheme: Literal["light", "dark"], width: int, chromium: Browser, busy: App, serve: Serve
) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page = opened(chromium, serve(busy).port, width=width, scheme=scheme)
    page.goto("/")
    page.screenshot(path=SHOTS / f"login-{scheme}-{width}.png")
    assert not violations(page)
    log_in(page)
    said = complaints(page)
    wrong: list[str] = []
    aside = busy_quarantined(page)
    for name, path in {**PAGES, "quarantined": aside}.items():
        page.goto(path)
        page.screenshot(path=SHOTS / f"{name}-{scheme}-{width}.png", full_page=True)
        overflow = page.evaluate(
            "() => document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
        )
        if overflow > 0:
            wrong.append(f"{name} is {overflow} pixels too wide")
        assert not said, (name, said)
        wrong += [f"{name}: {violation}" for violation in violations(page)]
        said.clear()
    assert not wrong, "\n".join(wrong)


def busy_quarantined(page: Page) -> str:
    page.goto("/quarantine")
    return str(page.locator("th.id a").first.get_attribute("href"))


class Hand:
    """Does what an operator does, with a pointer or by the keyboard alone."""

    def __init__(self, page: Page, *, keyboard: bool) -> None:
        self.page = page
        self._keyboard = keyboard

    def reach(self, place: Locator) -> None:
        """Go from what has the focus to this, by as many tabs as it takes."""
        place.wait_for(state="attached")
        for _ in range(300):
            if place.evaluate("element => element === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the keyboard does not come to {place}")

    def press(self, place: Locator) -> None:
        if self._keyboard:
            self.reach(place)
            self.page.keyboard.press("Enter")
        else:
            place.click()

    def type(self, place: Locator, text: str) -> None:
        if self._keyboard:
            self.reach(place)
            self.page.keyboard.type(text)
        else:
            place.fill(text)

    def step_of_a_chart(self, said: str) -> None:
        """Follow the first step of a chart that says this."""
        chart = self.page.locator(".chart").first
        steps = chart.locator("a").filter(has_text=said)

        def counted() -> bool:
            # workers write their counts every few seconds, and no page without scripts refreshes itself
            if not steps.count():
                self.page.reload()
            return steps.count() > 0

        eventually(lambda: counted() or None, f"a step with {said!r}")
        if not self._keyboard:
            steps.first.click()
            return
        self.reach(chart.locator("svg"))
        self.page.keyboard.press("Home")
        while not steps.first.evaluate("element => element === document.activeElement"):
            self.page.keyboard.press("ArrowRight")
        self.page.keyboard.press("Enter")


@pytest.mark.parametrize(
    ("url", "how"),
    [
        ("sqlite", "pointer"),
        ("postgresql", "pointer"),
        ("sqlite", "keyboard"),
        ("sqlite", "without scripts"),
    ],
    indirect=["url"],
)
def test_from_an_alert_by_the_time_the_group_and_the_canary_to_processed(
    how: str, chromium: Browser, serve: Serve, url: str, broken: Broken
) -> None:
    with shop(url, broken) as app, running(worker(app)):
        fill(app, orders=30)

        def retries() -> bool:
            (status,) = [one for one in Admin(app).status() if one.consumer == "billing"]
            return status.counts.get("failed", 0) == 0

        # their second attempts fail, too, and then they are dead
        eventually(lambda: retries() or None, "the last attempts")
        page = opened(chromium, serve(app).port, scripts=how != "without scripts")
        log_in(page)
        said, hand = complaints(page), Hand(page, keyboard=how == "keyboard")
        title = page.get_by_role("heading", level=1)
        # the alert leads to what it is about
        hand.press(page.locator(".alert a", has_text="billing").first)
        expect(page.locator("tbody tr").filter(has_text="TimeoutError").first).to_be_visible()
        # what was received when they became dead
        hand.press(page.get_by_role("link", name="Overview", exact=True))
        hand.press(page.locator("tbody").get_by_role("link", name="billing").first)
        expect(title).to_contain_text("billing")
        hand.step_of_a_chart("dead")
        expect(page.get_by_label("Received from")).not_to_have_value("")
        expect(page.locator("select[name=consumer]")).to_have_value("billing")
        expect(page.locator("tbody tr").filter(has_text="order-0022")).to_be_visible()
        # the beginning of an id
        search = page.get_by_label("Search")
        hand.type(search, "order-002")
        hand.press(page.get_by_role("button", name="Filter"))
        expect(page).to_have_url(re.compile("id_prefix=order-002"))
        expect(page.locator("tbody tr").filter(has_text="order-0022")).to_be_visible()
        expect(page.locator("tbody tr").filter(has_text="order-0011")).to_have_count(0)

        def canary() -> None:
            hand.press(page.get_by_role("link", name="Failures", exact=True))
            group = page.locator("tr").filter(has_text="TimeoutError at dashboard.py:bill")
            hand.press(group.get_by_role("button", name="Retry with canary…"))
            hand.type(page.get_by_label("Reason"), "the gateway answers again")
            hand.press(page.locator("button.first"))

        canary()
        # it undoes itself: what failed again is dead again
        expect(page.get_by_text("Stopped: the failure returned")).to_be_visible()
        eventually(lambda: retries() or None, "the last attempts")
        broken.gateway = False
        canary()
        expect(page.get_by_text("the failure did not return")).to_be_visible()
        page.goto("/message?consumer=billing&message_id=order-0022")
        expect(page.locator("h1 .status.processed")).to_be_visible()
        page.goto("/audit")
        expect(page.get_by_text("the gateway answers again").first).to_be_visible()
        assert not said


def test_much_is_discarded_with_its_typed_number(
    chromium: Browser,
    serve: Serve,
    sqlite_url: str,
    raw: Callable[[str], Raw],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "_TYPED", 20)
    view = raw(sqlite_url)
    demo_data.fill(view, scale=0.003)
    aside = "SELECT count(*) FROM txbox_quarantine WHERE status = 'quarantined'"
    flood = view.value(f"{aside} AND message_id LIKE '//legacy-crm %'")
    others = view.value(aside) - flood
    assert flood > 20
    assert others
    with App(sqlite_url) as app:
        page = opened(chromium, serve(app).port)
        log_in(page)
        # one producer of two that reuse ids
        page.get_by_role("link", name="Quarantine", exact=True).click()
        group = page.locator("table.groups tr").filter(has_text="legacy-crm")
        expect(group.get_by_role("cell", name=str(flood), exact=True)).to_be_visible()
        group.get_by_role("button", name="Discard…").click()
        expect(page.get_by_text("Discarding cannot be undone.")).to_be_visible()
        expect(page.get_by_text("//legacy-crm").first).to_be_visible()
        do = page.locator("button.first.risky")
        typed = page.get_by_label(f"Type {flood}")
        for reason, number in (("", ""), ("a flood", ""), ("a flood", str(flood - 1))):
            page.get_by_label("Reason").fill(reason)
            typed.fill(number)
            do.click()
            # the browser does not send it
            expect(page.get_by_role("heading", level=1)).to_contain_text("Discard")
            assert page.locator(":invalid").count()
        typed.fill(str(flood))
        do.click()
        expect(page.get_by_text(f"{flood} quarantined messages discarded.")).to_be_visible()
    assert view.value(aside) == others


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_the_keys_are_listed_and_lead_to_every_page(
    chromium: Browser, busy: App, serve: Serve
) -> None:
    page = opened(chromium, serve(busy).port)
    log_in(page)
    page.keyboard.press("?")
    keys = page.locator("dialog")
    expect(keys).to_be_visible()
    assert not violations(page, again=False)
    page.keyboard.press("g")
    page.keyboard.press("m")
    page.keyboard.press("Escape")
    expect(keys).to_be_hidden()
    for key, name in {"m": "Messages", "f": "Failures", "q": "Quarantine", "x": "Outbox", "w": "Workers",
                      "d": "Database", "a": "Audit", "o": "Overview"}.items():  # fmt: skip
        expect(page.locator("dt").filter(has_text=re.compile(f"g {key}"))).to_have_count(1)
        page.keyboard.press("g")
        page.keyboard.press(key)
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
    page.goto("/messages")
    page.keyboard.press("/")
    expect(page.get_by_label("Search")).to_be_focused()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_one_message_is_rehearsed_edited_retried_and_replayed(
    scheme: Literal["light", "dark"], width: int, chromium: Browser, busy: App, serve: Serve
) -> None:
    page = opened(chromium, serve(busy).port, width=width, scheme=scheme)
    log_in(page)
    said, wrong = complaints(page), list[str]()

    def looked_at(name: str) -> None:
        page.screenshot(path=SHOTS / f"{name}-{scheme}-{width}.png", full_page=True)
        wrong.extend(f"{name}: {violation}" for violation in violations(page, again=False))
        overflow = page.evaluate(
            "() => document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
        )
        if overflow > 0:
            wrong.append(f"{name} is {overflow} pixels too wide")

    page.goto("/messages?status=dead&consumer=billing")
    page.get_by_role("link", name="order-0017").click()
    page.get_by_role("button", name="Show payload and headers").click()
    looked_at("revealed")
    page.get_by_role("button", name="Rehearse with this").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("It would be dead")
    expect(page.get_by_text("the card was declined").first).to_be_visible()
    looked_at("rehearsed-dead")
    page.get_by_role("link", name="billing / order-0017").click()
    page.get_by_role("button", name="Show payload and headers").click()
    # a number that the shop takes, and stages an invoice for
    payload = page.locator("textarea[name=payload]")
    payload.fill(payload.input_value().replace('"number": 17', '"number": 20'))
    page.get_by_role("button", name="Rehearse with this").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("It would be processed")
    expect(page.get_by_role("cell", name="invoices")).to_be_visible()
    looked_at("rehearsed-processed")
    page.get_by_role("button", name="Edit with this payload…").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Edit 1 message and retry it?")
    expect(page.locator("table.diff tr.changed")).to_have_count(1)
    looked_at("edit")
    page.get_by_label("Reason").fill("a typing error")
    page.get_by_role("button", name="Edit and retry 1").click()
    page.goto("/message?consumer=billing&message_id=order-0017")
    expect(page.locator("h1 .status.processed")).to_be_visible()
    page.get_by_role("button", name="Replay…").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Replay 1 message?")
    looked_at("replay")
    page.get_by_label("Reason").fill("the invoice was lost")
    page.locator("button.first").click()
    expect(page.get_by_text("1 message replayed.")).to_be_visible()
    looked_at("replayed")
    page.goto("/audit")
    for reason in ("a typing error", "the invoice was lost"):
        expect(page.get_by_text(reason).first).to_be_visible()
    assert not said
    assert not wrong, "\n".join(wrong)


def test_a_quarantined_message_is_looked_at_and_accepted(
    chromium: Browser, busy: App, serve: Serve
) -> None:
    page = opened(chromium, serve(busy).port)
    log_in(page)
    page.goto("/quarantine")
    page.get_by_role("link", name="order-0003").click()
    page.get_by_label("Reason").fill("what is it?")
    page.get_by_role("button", name="Show payload and headers").click()
    changed = page.locator("table.diff tr:not(.same)")
    expect(changed.filter(has_text="changed").first).to_be_visible()
    page.go_back()
    page.get_by_label("Accept under the id").fill("order-0003-b")
    page.get_by_role("button", name="Accept…").click()
    page.locator("button.first").click()
    expect(page.get_by_text("1 quarantined message accepted.")).to_be_visible()
    page.goto("/message?consumer=billing&message_id=order-0003-b")
    expect(page.locator("h1 .status")).to_be_visible()


def test_whoever_may_not_is_told_and_whoever_may_can(
    chromium: Browser, busy: App, serve: Serve
) -> None:
    ann, nobody = "a token of ann, who may change", "a token of eve, who may not"
    tokens = Tokens(Token(ann, actor="ann", grants=ALL), Token(nobody, actor="eve"))
    port = serve(busy, authenticator=tokens).port
    eve = opened(chromium, port)
    log_in(eve, nobody)
    eve.goto("/message?consumer=billing&message_id=order-0017")
    expect(eve.get_by_text("To see payload and header values you need the grant")).to_be_visible()
    assert eve.get_by_role("button", name="Retry…").count() == 0
    token = eve.locator("input[name=form_token]").first.get_attribute("value")
    answer = eve.request.post("/confirm", form={"form_token": str(token)})
    assert answer.status == 403
    eve.get_by_role("button", name="Log out").click()
    log_in(eve, ann)
    eve.goto("/message?consumer=billing&message_id=order-0017")
    eve.get_by_role("button", name="Retry…").click()
    expect(eve.get_by_role("heading", level=1)).to_contain_text("Retry 1 message?")


def test_it_works_without_scripts(chromium: Browser, busy: App, serve: Serve) -> None:
    page = opened(chromium, serve(busy).port, scripts=False)
    log_in(page)
    page.goto("/messages?status=dead&consumer=billing")
    page.locator("input[name=pick]").first.check()
    page.get_by_role("button", name="Discard selected…").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Discard 1 message?")
    page.locator("button.first").click()
    # the page of the change loads itself again until that is done
    expect(page.get_by_text("1 message discarded.")).to_be_visible()


def test_a_page_that_is_open_stays_fresh(chromium: Browser, serve: Serve, url: str) -> None:
    with shop(url) as app:
        fill(app, orders=3)
        page = opened(chromium, serve(app).port)
        log_in(page)
        expect(page.get_by_text("Nothing is stuck.")).to_have_count(0)
        dead = page.locator(".alert").filter(has_text="Dead messages")
        expect(dead).to_have_count(0)
        app.process(order(17), consumer="billing")
        expect(dead.get_by_role("link", name="billing")).to_be_visible()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_the_charts_of_an_open_page_go_on_where_nothing_is_stuck(
    chromium: Browser,
    serve: Serve,
    url: str,
    raw: Callable[[str], Raw],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ui, "_COUNTED_S", 1.0)
    with shop(url) as app:
        page = opened(chromium, serve(app).port)
        log_in(page)
        chart = page.locator(".chart").first
        expect(chart.get_by_text("Nothing in this time.")).to_be_visible()
        raw(url).execute(
            "INSERT INTO txbox_activity (minute, kind, name, worker, received, processed) VALUES (?, ?, ?, ?, 5, 5)",
            (int(time.time()) // 60, "consumer", "billing", "w"),
        )
        expect(chart.get_by_text("processed 5")).to_be_visible()
        expect(page.get_by_text("Nothing is stuck.")).to_be_visible()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_chart_is_read_by_keyboard_and_drawn_over(
    chromium: Browser, busy: App, serve: Serve
) -> None:
    page = opened(chromium, serve(busy).port)
    log_in(page)
    said = complaints(page)
    chart = page.locator(".chart").first

    def drawn() -> bool:
        # workers write their counts every few seconds
        if not chart.locator("svg").count():
            page.reload()
        return chart.locator("svg").count() > 0

    eventually(lambda: drawn() or None, "a chart")
    chart.locator("svg").focus()
    for key, step in (("ArrowLeft", -1), ("ArrowLeft", -2), ("Home", 0), ("ArrowRight", 1)):
        page.keyboard.press(key)
        link = chart.locator("a").nth(step)
        expect(link).to_be_focused()
        expect(chart.locator(".read")).to_have_text(str(link.locator("title").text_content()))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Messages")
    page.go_back()
    box = chart.locator("svg").bounding_box()
    assert box
    for act, share in ((page.mouse.down, 0.25), (page.mouse.up, 0.75)):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 50, steps=5)
        act()
    expect(page.get_by_label("Received from")).not_to_have_value("")
    since, until = (
        datetime.fromisoformat(page.get_by_label(name).input_value())
        for name in ("Received from", "Before")
    )
    assert timedelta(minutes=28) <= until - since <= timedelta(minutes=34)
    page.get_by_role("button", name="Save this view…").wait_for()
    page.once("dialog", lambda dialog: dialog.accept("half an hour"))
    page.get_by_role("button", name="Save this view…").click()
    page.goto("/messages")
    page.get_by_role("link", name="half an hour").click()
    expect(page.get_by_label("Received from")).to_have_value(f"{since:%Y-%m-%dT%H:%M}")
    assert not said


def test_nothing_of_a_hostile_message_is_executed(
    chromium: Browser, busy: App, serve: Serve
) -> None:
    page = opened(chromium, serve(busy).port)
    log_in(page)
    said = complaints(page)
    page.goto(f"/messages?consumer={quote('<b>guests</b>')}")
    page.locator("th.id a").first.click()
    expect(page.locator("h1 .status.dead")).to_be_visible()
    page.get_by_role("button", name="Show payload and headers").click()
    expect(page.get_by_role("heading", name="Payload")).to_be_visible()
    assert "owned" not in page.title().split("document")[0]
    assert not said
    assert Path(installed.axe()).exists()
