"""Flask: the transaction of a request, and a route for each webhook. The worker is `txbox run` beside it.

api.register_blueprint(webhooks(app))

@api.post("/orders/<int:number>")
@transaction(app)  # or @once(Inbox("place-order"), app.transaction, caller=…)
def order(tx, number): ...
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, MutableMapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from flask import Blueprint, Response, make_response, request
from flask.typing import ResponseReturnValue

from txbox.app import App
from txbox.brokers.loop import EventLoop
from txbox.brokers.webhook import Receive, Scope, Send, by_path
from txbox.errors import ConfigurationError
from txbox.handlers import is_async_function
from txbox.inbox import Inbox
from txbox.integrations.once import Begin
from txbox.integrations.requests import (
    Anonymous,
    Answer,
    Caller,
    Received,
    Refused,
    Requests,
    checked_caller,
    form,
    streamed,
)
from txbox.session import blocking

P = ParamSpec("P")
Asgi = Callable[[Scope, Receive, Send], Any]

_CHUNK_BYTES = 64 * 1024
# a webhook bounds its answers itself; this ends what hangs for another reason
_ANSWER_S = 600.0


def transaction(
    app: App,
) -> Callable[[Callable[Concatenate[Any, P], ResponseReturnValue]], Callable[P, Response]]:
    """`@api.post(…)` on top, then this, then a view whose first argument is the request's own transaction.

    Write through it and stage messages in it. It is committed when the view has returned what Flask can answer with;
    an exception, `abort` too, rolls it back. A response with an error status that the view *returns* is no exception.
    A response that is streamed is made in the transaction, and its body behind it.

    Raises:
        ConfigurationError: the view is async, or the database has async connections only.
        StoreError, in the request: COMMIT failed; Flask answers 500 where no error handler does otherwise.

    Guarantee: the response is sent only after the commit.
    """
    if app.database.sync is None:
        raise ConfigurationError(
            f"{app.database.name} has async connections only: give App() a sync one for Flask."
        )

    def decorate(
        view: Callable[Concatenate[Any, P], ResponseReturnValue],
    ) -> Callable[P, Response]:
        if is_async_function(view):
            raise ConfigurationError(
                f"The view {view.__qualname__} is async: make it a `def` function."
            )

        @wraps(view)
        def called(*args: P.args, **kwargs: P.kwargs) -> Response:
            with app.transaction() as tx:
                return make_response(view(tx, *args, **kwargs))

        return called

    return decorate


def once(
    inbox: Inbox, begin: Begin, *, caller: Caller, **options: Any
) -> Callable[[Callable[Concatenate[Any, P], ResponseReturnValue]], Callable[P, Response]]:
    """`@api.post(…)` on top, then this, then a view that runs once for each caller and `Idempotency-Key`.

    The view's first argument is the transaction. What it returns is kept in it, and a repeat gets that, byte for byte.

    Args:
        inbox: one for each route, because its consumer is part of the key: `Inbox("place-order")`.
        begin: begins the transaction: `app.transaction`, `engine.begin`, `sessionmaker.begin`.
        caller: returns the id of the authenticated user: `lambda: current_user.id`; or "anonymous".
        options: as of `txbox.integrations.requests.Requests`.

    A repeat is answered 409 with Retry-After while the first request runs, another request under the key 422, a
    missing or malformed key 400; 503 with Retry-After while the database is away. An exception, `abort` too, and a
    response of 400 and above roll back and leave no row; with `keep=(402, …)` a *returned* response of these statuses
    is kept by itself.

    Raises:
        ConfigurationError: the view is async; in the request: there is no caller, or the response is a stream or too
            large: nothing is kept.
        StoreError, in the request: COMMIT was refused, or the view ended the transaction.

    Guarantee: row, response and what the view wrote are one commit, and the response is sent behind it.
    """
    requests, who = Requests(inbox, begin, **options), checked_caller(caller)

    def decorate(
        view: Callable[Concatenate[Any, P], ResponseReturnValue],
    ) -> Callable[P, Response]:
        if is_async_function(view):
            raise ConfigurationError(
                f"The view {view.__qualname__} is async: make it a `def` function."
            )

        @wraps(view)
        def called(*args: P.args, **kwargs: P.kwargs) -> Response:
            sender = who if isinstance(who, Anonymous) else who()
            try:
                claim = blocking(requests.claim(_received(), sender))
            except Refused as refused:
                return _response(refused.answer)
            try:
                response = make_response(view(claim.tx, *args, **kwargs))
                answer = _answer(response, view.__qualname__)
            except BaseException as error:
                blocking(claim.abort(error))
                raise
            sent = blocking(claim.finish(answer))
            return response if sent is answer else _response(sent)

        return called

    return decorate


def _received() -> Received:
    rule, body = request.url_rule, request.get_data()
    if not body and "form" in vars(request):
        # parsed before this view, from a stream that is read by now
        body = form(request.form.items(multi=True), request.files.items(multi=True))
    return Received(
        request.headers.getlist("Idempotency-Key"), request.method, request.path.encode(), request.query_string, body,
        "" if rule is None else rule.rule,
    )  # fmt: skip


def _answer(response: Response, name: str) -> Answer:
    if response.is_streamed:
        raise streamed(name)
    headers = tuple((name.lower(), value) for name, value in response.headers.items())
    return Answer(response.status_code, headers, response.get_data())


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, list(answer.headers))


def webhooks(app: App) -> Blueprint:
    """A route for each webhook that the app consumes, at its path; call it when all are registered.

    They run on an event loop in a thread, one for each process, made at the first request. Without a lifespan, what
    outlasts its answer when the process ends is rolled back: the sender, which was told to retry, brings it again.

    Raises:
        ConfigurationError: two have the same path, or one has no handler.
    """
    blueprint, loops = Blueprint("txbox", __name__), _Loops()
    for path, application in by_path(app.webhooks, app.handlers.topics()).items():
        blueprint.add_url_rule(
            path, path.replace(".", "_"), _view(application, loops), methods=["POST"]
        )
    return blueprint


class _Loops:
    """The event loop of this process: a server that forks has loaded the application before."""

    def __init__(self) -> None:
        self._of: dict[int, EventLoop] = {}

    def here(self) -> EventLoop:
        process = os.getpid()
        if (loop := self._of.get(process)) is None:
            made = EventLoop("txbox-webhooks")
            # another thread may have had the first request, too
            if (loop := self._of.setdefault(process, made)) is not made:
                made.close()
        return loop


def _view(application: Asgi, loops: _Loops) -> Callable[[], Response]:
    def view() -> Response:
        stream = request.stream
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in request.headers.items()
        ]
        scope = {
            "type": "http", "method": request.method, "path": request.path, "headers": headers,
        }  # fmt: skip
        answer = Response()

        async def receive() -> MutableMapping[str, Any]:
            chunk = await asyncio.to_thread(stream.read, _CHUNK_BYTES)
            return {"type": "http.request", "body": chunk, "more_body": bool(chunk)}

        async def send(event: MutableMapping[str, Any]) -> None:
            if event["type"] == "http.response.start":
                answer.status_code = event["status"]
                for name, value in event["headers"]:
                    answer.headers[name.decode("latin-1")] = value.decode("latin-1")
            else:
                answer.set_data(event["body"])

        loops.here().call(application(scope, receive, send), _ANSWER_S)
        return answer

    return view
