"""A shop by each web framework, whose one route runs once for each key; as a process, `python -m` with a URL."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from tests.support.effect import add_effect
from txbox import App, Inbox
from txbox.integrations.requests import Answer, Claim
from txbox.store.codec import Codec

ASGI = ("fastapi", "fastapi-async", "starlette", "litestar")
WSGI = ("flask", "django")
FRAMEWORKS = (*ASGI, *WSGI)
#: A file whose existence kills the process behind its next COMMIT, before the answer.
DEADLY = "ONCE_SERVICE_DEADLY"
LARGE = 2000
OPTIONS: dict[str, Any] = {"keep": (402,), "headers": ("x-chosen",), "max_bytes": LARGE}
COOKIE = {"set-cookie": "session=secret", "x-chosen": "kept", "x-other": "dropped"}
#: What the route waits for, in tests within one process.
GATE: dict[str, Callable[[], object]] = {}


class Refusal(Exception):
    """What the route raises as its framework does."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def answer(number: int, how: str) -> tuple[dict[str, Any], int]:
    """What the route returns once it has written its effect."""
    match how:
        case "raise":
            raise Refusal(409)
        case "bug":
            raise ZeroDivisionError
        case "refuse":
            return {"nonce": secrets.token_hex(8)}, 409
        case "keep":
            return {"nonce": secrets.token_hex(8)}, 402
        case "large":
            return {"large": "x" * LARGE}, 201
        case "wait":
            GATE["wait"]()
    return {"number": number, "nonce": secrets.token_hex(8), "name": "Zoë"}, 201


async def add_async(tx: Any, number: int) -> None:
    """`add_effect` by async drivers."""
    mark = "?" if type(tx).__module__.startswith("aiosqlite") else "%s"
    sql = f"INSERT INTO effect (message_id, note) VALUES ({mark}, '')"
    if hasattr(tx, "execute"):
        await tx.execute(sql, (str(number),))
        return
    async with tx.cursor() as cursor:
        await cursor.execute(sql, (str(number),))


def make(framework: str, app: App, *, alias: str = "default", codec: Codec | None = None) -> Any:
    """The ASGI or WSGI application."""
    return _MAKE[framework](app, Inbox("place-order", codec=codec), alias)


def _fastapi(app: App, inbox: Inbox, _alias: str, *, is_async: bool = False) -> Any:
    from fastapi import FastAPI, Header, HTTPException
    from fastapi.responses import JSONResponse, StreamingResponse

    from txbox.integrations.starlette import Answers, once, once_async

    def user(x_user: Any = None) -> str:
        if x_user is None:
            raise HTTPException(401)
        return str(x_user)

    user.__annotations__ = {"x_user": Annotated[str | None, Header()], "return": str}
    if is_async:
        tx = once_async(inbox, app.transaction_async, caller=user, **OPTIONS)
        optional = once_async(inbox, app.transaction_async, caller="anonymous", required=False)
    else:
        tx = once(inbox, app.transaction, caller=user, **OPTIONS)
        optional = once(inbox, app.transaction, caller="anonymous", required=False)
    api = FastAPI()
    api.add_middleware(Answers)

    def answered(number: int, how: str) -> Any:
        if how == "stream":
            return StreamingResponse(iter(["a", "b"]), 201)
        try:
            body, status = answer(number, how)
        except Refusal as refusal:
            raise HTTPException(refusal.status) from None
        return JSONResponse(body, status, headers=COOKIE)

    def route(dependency: Any) -> Any:
        async def order_async(number: int, tx: Any, how: str = "") -> Any:
            await add_async(tx, number)
            return await asyncio.to_thread(answered, number, how)

        def order(number: int, tx: Any, how: str = "") -> Any:
            add_effect(tx, number)
            return answered(number, how)

        function: Any = order_async if is_async else order
        # what is written as `tx: Annotated[Connection, once(…)]`
        function.__annotations__ = {"number": int, "tx": Annotated[Any, dependency], "how": str}
        return function

    api.post("/orders/{number}", response_model=None)(route(tx))
    api.post("/optional/{number}", response_model=None)(route(optional))
    return api


def _starlette(app: App, inbox: Inbox, _alias: str) -> Any:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from txbox.integrations.requests import ANONYMOUS
    from txbox.integrations.starlette import Answers, Once

    place = Once(inbox, app.transaction_async, is_async=True, **OPTIONS)
    optional = Once(inbox, app.transaction_async, is_async=True, required=False)

    async def order(request: Request) -> Response:
        if request.url.path.startswith("/optional"):
            tx = await optional.claim_async(request, caller=ANONYMOUS)
        else:
            if "x-user" not in request.headers:
                raise HTTPException(401)
            tx = await place.claim_async(request, caller=request.headers["x-user"])
        number = int(request.path_params["number"])
        how = request.query_params.get("how", "")
        await add_async(tx, number)
        if how == "stream":
            return StreamingResponse(iter(["a", "b"]), 201)
        try:
            body, status = await asyncio.to_thread(answer, number, how)
        except Refusal as refusal:
            raise HTTPException(refusal.status) from None
        return JSONResponse(body, status, headers=COOKIE)

    return Starlette(
        routes=[
            Route("/orders/{number}", order, methods=["POST"]),
            Route("/optional/{number}", order, methods=["POST"]),
        ],
        middleware=[Middleware(Answers)],
    )


