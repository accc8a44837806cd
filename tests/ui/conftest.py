"""A dashboard on a port of its own, and a client that is no browser."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import unescape
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.dashboard import TOKEN, fill, shop
from tests.support.databases import FreshDatabase
from tests.support.waiting import DEADLINE_S
from txbox import App
from txbox.ui import Authenticate, Dashboard, Grant, Token, Tokens
from txbox.worker.serving import DASHBOARD, Server

ALL: tuple[Grant, ...] = ("change", "payload")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def value(self, name: str) -> str:
        """What a hidden field of a form has."""
        found = re.search(rf'name="{re.escape(name)}" value="([^"]*)"', self.text)
        assert found, self.text
        return unescape(found[1])


@dataclass(slots=True)
class Browser:
    """Keeps cookies, sends forms, and follows nothing."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)

    def ask(
        self,
        method: str,
        path: str,
        form: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        sent = {**self.headers}
        if self.cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        body = None
        if form is not None:
            body = urlencode(form, doseq=True).encode()
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        sent |= headers or {}
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            for cookie in answer.headers.get_all("set-cookie", []):
                name, _, value = cookie.partition(";")[0].partition("=")
                self.cookies[name] = value
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, on: str = "/audit", **form: object) -> Answer:
        """Send a form as the page `on` of the dashboard would."""
        token = self.get(on).value("form_token")
        return self.ask("POST", path, {"form_token": token, **form})

    def log_in(self, secret: str) -> Answer:
        self.cookies.pop("txbox_session", None)
        token = self.get("/").value("form_token")
        return self.ask("POST", "/login", {"form_token": token, "secret": secret})


@contextmanager
def served(application: Any, dashboard: Dashboard) -> Iterator[int]:
    """Serve an application that a dashboard is mounted in; the port."""

    class Host:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await application(scope, receive, send)

        async def ended(self) -> None:
            await dashboard.ended()

    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    server = Server(Host(), listener, DASHBOARD)
    server.start()
    try:
        yield port
    finally:
        server.close()


Serve = Callable[..., Browser]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(app, grants=…)`: a logged-in client of a dashboard of this app."""
    running: list[tuple[Server, Dashboard]] = []

    def start(
        app: App,
        *,
        grants: tuple[Grant, ...] = ALL,
        authenticator: Token | Tokens | Authenticate | None = None,
        hosts: tuple[str, ...] = (),
        proxies: tuple[str, ...] = (),
        secret: str | None = None,
        login: str | None = None,
    ) -> Browser:
        who = authenticator or Token(TOKEN, actor="ann", grants=grants)
        dashboard = app.asgi(who, hosts=hosts, proxies=proxies, secret=secret, login=login)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = Server(dashboard, listener, DASHBOARD)
        server.start()
        running.append((server, dashboard))
        browser = Browser(port)
        if authenticator is None:
            assert browser.log_in(TOKEN).status == 303
        return browser

    yield start
    for server, _ in running:
        server.close()


@pytest.fixture
def filled(database: FreshDatabase) -> Iterator[App]:
    """Once for every database: a shop with everything in it."""
    with shop(database.url) as app:
        fill(app)
        yield app


@pytest.fixture
def filled_sqlite(sqlite_url: str) -> Iterator[App]:
    with shop(sqlite_url) as app:
        fill(app)
        yield app
