"""The dashboard in applications of others, and behind a proxy: every link of every page leads to a page of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

import pytest
from fastapi import FastAPI
from litestar import Litestar, Router, asgi
from litestar.types import Receive, Scope, Send
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.support.dashboard import TOKEN, fill, shop
from tests.ui.conftest import ALL, Browser, served
from txbox import App
from txbox.ui import Dashboard, Token

MOUNT, PREFIX = "/ops/txbox", "/behind"


def in_starlette(dashboard: Dashboard) -> Any:
    return Starlette(routes=[Mount(MOUNT, app=dashboard)])


def in_fastapi(dashboard: Dashboard) -> Any:
    host = FastAPI()
    host.mount(MOUNT, dashboard)
    return host


def in_litestar(dashboard: Dashboard) -> Any:
    return Litestar([asgi(MOUNT, is_mount=True, copy_scope=True)(dashboard)])


def in_a_router_of_litestar(dashboard: Dashboard) -> Any:
    above, below = MOUNT.rsplit("/", 1)

    # a Router copies its handlers, and a dashboard is no value
    @asgi(f"/{below}", is_mount=True, copy_scope=True)
    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        await dashboard(scope, receive, send)  # type: ignore[arg-type]

    return Litestar([Router(above, route_handlers=[mounted])])


def open_to_all(host: Any) -> Any:
    return host


def behind_uvicorn(host: Any) -> Any:
    """A proxy cuts the prefix off, and `uvicorn --root-path` puts it before the path again, as ASGI says."""

    async def server(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"].startswith(PREFIX)
        await host({**scope, "root_path": PREFIX}, receive, send)

    return server


def behind_another(host: Any) -> Any:
    """A proxy cuts the prefix off, and the server says it in root_path alone; so does `FastAPI(root_path=…)`."""

    async def server(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"].startswith(PREFIX)
        path, raw = (scope[name][len(PREFIX) :] for name in ("path", "raw_path"))
        await host({**scope, "root_path": PREFIX, "path": path, "raw_path": raw}, receive, send)

    return server


class Page(HTMLParser):
    """Where a page leads to, and where its forms and its stream are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.posts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        writes = tag == "form" and given.get("method") == "post"
        for name in ("href", "src", "action", "formaction"):
            if given.get(name):
                (self.posts if writes or name == "formaction" else self.links).append(
                    str(given[name])
                )
        if given.get("data-live"):
            self.posts.append(str(given["data-live"]))  # a stream, which has no end


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with shop(f"sqlite:///{tmp_path_factory.mktemp('mounted') / 'shop.db'}") as app:
        app.init()
        fill(app, orders=5)
        yield app


@pytest.mark.parametrize("proxy", [open_to_all, behind_uvicorn, behind_another])
@pytest.mark.parametrize(
    "mounted", [in_starlette, in_fastapi, in_litestar, in_a_router_of_litestar]
)
def test_every_link_leads_to_a_page_and_a_form_is_taken(
    mounted: Callable[[Dashboard], Any], proxy: Callable[[Any], Any], filled: App
) -> None:
    base = MOUNT if proxy is open_to_all else PREFIX + MOUNT
    dashboard = filled.asgi(Token(TOKEN, grants=ALL))
    with served(proxy(mounted(dashboard)), dashboard) as port:
        browser = Browser(port)
        token = browser.get(f"{base}/").value("form_token")
        sent = {"form_token": token, "secret": TOKEN, "to": "/messages"}
        login = browser.ask("POST", f"{base}/login", sent)
        assert (login.status, login.headers["location"]) == (303, f"{base}/messages")
        assert f"path={base};" in login.headers["set-cookie"].lower()

        waiting = deque([f"{base}/"])
        seen = {*waiting}
        while waiting:
            at = waiting.popleft()
            answer = browser.get(at)
            assert answer.status == 200, at
            if not answer.headers["content-type"].startswith("text/html"):
                continue
            page = Page(answer.text)
            for link in [*page.links, *page.posts]:
                assert link.startswith((f"{base}/", "#")), (at, link)
            found = {urljoin(at, link).partition("#")[0] for link in page.links} - seen
            seen |= found
            waiting += sorted(found)
        assert f"{base}/audit" in seen
        assert any("message_id=order-0001" in each for each in seen)

        for action in ("pause", "resume"):
            sent = {"consumer": "billing", "reason": "a look", "action": action}
            assert browser.ask("POST", f"{base}/pause", sent).status == 400
            token = browser.get(f"{base}/workers").value("form_token")
            done = browser.ask("POST", f"{base}/pause", {"form_token": token, **sent})
            assert (done.status, done.headers["location"].rstrip("?")) == (303, f"{base}/workers")
            paused = [each.consumer for each in dashboard.admin.pauses()]
            assert paused == (["billing"] if action == "pause" else [])


def test_no_path_makes_links_to_another_host(filled: App) -> None:
    dashboard = filled.asgi(Token(TOKEN))
    with served(in_litestar(dashboard), dashboard) as port:
        answer = Browser(port).get(f"/{MOUNT}//messages")  # Litestar mends it for its routes
        assert answer.status == 401
        page = Page(answer.text)
        for link in [*page.links, *page.posts]:
            assert link.startswith((f"{MOUNT}/", "#")), link