def _litestar(app: App, inbox: Inbox, _alias: str) -> Any:
    import litestar
    from litestar.exceptions import HTTPException
    from litestar.response import Stream

    from txbox.integrations.requests import ANONYMOUS
    from txbox.integrations.starlette import Answers, Once

    place = Once(inbox, app.transaction_async, is_async=True, **OPTIONS)
    optional = Once(inbox, app.transaction_async, is_async=True, required=False)

    async def order(request: Any) -> Any:
        number, how = request.path_params["number"], request.query_params.get("how", "")
        if request.scope["path"].startswith("/optional"):
            tx = await optional.claim_async(request, caller=ANONYMOUS)
        else:
            if "x-user" not in request.headers:
                raise HTTPException(status_code=401)
            tx = await place.claim_async(request, caller=request.headers["x-user"])
        await add_async(tx, number)
        if how == "stream":
            return Stream(iter(["a", "b"]), status_code=201)
        try:
            body, status = await asyncio.to_thread(answer, number, how)
        except Refusal as refusal:
            raise HTTPException(status_code=refusal.status) from None
        return litestar.Response(body, status_code=status, headers=COOKIE)

    order.__annotations__ = {"request": litestar.Request, "return": Any}
    handler = litestar.post(["/orders/{number:int}", "/optional/{number:int}"])(order)
    return litestar.Litestar([handler], middleware=[Answers], openapi_config=None)


def _flask(app: App, inbox: Inbox, _alias: str) -> Any:
    import flask

    from txbox.integrations.flask import once

    api = flask.Flask(__name__)

    @api.before_request
    def _() -> None:
        if "parse" in flask.request.args:
            assert flask.request.form

    def user() -> str:
        name = flask.request.headers.get("x-user")
        if name is None:
            flask.abort(401)
        return name

    def order(tx: Any, number: int) -> Any:
        how = flask.request.args.get("how", "")
        add_effect(tx, number)
        if how == "stream":
            return flask.Response(iter(["a", "b"]), 201)
        try:
            body, status = answer(number, how)
        except Refusal as refusal:
            flask.abort(refusal.status)
        return body, status, COOKIE

    placed = once(inbox, app.transaction, caller=user, **OPTIONS)(order)
    optional = once(inbox, app.transaction, caller="anonymous", required=False)(order)
    api.add_url_rule("/orders/<int:number>", "order", placed, methods=["POST"])
    api.add_url_rule("/optional/<int:number>", "optional", optional, methods=["POST"])
    return api


def _django(_app: App, inbox: Inbox, alias: str) -> Any:
    from django.conf import settings
    from django.core.exceptions import PermissionDenied
    from django.core.handlers.wsgi import WSGIHandler
    from django.db import connections
    from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
    from django.urls import path

    from txbox.integrations.django.views import once

    def signed_in(view: Any) -> Any:
        def called(request: HttpRequest, number: int) -> Any:
            if "x-user" not in request.headers:
                return HttpResponse(status=401)
            if "parse" in request.GET:
                assert request.POST
            return view(request, number)

        return called

    def order(request: HttpRequest, number: int) -> Any:
        how = request.GET.get("how", "")
        with connections[alias].cursor() as cursor:
            cursor.execute("INSERT INTO effect (message_id, note) VALUES (%s, '')", (str(number),))
        if how == "stream":
            return StreamingHttpResponse(iter(["a", "b"]), status=201)
        try:
            body, status = answer(number, how)
        except Refusal as refusal:
            raise PermissionDenied from refusal
        response = JsonResponse(body, status=status)
        for name, value in COOKIE.items():
            response[name] = value
        return response

    def user(request: HttpRequest) -> str:
        return request.headers["x-user"]

    placed = once(inbox, using=alias, caller=user, **OPTIONS)(order)
    optional = once(inbox, using=alias, caller="anonymous", required=False)(order)
    urls = ModuleType("urls")
    vars(urls)["urlpatterns"] = [
        path("orders/<int:number>", signed_in(placed)),
        path("optional/<int:number>", optional),
    ]
    settings.ROOT_URLCONF, settings.ALLOWED_HOSTS = urls, ["*"]
    return WSGIHandler()


_MAKE: dict[str, Callable[[App, Inbox, str], Any]] = {
    "fastapi": _fastapi,
    "fastapi-async": partial(_fastapi, is_async=True),
    "starlette": _starlette,
    "litestar": _litestar,
    "flask": _flask,
    "django": _django,
}


def _mortal() -> None:
    """Have this process die behind a COMMIT, before the answer, as long as the file exists."""
    deadly, finish = Path(os.environ[DEADLY]), Claim.finish

    def die() -> None:
        # of several processes the one that removes it
        with suppress(FileNotFoundError):
            deadly.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    async def finish_and_die(self: Claim, answer: Answer) -> Answer:
        sent = await finish(self, answer)
        die()
        return sent

    Claim.finish = finish_and_die  # type: ignore[method-assign]


def _serve(framework: str, url: str) -> None:
    """Serve on a port that is printed."""
    _mortal()
    if framework == "django":
        import django
        import pymysql
        from django.conf import settings

        from tests.support.django_project import database

        pymysql.install_as_MySQLdb()
        settings.configure(
            DATABASES={"default": database(url)},
            USE_TZ=True,
            SECRET_KEY="of a test",
            INSTALLED_APPS=[],
        )
        django.setup()
        app = App(django="default")
    else:
        app = App(url)
    application = make(framework, app)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        print(listening.getsockname()[1], flush=True)
        if framework in ASGI:
            import uvicorn

            uvicorn.Server(uvicorn.Config(application, log_level="critical")).run([listening])
        else:
            from werkzeug.serving import make_server

            logging.getLogger("werkzeug").setLevel(logging.ERROR)

            make_server(
                "127.0.0.1", 0, application, threaded=True, fd=listening.fileno()
            ).serve_forever()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
