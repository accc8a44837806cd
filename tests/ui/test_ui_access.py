"""Who gets in, and what they may do: every route, every way to log in, and forms of other sites."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from tests.support.dashboard import TOKEN, shop
from tests.ui.conftest import ALL, Serve
from txbox import App
from txbox.errors import ConfigurationError
from txbox.events import Event, LoginRefused
from txbox.ui import Access, Dashboard, Grant, Token, Users, hashed
from txbox.ui.pages import RULES
from txbox.ui.security import Failures, Signed, known_host, same_origin

PATHS = [*((rule.method, path) for path, rule in RULES.items()), ("GET", "/live")]
GRANTED = [(path, grant) for path, rule in RULES.items() for grant in rule.grants]


@pytest.fixture
def app(sqlite_url: str) -> Iterator[App]:
    with shop(sqlite_url) as app:
        yield app


# -- every route ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_a_route_is_401_without_credentials(method: str, path: str, app: App, serve: Serve) -> None:
    browser = serve(app)
    browser.cookies.clear()
    answer = browser.ask(method, path, {} if method == "POST" else None)
    assert answer.status == 401
    assert "www-authenticate" in answer.headers


def test_who_is_turned_away_and_why(
    app: App, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Event] = []
    app.events.observers.append(seen.append)
    browser = serve(app)

    def cause(status: int, **headers: str) -> str:
        seen.clear()
        assert browser.ask("GET", "/", headers=headers).status == status
        (event,) = seen
        assert isinstance(event, LoginRefused)
        assert event.address == "127.0.0.1"
        return event.cause

    browser.cookies.clear()
    assert cause(401) == "missing"
    browser.cookies["txbox_session"] = "bm9ib2R5.1.0"
    assert cause(401) == "expired"
    browser.cookies.clear()
    assert cause(401, authorization="Basic eDp5") == "wrong"
    for _ in range(5):
        assert cause(401, authorization="Bearer secret-of-nobody") == "wrong"
    assert cause(429, authorization="Bearer secret-of-nobody") == "limited"
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line for line in told if "LoginRefused" in line] == [
        f"LoginRefused cause={cause} address=127.0.0.1"
        for cause in ("missing", "expired", "wrong", "limited")
    ]
    assert "secret" not in caplog.text


def test_a_host_application_turns_away(app: App, serve: Serve) -> None:
    seen: list[Event] = []
    app.events.observers.append(seen.append)
    assert serve(app, authenticator=lambda _: None).get("/").status == 401
    assert seen == [LoginRefused(cause="host", address="127.0.0.1")]


@pytest.mark.parametrize(("path", "grant"), GRANTED)
def test_a_route_is_403_without_its_grant(path: str, grant: Grant, app: App, serve: Serve) -> None:
    browser = serve(app, grants=tuple(other for other in ALL if other != grant))
    answer = browser.ask(RULES[path].method, path, {})
    assert answer.status == 403
    assert grant in answer.text


@pytest.mark.parametrize("path", [path for method, path in PATHS if method == "POST"])
@pytest.mark.parametrize("token", ["", "0" * 64])
def test_a_route_that_writes_is_400_without_the_token_of_its_form(
    path: str, token: str, app: App, serve: Serve
) -> None:
    browser = serve(app)
    assert browser.ask("POST", path, {"form_token": token}).status == 400


def test_logging_in_takes_the_token_of_its_form(app: App, serve: Serve) -> None:
    browser = serve(app)
    browser.cookies.clear()
    assert browser.ask("POST", "/login", {"secret": TOKEN}).status == 400


def test_a_form_of_another_login_is_refused(app: App, serve: Serve) -> None:
    users = Users({"ann": hashed("of ann"), "bob": hashed("of bob")})
    browser = serve(app, authenticator=users)
    assert browser.log_in("of ann", "ann").status == 303
    token = browser.get("/operations").value("form_token")
    assert browser.log_in("of bob", "bob").status == 303
    assert browser.ask("POST", "/logout", {"form_token": token}).status == 400


@pytest.mark.parametrize("path", [path for method, path in PATHS if method == "GET"])
def test_a_page_carries_what_keeps_others_out(path: str, app: App, serve: Serve) -> None:
    if path == "/live":
        pytest.skip("a stream: its headers are those of every answer")
    answer = serve(app).get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert "style=" not in answer.text
    assert "<script>" not in answer.text
    assert " onclick" not in answer.text
    for address in ("http://", "https://"):
        assert address not in answer.text


def test_cookies_are_kept_from_scripts_and_other_sites(app: App, serve: Serve) -> None:
    browser = serve(app)
    browser.cookies.clear()
    form = browser.get("/")
    login = browser.log_in(TOKEN)
    for answer, same_site in ((form, "strict"), (login, "lax")):
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert f"samesite={same_site}" in cookie


# -- other sites ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", ""])
def test_a_host_that_was_not_named_is_refused(host: str, app: App, serve: Serve) -> None:
    assert serve(app).ask("GET", "/", headers={"Host": host}).status == 400


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True), ("localhost:8484", True), ("127.0.0.1:1", True), ("[::1]:8484", True), ("[::1]", True),
        ("ops.example", True), ("OPS.example:443", True), ("ops.example.evil", False), ("x:localhost", False),
        ("10.0.0.1", False),
    ],
)  # fmt: skip
def test_hosts_that_are_known(host: str, known: bool) -> None:
    assert known_host(host, ["ops.example"]) is known


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_form_of_another_site_is_refused(headers: dict[str, str], app: App, serve: Serve) -> None:
    browser = serve(app)
    token = browser.get("/operations").value("form_token")
    answer = browser.ask("POST", "/logout", {"form_token": token}, headers)
    assert answer.status == 400
    assert "another site" in answer.text


def test_a_form_of_ours_is_taken() -> None:
    assert same_origin({"host": "ops:8484", "origin": "https://ops:8484"})
    assert same_origin({"host": "ops:8484"})


# -- logging in -----------------------------------------------------------------------------------


def test_the_dashboard_does_not_start_without_an_authenticator(app: App) -> None:
    for nobody in (None, Token, "token"):
        with pytest.raises(ConfigurationError, match="authenticator"):
            Dashboard(app, nobody)  # type: ignore[arg-type]


def test_a_short_token_and_a_plain_password_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="24 bytes"):
        Token("short")
    with pytest.raises(ConfigurationError, match="not hashed"):
        Users({"ann": "secret"})
    with pytest.raises(ConfigurationError, match="Line 1"):
        Users.read("ann")
    with pytest.raises(ConfigurationError, match="Unknown grant 'all'"):
        Token(TOKEN, grants=["all"])  # type: ignore[list-item]


def test_users_log_in_and_have_their_own_grants(app: App, serve: Serve) -> None:
    text = f"# who\nann:{hashed('of ann')}:change\n\nbob:{hashed('of bob')}\n"
    browser = serve(app, authenticator=Users.read(text))
    assert browser.log_in("of bob", "ann").status == 401
    assert browser.log_in("of ann", "ann").status == 303
    assert "ann" in browser.get("/").text
    assert browser.post("/cancel", name="x").status == 404
    assert browser.post("/reveal").status == 403
    assert browser.post("/logout").status == 303
    browser.cookies.pop("txbox_session")
    assert browser.log_in("of bob", "bob").status == 303
    assert browser.post("/cancel", name="x").status == 403


def test_credentials_in_the_header_are_enough(app: App, serve: Serve) -> None:
    browser = serve(app)
    browser.cookies.clear()
    assert browser.ask("GET", "/", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200
    assert browser.ask("GET", "/", headers={"Authorization": f"Bearer {TOKEN}x"}).status == 401
    users = serve(app, authenticator=Users({"ann": hashed("päss:word")}))
    given = base64.b64encode("ann:päss:word".encode()).decode()
    assert users.ask("GET", "/", headers={"Authorization": f"Basic {given}"}).status == 200
    assert users.ask("GET", "/", headers={"Authorization": "Basic !!!"}).status == 401


def test_the_host_application_may_say_who_asks(filled_sqlite: App, serve: Serve) -> None:
    async def who(request: Request) -> Access | None:
        name = request.headers.get("x-user")
        return Access(name, ["change"]) if name else None

    browser = serve(filled_sqlite, authenticator=who)
    assert browser.get("/").status == 401
    browser.headers["X-User"] = "carol"
    assert "carol" in browser.get("/").text
    assert browser.post("/reveal", on="/messages").status == 403
    assert browser.post("/cancel", on="/messages", name="x").status == 404


def test_failed_logins_are_bounded(app: App, serve: Serve) -> None:
    browser = serve(app)
    browser.cookies.clear()
    for _ in range(5):
        assert browser.log_in("wrong").status == 401
    answer = browser.log_in(TOKEN)
    assert answer.status == 429
    assert int(answer.headers["retry-after"]) > 0


def test_failures_are_forgotten_after_a_minute_and_kept_within_bounds() -> None:
    now = 0.0
    failures = Failures(lambda: now)
    for _ in range(5):
        assert failures.wait_s("1.2.3.4", "ann") == 0
        failures.add("1.2.3.4", "ann")
    assert failures.wait_s("1.2.3.4", "bob") == 60
    assert failures.wait_s("5.6.7.8", "ann") == 0
    now = 60.0
    assert failures.wait_s("1.2.3.4", "ann") == 0
    for number in range(11_000):
        failures.add(str(number), str(number))
    assert len(failures._since) == 10_000


def test_failures_with_a_token_keep_nobody_else_out() -> None:
    """A token is everybody's, so strangers who fail with it share no bound with those who have it."""
    dashboard = Dashboard("sqlite:///nowhere.db", Token(TOKEN))
    headers = [(b"authorization", b"Bearer wrong")]

    def request(address: str) -> Request:
        return Request({"type": "http", "headers": headers, "client": (address, 1)})

    async def attacked() -> Access | None:
        for number in range(100):
            # the form has a field for a name, which a token does not need
            wrong = dashboard._verify(request(f"10.0.0.{number}"), "x" * (number % 2), "wrong")
            assert await wrong is None
        return await dashboard._verify(request("5.6.7.8"), "", TOKEN)

    try:
        assert asyncio.run(attacked()) is not None
    finally:
        dashboard.close()


