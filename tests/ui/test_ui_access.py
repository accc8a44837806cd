"""Who gets in, and what they may do: every route, every way to log in, and forms of other sites."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from tests.support.dashboard import TOKEN, shop
from tests.support.waiting import DEADLINE_S, eventually
from tests.ui.conftest import ALL, Browser, Serve
from txbox import App
from txbox.admin import Admin
from txbox.errors import ConfigurationError
from txbox.events import Event, LoginRefused
from txbox.ui import Access, Dashboard, Grant, Token, Tokens, TrustedHeader
from txbox.ui.pages import RULES
from txbox.ui.security import LoginThrottle, Proxies, Signer, known_host, same_origin

ANN, BOB = "a-token-of-ann-that-is-long-enough", "a-token-of-bob-that-is-long-enough"

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


def test_a_host_application_may_log_in_whom_it_turns_away(app: App, serve: Serve) -> None:
    browser = serve(
        app, authenticator=lambda _: None, login="https://shop.example/login?next={next}"
    )
    answer = browser.get("/messages?q=a b&status=dead".replace(" ", "%20"))
    assert answer.status == 303
    to = answer.headers["location"]
    assert to == "https://shop.example/login?next=%2Fmessages%3Fq%3Da%2520b%26status%3Ddead"
    # what a form would have done is not done later
    assert browser.ask("POST", "/change", {}).headers["location"].endswith("?next=%2F")
    # a page that is kept fresh is not followed to a login
    assert browser.get("/live").status == 401
    with pytest.raises(ConfigurationError, match="tokens have a page of their own"):
        app.asgi(Token(TOKEN, actor="ann"), login="/login")


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
    browser = serve(app, authenticator=Tokens(Token(ANN, actor="ann"), Token(BOB, actor="bob")))
    assert browser.log_in(ANN).status == 303
    token = browser.get("/audit").value("form_token")
    assert browser.log_in(BOB).status == 303
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
        ("10.0.0.1", False), ("localhost:80@evil.example", False), ("localhost:\u0661", False), ("localhost:", True),
    ],
)  # fmt: skip
def test_hosts_that_are_known(host: str, known: bool) -> None:
    assert known_host(host, ["ops.example"]) is known


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_form_of_another_site_is_refused(headers: dict[str, str], app: App, serve: Serve) -> None:
    browser = serve(app)
    token = browser.get("/audit").value("form_token")
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


def test_tokens_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="24 bytes"):
        Token("short")
    with pytest.raises(ConfigurationError, match=r"Line 2 .* 24 bytes") as refused:
        Tokens.read("# who\nhalf-of-a-secret:other-half")
    assert "half" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="Unknown grant 'all'"):
        Token(TOKEN, grants=["all"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="the same"):
        Tokens.read(f"ann:{ANN}\nbob:{ANN}")
    with pytest.raises(ConfigurationError, match="at least one"):
        Tokens.read("# nobody")
    with pytest.raises(ConfigurationError, match="name"):
        Tokens.read(f":{ANN}")


def test_each_token_has_its_name_and_its_grants(app: App, serve: Serve) -> None:
    browser = serve(
        app, authenticator=Tokens.read(f"# who\nann:{ANN}:change\n\nbob:{BOB}\n{TOKEN}")
    )
    assert browser.log_in(ANN + BOB).status == 401
    assert browser.log_in(ANN).status == 303
    assert "ann" in browser.get("/").text
    assert browser.post("/change").status == 400
    assert browser.post("/reveal").status == 403
    assert browser.log_in(BOB).status == 303
    assert browser.post("/change").status == 403
    assert browser.log_in(TOKEN).status == 303
    assert browser.post("/change").status == 403


def test_credentials_in_the_header_are_enough(app: App, serve: Serve) -> None:
    browser = serve(app)
    browser.cookies.clear()
    assert browser.ask("GET", "/", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200
    assert browser.ask("GET", "/", headers={"Authorization": f"Bearer {TOKEN}x"}).status == 401
    assert browser.ask("GET", "/", headers={"Authorization": "Basic !!!"}).status == 401


# -- sessions -------------------------------------------------------------------------------------


def test_a_session_ends_with_its_token(app: App, serve: Serve) -> None:
    """What was opened with one token is not open with another, nor with a new one of the same name."""
    secret = "s" * 24
    opened = serve(app, authenticator=Token(ANN, actor="ann"), secret=secret)
    assert opened.log_in(ANN).status == 303
    for tokens, status in (
        (Tokens(Token(ANN, actor="ann")), 200),
        (Tokens(Token(BOB, actor="ann"), Token(ANN, actor="ann")), 200),
        (Tokens(Token(BOB, actor="ann")), 401),
        (Tokens(Token(BOB, actor="bob")), 401),
    ):
        other = serve(app, authenticator=tokens, secret=secret)
        other.cookies = dict(opened.cookies)
        assert other.get("/").status == status


def test_a_session_is_of_one_dashboard(app: App, serve: Serve, tmp_path: Path) -> None:
    secret = "s" * 24
    opened = serve(app, authenticator=Token(ANN), secret=secret)
    assert opened.log_in(ANN).status == 303
    with shop(f"sqlite:///{tmp_path}/other.db") as second:
        other = serve(second, authenticator=Token(ANN), secret=secret)
        other.cookies = dict(opened.cookies)
        assert other.get("/").status == 401


def test_a_logout_ends_the_session_and_its_copies(app: App, serve: Serve) -> None:
    browser = serve(app, authenticator=Token(ANN))
    assert browser.log_in(ANN).status == 303
    copied = dict(browser.cookies)
    assert browser.log_in(ANN).status == 303
    second = dict(browser.cookies)
    browser.cookies = dict(copied)
    assert browser.post("/logout").status == 303
    browser.cookies = dict(copied)
    assert browser.get("/").status == 401
    browser.cookies = dict(second)
    assert browser.get("/").status == 200


# -- a proxy --------------------------------------------------------------------------------------


def test_a_proxy_on_loopback_says_who_asks(filled_sqlite: App, serve: Serve) -> None:
    grants: dict[str, list[Grant]] = {"ann": ["change"]}
    who = TrustedHeader("X-User", grants=grants)
    browser = serve(filled_sqlite, authenticator=who)
    assert browser.get("/").status == 401
    browser.headers["X-User"] = "ann"
    assert browser.post("/change", on="/messages").status == 400
    browser.headers["X-User"] = "josé".encode().decode("latin-1")
    assert "josé" in browser.get("/").text
    assert browser.post("/change", on="/messages").status == 403
    for nobody in ("", " ", "x" * 256, "a\tb"):
        browser.headers["X-User"] = nobody
        assert browser.get("/").status == 401


def _request(peer: str, *headers: tuple[str, str], proxies: tuple[str, ...] = ()) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "scheme": "http", "headers": raw, "client": (peer, 1)}
    Proxies(proxies).resolve(scope)
    return Request(scope)


@pytest.mark.parametrize(
    ("peer", "headers", "name"),
    [
        ("127.0.0.1", [("x-user", "ann")], "ann"),
        ("::1", [("x-user", "ann")], "ann"),
        ("::ffff:127.0.0.1", [("x-user", "ann")], "ann"),
        ("10.0.0.1", [("x-user", "ann")], None),
        ("", [("x-user", "ann")], None),
        # a client that the proxy lets through with a header of its own
        ("127.0.0.1", [("x-user", "root"), ("x-user", "ann")], None),
        # the address of the connection counts, whatever the proxy says of its client
        ("10.0.0.1", [("x-user", "ann"), ("x-forwarded-for", "127.0.0.1")], None),
        ("127.0.0.1", [("x-user", "ann"), ("x-forwarded-for", "10.0.0.1")], "ann"),
    ],
)
def test_who_may_name_the_user(peer: str, headers: list[tuple[str, str]], name: str | None) -> None:
    request = _request(peer, *headers, proxies=("10.0.0.0/8", "127.0.0.1"))
    access = TrustedHeader("x-user")(request)
    assert (access and access.actor) == name


def test_a_proxy_elsewhere_proves_itself_with_a_secret() -> None:
    who = TrustedHeader("x-user", secret="p" * 24)
    user = ("x-user", "ann")
    assert who(_request("127.0.0.1", user)) is None
    assert who(_request("10.0.0.1", user, ("x-txbox-proxy-secret", "p" * 23))) is None
    assert who(_request("10.0.0.1", user, ("x-txbox-proxy-secret", "p" * 24))) == Access("ann")
    with pytest.raises(ConfigurationError, match="24 bytes"):
        TrustedHeader("x-user", secret="short")


@pytest.mark.parametrize(
    ("peer", "headers", "client", "scheme"),
    [
        ("10.0.0.1", [("x-forwarded-for", "1.2.3.4"), ("x-forwarded-proto", "https")], "1.2.3.4", "https"),
        # what the client itself has sent stands to the left
        ("10.0.0.1", [("x-forwarded-for", "9.9.9.9, 1.2.3.4, 10.0.0.2")], "1.2.3.4", "http"),
        ("10.0.0.1", [("x-forwarded-for", "9.9.9.9"), ("x-forwarded-for", "1.2.3.4")], "1.2.3.4", "http"),
        ("10.0.0.1", [("x-forwarded-for", "nonsense"), ("x-forwarded-proto", "gopher")], "10.0.0.1", "http"),
        ("10.0.0.1", [], "10.0.0.1", "http"),
        ("5.6.7.8", [("x-forwarded-for", "1.2.3.4"), ("x-forwarded-proto", "https")], "5.6.7.8", "http"),
    ],
)  # fmt: skip
def test_only_a_known_proxy_is_believed(
    peer: str, headers: list[tuple[str, str]], client: str, scheme: str
) -> None:
    request = _request(peer, *headers, proxies=("10.0.0.0/8",))
    assert request.client is not None
    assert (request.client.host, request.scope["scheme"]) == (client, scheme)


def test_cookies_are_secure_behind_a_proxy_that_speaks_tls(app: App, serve: Serve) -> None:
    for proxies, secure in ((("127.0.0.1",), True), ((), False)):
        browser = serve(app, authenticator=Token(ANN), proxies=proxies)
        browser.headers["X-Forwarded-Proto"] = "https"
        answer = browser.log_in(ANN)
        assert ("secure" in answer.headers["set-cookie"].lower()) is secure
    with pytest.raises(ConfigurationError, match="proxy"):
        Dashboard(app, Token(ANN), proxies=["nginx"])


def test_the_host_application_may_say_who_asks(filled_sqlite: App, serve: Serve) -> None:
    async def who(request: Request) -> Access | None:
        name = request.headers.get("x-user")
        return Access(name, ["change"]) if name else None

    browser = serve(filled_sqlite, authenticator=who)
    assert browser.get("/").status == 401
    browser.headers["X-User"] = "carol"
    assert "carol" in browser.get("/").text
    assert browser.post("/reveal", on="/messages").status == 403
    assert browser.post("/change", on="/messages").status == 400


def test_failed_logins_are_bounded(app: App, serve: Serve) -> None:
    browser = serve(app)
    browser.cookies.clear()
    for _ in range(5):
        assert browser.log_in("wrong").status == 401
    answer = browser.log_in(TOKEN)
    assert answer.status == 429
    assert int(answer.headers["retry-after"]) > 0


def test_simultaneous_guesses_count_one_by_one(app: App, serve: Serve) -> None:
    """A check before a slow comparison, and a count after it, let all through that are sent at once."""
    browser = serve(app)
    browser.cookies.clear()
    token, cookies = browser.get("/").value("form_token"), dict(browser.cookies)
    ready = threading.Barrier(40)

    def guess(number: int) -> int:
        client = Browser(browser.port, cookies=dict(cookies))
        ready.wait(DEADLINE_S)
        form = {"form_token": token, "secret": f"guess {number}"}
        return client.ask("POST", "/login", form).status

    with ThreadPoolExecutor(40) as threads:
        statuses = Counter(threads.map(guess, range(40)))
    assert statuses == {401: 5, 429: 35}


def test_failures_are_forgotten_after_a_minute_and_kept_within_bounds() -> None:
    now = 0.0
    throttle = LoginThrottle(lambda: now)
    for _ in range(5):
        assert throttle.attempt("1.2.3.4") == 0
    assert throttle.attempt("1.2.3.4") == 60
    assert throttle.attempt("5.6.7.8") == 0
    for _ in range(20):
        throttle.succeeded("5.6.7.8")
        assert throttle.attempt("5.6.7.8") == 0
    now = 60.0
    assert throttle.attempt("1.2.3.4") == 0
    for number in range(11_000):
        throttle.attempt(str(number))
    assert len(throttle._since) == 10_000


def test_strangers_who_fail_keep_nobody_else_out() -> None:
    tokens = Tokens(Token(TOKEN))
    dashboard = Dashboard("sqlite:///nowhere.db", tokens)

    def request(address: str) -> Request:
        return Request({"type": "http", "headers": [], "client": (address, 1)})

    try:
        for number in range(100):
            assert dashboard._verified(request(f"10.0.0.{number}"), tokens, "wrong") is None
        assert dashboard._verified(request("5.6.7.8"), tokens, TOKEN) is not None
    finally:
        dashboard.close()


def test_a_session_cannot_be_made_changed_or_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signer, tokens = Signer("s" * 24, "shop"), Tokens(Token(ANN, actor="ann"), Token(BOB))
    ann, _ = tokens
    session = signer.session(ann)
    assert signer.access(session, tokens) == Access("ann")
    assert Signer(None, "shop").access(session, tokens) is None
    until, nonce, mac = session.split(".")
    assert signer.access(f"{int(until) + 1}.{nonce}.{mac}", tokens) is None
    assert signer.access(f"{until}.{nonce}x.{mac}", tokens) is None
    for wrong in ("", ".", "..", "a.b.c", "é.1.2"):
        assert signer.access(wrong, tokens) is None
    later = time.time() + 9 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    assert signer.access(session, tokens) is None


# -- streams and bodies ---------------------------------------------------------------------------


def test_streams_that_are_opened_at_once_are_bounded(app: App) -> None:
    app.init()
    dashboard = app.asgi(Token(TOKEN))
    statuses: Counter[int] = Counter()
    gone = asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses[message["status"]] += 1
            if sum(statuses.values()) == 50:
                gone.set()

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {
        "type": "http", "method": "GET", "scheme": "http", "path": "/live", "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1),
    }  # fmt: skip

    async def open_all() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(dashboard(dict(scope), receive, send) for _ in range(50)))

    asyncio.run(open_all())
    assert statuses == {200: 32, 503: 18}
    assert dashboard._streams == 0
    dashboard.close()


def test_who_opens_too_many_streams_is_told(app: App, serve: Serve) -> None:
    """150 real connections at once: none is closed without an answer, and pages come as before."""
    browser = serve(app)
    cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    head = f"GET /live HTTP/1.1\r\nHost: localhost\r\nCookie: {cookies}\r\n\r\n".encode()

    async def opened() -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", browser.port)
        writer.write(head)
        try:
            return (await reader.readline()).split()[1], writer
        except (ConnectionError, IndexError) as error:
            return type(error).__name__.encode(), writer

    async def open_all() -> Counter[bytes]:
        async with asyncio.timeout(DEADLINE_S):
            answers = await asyncio.gather(*(opened() for _ in range(150)))
        assert (await asyncio.to_thread(browser.get, "/")).status == 200
        for _, writer in answers:
            writer.close()
        return Counter(status for status, _ in answers)

    assert asyncio.run(open_all()) == {b"200": 32, b"503": 118}


def test_logins_without_a_body_keep_nobody_out(app: App, serve: Serve) -> None:
    """Heads of POST /login whose bodies never come, more than are read at once: others get their pages."""
    browser = serve(app)
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with contextlib.ExitStack() as silent:
        for _ in range(300):
            connection = socket.create_connection(("127.0.0.1", browser.port), DEADLINE_S)
            silent.enter_context(connection)
            connection.sendall(head)
        assert [browser.get("/").status for _ in range(20)] == [200] * 20


# -- what is sent ---------------------------------------------------------------------------------


def test_a_form_that_is_too_large_is_refused(app: App, serve: Serve) -> None:
    browser = serve(app)
    large = {
        path: browser.ask("POST", path, {"x": "y" * 300_000}) for path in ("/confirm", "/edit")
    }
    assert [answer.status for answer in large.values()] == [413, 413]
    assert "choose fewer messages" in large["/confirm"].text
    assert "txbox edit" in large["/edit"].text
    token = browser.get("/audit").value("form_token")
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
    for path in ("/nothing", "/message?consumer=billing&message_id=x"):
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


def test_a_page_has_a_time_limit_and_its_thread_is_counted_until_its_end(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop(sqlite_url) as app:
        browser = serve(app)
        go_on, overview = threading.Event(), Admin.overview

        def waits(admin: Admin) -> object:
            assert go_on.wait(DEADLINE_S)
            return overview(admin)

        monkeypatch.setattr("txbox.ui._PAGE_S", 0.05)
        monkeypatch.setattr("txbox.ui._WAITING_MAX", 1)
        monkeypatch.setattr(Admin, "overview", waits)
        late = browser.get("/")
        assert late.status == 503
        assert "longer than a minute" in late.text
        assert "Too many pages" in browser.get("/").text
        monkeypatch.undo()
        go_on.set()
        eventually(lambda: browser.get("/").status == 200, "the end of the late page")


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
