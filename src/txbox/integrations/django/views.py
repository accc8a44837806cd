"""Django: a view once for each caller and `Idempotency-Key`, inside `atomic()`.

@once(Inbox("place-order"), caller=lambda request: request.user.pk)
def order(request, number): ...
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.http.request import RawPostDataException

from txbox.errors import ConfigurationError
from txbox.handlers import is_async_function
from txbox.inbox import Inbox
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


def once(
    inbox: Inbox, *, caller: Caller, using: str = "default", **options: Any
) -> Callable[
    [Callable[Concatenate[HttpRequest, P], HttpResponseBase]],
    Callable[Concatenate[HttpRequest, P], HttpResponseBase],
]:
    """Run a view once for each caller and `Idempotency-Key`, inside `transaction.atomic(using=using)`.

    Use models as ever, and stage messages with `django.db.connection`. What the view returns is kept in the
    transaction, and a repeat gets that, byte for byte. Put what authenticates above it: `@login_required`.

    Args:
        inbox: one for each view, because its consumer is part of the key: `Inbox("place-order")`.
        caller: returns the id of the authenticated user: `lambda request: request.user.pk`; or "anonymous".
        options: as of `txbox.integrations.requests.Requests`.

    A repeat is answered 409 with Retry-After while the first request runs, another request under the key 422, a
    missing or malformed key 400; 503 with Retry-After while the database is away. An exception and a response of 400
    and above roll back and leave no row; with `keep=(402, …)` a *returned* response of these is kept by itself.

    Raises:
        ConfigurationError: the view is async; in the request: there is no caller, or the response is a stream or too
            large: nothing is kept.

    Guarantee: row, response and what the view wrote are one commit: that of the outermost `atomic`, which
    ATOMIC_REQUESTS begins. The response is sent behind it.
    """

    @contextmanager
    def begin() -> Generator[Any]:
        with transaction.atomic(using=using):
            yield connections[using]

    requests, who = Requests(inbox, begin, **options), checked_caller(caller)

    def decorate(
        view: Callable[Concatenate[HttpRequest, P], HttpResponseBase],
    ) -> Callable[Concatenate[HttpRequest, P], HttpResponseBase]:
        if is_async_function(view):
            raise ConfigurationError(
                f"The view {view.__qualname__} is async, and Django's transactions are not: make it a `def` function."
            )

        @wraps(view)
        def called(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            sender = who if isinstance(who, Anonymous) else who(request)
            try:
                claim = blocking(requests.claim(_received(request), sender))
            except Refused as refused:
                return _response(refused.answer)
            try:
                response = _rendered(view(request, *args, **kwargs), view.__qualname__)
                headers = tuple((name.lower(), value) for name, value in response.items())
                answer = Answer(response.status_code, headers, response.content)
            except BaseException as error:
                blocking(claim.abort(error))
                raise
            sent = blocking(claim.finish(answer))
            return response if sent is answer else _response(sent)

        return called

    return decorate


def _rendered(response: Any, name: str) -> HttpResponse:
    """The response with its body, whose template reads in the transaction."""
    if hasattr(response, "render"):
        response = response.render()
    if not isinstance(response, HttpResponse):
        raise streamed(name)
    return response


def _received(request: HttpRequest) -> Received:
    try:
        body = request.body
    except RawPostDataException:
        # a middleware, such as that against CSRF, has parsed the form
        body = form(_each(request.POST), _each(request.FILES))
    key: str | None = request.META.get("HTTP_IDEMPOTENCY_KEY")
    match = request.resolver_match
    return Received(
        () if key is None else (key,), str(request.method), request.path.encode(),
        str(request.META.get("QUERY_STRING", "")).encode(), body, "" if match is None else f"/{match.route}",
    )  # fmt: skip


def _each(values: Any) -> Iterable[tuple[str, Any]]:
    return ((name, value) for name, several in values.lists() for value in several)


def _response(answer: Answer) -> HttpResponse:
    response = HttpResponse(answer.body, status=answer.status)
    for name, value in answer.headers:
        response[name] = value
    return response
