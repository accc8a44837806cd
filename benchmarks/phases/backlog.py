"""P2, P3, P4, P13 and P17: a backlog, which waits from the start."""

from __future__ import annotations

from typing import Any

from benchmarks.beside import BATCH, WithoutInbox
from benchmarks.result import Bar, Plot, Round, ratios, summary, values
from benchmarks.setting import Setting
from benchmarks.workload import in_sets, pay_and_read, reads, storm, writes

_WAITING = "the whole workload waiting from the start, one worker with one lane"


def _rates(name: str, title: str, rounds: list[Round]) -> Plot:
    medians = summary(rounds)
    lines = {name: [(0.0, figures["rate"] or 0.0)] for name, figures in medians.items()}
    return Plot(name, title, "bars", "", "messages a second", lines)


def p02(on: Setting) -> dict[str, Any]:
    naive = on.naive(handler=pay_and_read)
    ordinary = on.txbox("txbox, ordinary handler", reads)
    by_hand = on.by_hand(handler=pay_and_read, together=BATCH)
    rounds = on.interleaved([
        (naive, on.work()), (ordinary, on.work(3)), (by_hand, on.work(3)), (on.limit(), on.work(5))
    ])  # fmt: skip
    return on.result(
        "P2",
        "Backlog, an ordinary handler that reads results",
        f"{_WAITING}; the handler reads the balance that its UPDATE returns, naive's too. By hand: BEGIN and the claim "
        "of 100 in one round trip, COMMIT in another, and nothing else but the handler",
        [
            Bar("at least 1.0 of by hand", 1.0, ratios(rounds, ordinary.name, by_hand.name)),
            Bar(
                "at least 3 times naive", 3.0, ratios(rounds, ordinary.name, "naive"), stretch=True
            ),
        ],
        rounds,
        plots=[_rates("p02", "Backlog, an ordinary handler", rounds)],
    )


def p03(on: Setting) -> dict[str, Any]:
    pipelined = on.txbox("txbox, pipeline=True", writes, pipeline=True)
    limit = on.limit()
    rounds = on.interleaved([(on.naive(), on.work()), (pipelined, on.work(5)), (limit, on.work(5))])
    return on.result(
        "P3",
        "Backlog, one message a call, pipeline=True",
        f"{_WAITING}; the handler writes through psycopg's own API and reads nothing",
        [
            Bar("at least 0.8 of the limit", 0.8, ratios(rounds, pipelined.name, limit.name)),
            Bar(
                "at least 12 times naive",
                12.0,
                ratios(rounds, pipelined.name, "naive"),
                stretch=True,
            ),
        ],
        rounds,
        plots=[_rates("p03", "Backlog, pipeline=True", rounds)],
    )


def p04(on: Setting) -> dict[str, Any]:
    plain = on.txbox("txbox, batch=True", in_sets, batch=True)
    piped = on.txbox("txbox, batch=True, pipeline=True", in_sets, batch=True, pipeline=True)
    limit = on.limit()
    times = on.work(10)
    rounds = on.interleaved([(on.naive(), on.work()), (plain, times), (piped, times), (limit, times)])  # fmt: skip
    return on.result(
        "P4",
        "Backlog, batch=True with set-based SQL",
        f"{_WAITING}; batches of at most 100, two statements with unnest each; the limit does all of it in one "
        "statement a batch, in autocommit, and what it reads in Python is the JSON",
        [
            bar
            for contender, least in ((plain, 0.85), (piped, 0.95))
            for bar in (
                Bar(
                    f"{contender.name}: at least {least} of the limit",
                    least,
                    ratios(rounds, contender.name, limit.name),
                ),
                Bar(
                    f"{contender.name}: at least 22 times naive",
                    22.0,
                    ratios(rounds, contender.name, "naive"),
                    stretch=True,
                ),
            )
        ],
        rounds,
        plots=[_rates("p04", "Backlog, batch=True", rounds)],
    )


def p13(on: Setting) -> dict[str, Any]:
    new = on.txbox("all new", writes, pipeline=True)
    old = on.txbox("99 % duplicates", writes, pipeline=True)
    rounds = on.interleaved(
        [
            (on.naive(name="naive, 99 % duplicates"), on.work(make=storm)),
            (new, on.work(5, duplicates=0.0)),
            (old, on.work(5, make=storm)),
            (on.limit(), on.work(5, make=storm)),
        ]
    )
    return on.result(
        "P13",
        "A storm of duplicates",
        f"{_WAITING}; the handler of P3; of as many deliveries, each message comes a hundred times, in any order",
        [Bar("at least 2 times the rate of new messages", 2.0, ratios(rounds, old.name, new.name))],
        rounds,
    )


def p17(on: Setting) -> dict[str, Any]:
    batched = on.txbox("txbox, batch=True", in_sets, batch=True)
    bare = WithoutInbox(on.beside, on.gauges)
    work = on.work(10, duplicates=0.0)
    few = on.work(duplicates=0.0)
    rounds = on.interleaved([(on.naive(), few), (bare, work), (batched, work), (on.limit(), work)])
    pairs = [
        with_inbox - without
        for with_inbox, without in zip(
            cpu_us(rounds, batched.name), cpu_us(rounds, bare.name), strict=True
        )
    ]
    known = values(rounds, batched.name, "server_cpu_us")
    return on.result(
        "P17",
        "What the inbox costs",
        f"{_WAITING}, no duplicates; the same set-based handler through the worker, and in a plain loop that reads the "
        "JSON, calls the handler and commits every 100 messages. CPU of client and server, a message",
        [Bar("at most 12 us of CPU more than without an inbox", 12.0, pairs, "at most", "us")],
        rounds,
        notes=[] if known else ["The server's CPU is not known: only the client's is compared."],
    )


def cpu_us(rounds: list[Round], name: str) -> list[float]:
    """CPU of client and, where it is known, server; microseconds a message, round by round."""
    clients = values(rounds, name, "client_cpu_us")
    servers = values(rounds, name, "server_cpu_us") or [0.0] * len(clients)
    return [client + server for client, server in zip(clients, servers, strict=True)]
