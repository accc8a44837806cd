"""P27: a route that runs once for each Idempotency-Key, beside the same route without."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from typing import Annotated, Any

from fastapi import FastAPI

from benchmarks.contender import inbox_off_by
from benchmarks.phases.latency import Turns
from benchmarks.phases.webhooks import by_uvicorn
from benchmarks.result import Bar, Round, ratios
from benchmarks.setting import Setting
from benchmarks.workload import CONSUMER, Body, Delivery, Work, pay
from txbox import App, Inbox
from txbox.integrations.starlette import Answers, once, once_async, transaction, transaction_async

_TURN = 100
_PATH = "/orders"
_KINDS = {"def": False, "async def": True}


def _made(app: App, *, is_async: bool, with_key: bool) -> FastAPI:
    """The service: one route, whose effect is that of P1."""
    api = FastAPI(openapi_url=None)
    inbox: Any = Inbox(CONSUMER)
    dependency: Any
    if with_key:
        api.add_middleware(Answers)
        begin: Any = app.transaction_async if is_async else app.transaction
        dependency = (once_async if is_async else once)(inbox, begin, caller="anonymous")
    else:
        dependency = transaction_async(app) if is_async else transaction(app)

    def order(body: dict[str, Any], tx: Any) -> dict[str, Any]:
        pay(body, tx)
        return {"order": body["order"], "status": "paid"}

    async def order_async(body: dict[str, Any], tx: Any) -> dict[str, Any]:
        await pay_async(body, tx)
        return {"order": body["order"], "status": "paid"}

    route: Any = order_async if is_async else order
    route.__annotations__ = {"body": dict[str, Any], "tx": Annotated[Any, dependency]}
    api.post(_PATH, status_code=201)(route)
    return api


async def pay_async(body: Body, tx: Any) -> None:
    """`pay`, by an async connection."""
    await tx.execute(
        "UPDATE account SET balance = balance + %s WHERE id = %s", (body["amount"], body["account"])
    )
    await tx.execute(
        "INSERT INTO orders (number, account, amount) VALUES (%s, %s, %s)",
        (body["order"], body["account"], body["amount"]),
    )


@contextmanager
def _posting(port: int) -> Generator[Callable[[Delivery], object]]:
    """One client that keeps its connection; a key it sends to both, as it cannot know who looks at it."""

    def post(delivery: Delivery) -> None:
        headers = {"content-type": "application/json", "idempotency-key": delivery.id}
        connection.request("POST", _PATH, delivery.payload, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 201, response.status

    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        yield post


def _no_inbox(_connection: Any, _work: Work) -> int:
    return 0


def _one_round(on: Setting, kind: str, seed: int) -> list[Round]:
    work = on.work(0.5, duplicates=0.0)(seed)
    contenders: list[Turns] = []
    with ExitStack() as stack:
        for with_key, place in ((False, on.beside), (True, on.place)):
            app = stack.enter_context(App(place.url))
            if with_key:
                app.init()
            place.prepare()
            api = _made(app, is_async=_KINDS[kind], with_key=with_key)
            post = stack.enter_context(_posting(stack.enter_context(by_uvicorn(api))))
            name = f"{kind}, with once" if with_key else f"{kind}, without"
            contenders.append(Turns(name, place, inbox_off_by if with_key else _no_inbox, post))
        for number, start in enumerate(range(0, len(work.deliveries), _TURN)):
            # who goes first alternates
            for turns in contenders[:: -1 if number % 2 else 1]:
                turns.turn(work.deliveries[start : start + _TURN], on.gauges.read)
        return [turns.round(work) for turns in contenders]


def p27(on: Setting) -> dict[str, Any]:
    rounds: list[Round] = []
    for number in range(on.rounds):
        for kind in _KINDS:
            on.report(f"{kind}, round {number + 1} of {on.rounds}")
            rounds += _one_round(on, kind, number + 1)
    return on.result(
        "P27",
        "A request once for each Idempotency-Key",
        "FastAPI under uvicorn, one client that waits for each answer before it sends the next, in the server's "
        "process; turns of 100 requests with `once` and 100 to the same route with `transaction`; each with a new key",
        [
            Bar(
                f"{kind}: p50 with once at most 1.6 times without",
                1.6,
                ratios(rounds, f"{kind}, with once", f"{kind}, without", "p50_ms"),
                "at most",
            )
            for kind in _KINDS
        ],
        sorted(rounds, key=lambda run: run.contender),
    )
