"""An agent that is killed and started again: each refund once, and one that a person must approve.

pip install txbox
python agent_refunds.py             # plays the agent: dies in the middle, goes on, waits for a person
txbox quarantine list --consumer refund --database sqlite:///agent_refunds.db
txbox quarantine accept refund 'ticket-4711 call_3' --reason 'checked' --database sqlite:///agent_refunds.db
txbox run agent_refunds:app --once  # carries out what was accepted
python agent_refunds.py             # plays the agent again: the same answers, and that of the large refund

The plan stands for what a model answers; any framework that calls functions as tools takes `refund` as it is.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from datetime import timedelta
from pathlib import Path

from txbox import App
from txbox.integrations.agents import CallRefused, CallWaiting, once, run

app = App("sqlite:///agent_refunds.db", observers=[])


@once(app, "refund", approve=lambda cents, **_: cents > 10_000, wait=timedelta(0))
def refund(tx: sqlite3.Connection, order: int, cents: int) -> dict[str, int]:
    """Refund an order; what costs more than 100.00 waits for a person."""
    added = tx.execute("INSERT INTO refund (orders, cents) VALUES (?, ?)", (order, cents))
    return {"order": order, "number": added.lastrowid or 0}


#: A model's calls, with the ids that it gave them.
PLAN = [("call_1", 1, 500), ("call_2", 1, 500), ("call_3", 2, 50_000)]


def agent(*, dies: bool) -> None:
    for call_id, order, cents in PLAN:
        try:
            with run("ticket-4711", call=call_id):
                answer: object = refund(order, cents)
        except (CallWaiting, CallRefused) as error:
            answer = error
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)  # committed, and nobody has noted the answer
        print(f"{call_id}: {answer}")


def main() -> None:
    is_new = not Path("agent_refunds.db").exists()
    if is_new:
        app.init()  # once, at deployment
        with app.transaction() as tx:
            tx.execute("CREATE TABLE refund (number INTEGER PRIMARY KEY, orders INT, cents INT)")
        app.close()
        child = os.fork()
        if child == 0:
            agent(dies=True)
        print(f"The agent was killed: {os.waitpid(child, 0)[1] == signal.SIGKILL}")
    agent(dies=False)
    with app.transaction() as tx:
        print(tx.execute("SELECT orders, cents FROM refund ORDER BY number").fetchall())
    app.close()


if __name__ == "__main__":
    main()
