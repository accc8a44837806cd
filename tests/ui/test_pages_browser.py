"""The dashboard in a real browser: how it looks, whether everybody can use it, and an operator's night."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support import browser as installed
from tests.support.dashboard import TOKEN, Broken, fill, order, shop
from tests.support.databases import NewDatabase, require
from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S
from tests.support.workers import running, worker
from tests.ui.conftest import ALL, Serve
from txbox import App
from txbox.ui import Token, Tokens

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
    "outbox": "/outbox",
    "workers": "/workers",
    "database": "/database?examine=1",
    "audit": "/audit",
    "changes": "/operations",
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


def test_from_the_list_by_the_group_and_the_canary_to_processed(
    chromium: Browser, serve: Serve, url: str, broken: Broken
) -> None:
    with shop(url, broken) as app, running(worker(app)):
        fill(app, orders=30)
        dead = app.process(order(11 * 50), consumer="billing")
        page = opened(chromium, serve(app).port)
        log_in(page)
        # two attempts, then they are dead
        page.goto("/messages?status=dead&consumer=billing")
        expect(page.locator("tbody tr").filter(has_text="TimeoutError").first).to_be_visible()
        assert dead in ("failed", "dead")

        def canary() -> None:
            page.get_by_role("link", name="Failures").click()
            group = page.locator("tr").filter(has_text="TimeoutError at dashboard.py:bill")
            group.get_by_role("button", name="Canary…").click()
            page.get_by_label("Reason").fill("the gateway answers again")
            page.locator("button.first").click()

        canary()
        expect(page.get_by_text("Stopped: the failure returned")).to_be_visible()
        broken.gateway = False
        page.goto("/failures")
        if page.get_by_role("button", name="Canary…").count():
            canary()
            expect(page.get_by_text("the failure did not return")).to_be_visible()
        page.goto("/message?consumer=billing&message_id=order-0022")
        expect(page.locator("h1 .status.processed")).to_be_visible()
        page.goto("/audit")
        expect(page.get_by_text("the gateway answers again").first).to_be_visible()


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
        # the stream has told what there is; then something happens
        page.wait_for_timeout(1_500)
        app.process(order(17), consumer="billing")
        expect(page.get_by_text("billing has 1 dead message, ").first).to_be_visible()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_chart_is_read_by_keyboard_and_drawn_over(
    chromium: Browser, busy: App, serve: Serve
) -> None:
    page = opened(chromium, serve(busy).port)
    log_in(page)
    said = complaints(page)
    chart = page.locator(".chart").first
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