def test_a_session_cannot_be_made_changed_or_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signed = Signed("s" * 24)
    session = signed.session("ann")
    assert signed.actor(session) == "ann"
    assert Signed(None).actor(session) is None
    name, until, mark = session.split(".")
    assert signed.actor(f"{name}.{int(until) + 1}.{mark}") is None
    assert signed.actor(f"{base64.urlsafe_b64encode(b'bob').decode()}.{until}.{mark}") is None
    for wrong in ("", ".", "..", "a.b.c", "é.1.2"):
        assert signed.actor(wrong) is None
    later = time.time() + 9 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    assert signed.actor(session) is None


# -- what is sent ---------------------------------------------------------------------------------


def test_a_form_that_is_too_large_is_refused(app: App, serve: Serve) -> None:
    browser = serve(app)
    large = {
        path: browser.ask("POST", path, {"x": "y" * 300_000}) for path in ("/confirm", "/edit")
    }
    assert [answer.status for answer in large.values()] == [413, 413]
    assert "choose fewer messages" in large["/confirm"].text
    assert "txbox edit" in large["/edit"].text
    token = browser.get("/operations").value("form_token")
    many = {"form_token": token, "pick": ["x"] * 600}
    assert browser.ask("POST", "/confirm", many).status == 400


@pytest.mark.parametrize(
    "path",
    [
        "/messages?status=none", "/messages?older_than=soon", "/messages?before=x", "/audit?before=-1",
        "/quarantine?before=x", "/message", "/message?consumer=billing",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_400(path: str, app: App, serve: Serve) -> None:
    assert serve(app).get(path).status == 400


@pytest.mark.parametrize(
    "key",
    ["x", "{}", "[1, 2]", '["billing"]', r'["billing", "\ud800"]', r'["\ud800", "1"]', "[" * 9_000],
)
def test_a_choice_that_names_no_message_is_400(key: str, app: App, serve: Serve) -> None:
    browser = serve(app)
    chosen = {"table": "inbox", "action": "retry selected", "pick": key}
    assert browser.post("/confirm", **chosen).status == 400
    assert browser.post("/change", **chosen, count=1).status == 400


def test_what_is_not_there_is_404_and_the_wrong_verb_405(app: App, serve: Serve) -> None:
    browser = serve(app)
    for path in ("/nothing", "/message?consumer=billing&message_id=x", "/operation?name=x"):
        assert browser.get(path).status == 404
    answer = browser.get("/confirm")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert browser.ask("POST", "/", {}).status == 405


@pytest.mark.parametrize("query", [b"topic=\xff", b"\xff"])
def test_a_query_that_is_not_utf_8_gets_a_page(query: bytes, app: App) -> None:
    app.init()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    credentials = (b"authorization", f"Bearer {TOKEN}".encode())
    scope = {
        "type": "http", "method": "GET", "scheme": "http", "path": "/messages", "query_string": query,
        "headers": [(b"host", b"localhost"), credentials], "client": ("127.0.0.1", 1),
    }  # fmt: skip
    asyncio.run(app.asgi(Token(TOKEN))(scope, receive, send))
    assert sent[0]["status"] == 200


def test_an_error_says_nothing_of_the_database(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with shop(sqlite_url.replace(".db", "-missing.db")) as app:
        answer = serve(app).get("/")
    assert answer.status == 503
    assert "missing.db" not in answer.text
    assert "schema check" in answer.text

    with shop(sqlite_url) as app:
        browser = serve(app)

        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("postgresql://user:secret@host")

        monkeypatch.setattr("txbox.admin.Admin.overview", fails)
        answer = browser.get("/")
    assert answer.status == 500
    assert "secret" not in answer.text
    assert "secret" in caplog.text
