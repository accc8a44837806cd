"""What NOTIFY costs: commits a second that stage one message, with and without, in turns.

python -m benchmarks.notify [--seconds 3] [--rounds 5] [--clients 1 4 16]
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import psycopg

from benchmarks.servers import fresh_database
from txbox import App, Outbox


def rate(url: str, clients: int, seconds: float, *, notify: bool) -> float:
    """Commits a second of so many clients, each staging one message a transaction."""
    outbox = Outbox(notify=notify)
    counts = [0] * clients
    ready = threading.Barrier(clients + 1)
    stopped = threading.Event()

    def work(number: int) -> None:
        with psycopg.connect(url) as tx:
            ready.wait()
            while not stopped.is_set():
                outbox.stage(tx, "t", 1)
                tx.commit()
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    time.sleep(seconds)
    stopped.set()
    took_s = time.perf_counter() - started
    for thread in threads:
        thread.join()
    return sum(counts) / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    args = parser.parse_args()
    with fresh_database("notify") as url:
        with App(url) as app:
            app.init()
        for clients in args.clients:
            pairs: list[tuple[float, float]] = []
            for number in range(args.rounds):
                order = (False, True) if number % 2 == 0 else (True, False)
                rates = {on: rate(url, clients, args.seconds, notify=on) for on in order}
                pairs.append((rates[False], rates[True]))
            without, with_it = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
            ratio = statistics.median(on / off for off, on in pairs)
            print(
                f"{clients} clients: {without:.0f}/s without, {with_it:.0f}/s with, ratio {ratio:.2f}"
            )


if __name__ == "__main__":
    main()
