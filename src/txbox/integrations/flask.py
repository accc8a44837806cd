"""Flask: the transaction of a request, and a route for each webhook. The worker is `txbox run` beside it.

api.register_blueprint(webhooks(app))

@api.post("/orders/<int:number>")
@transaction(app)
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
