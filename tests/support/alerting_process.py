"""A process whose only message is dead, and which kills itself at a point: `python -m tests.support.alerting_process`.

Its arguments: the database, where alerts go, the point and its pass.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.support.effect import CONSUMER, TOPIC
from txbox import App, Message, Reject
from txbox.brokers.http import Http
from txbox.testing import kill_at


def app_of(url: str, sink: str) -> App:
    app = App(url, alerts=Http(sink, private=True))

    @app.handler(TOPIC, consumer=CONSUMER)
    def handle(message: Message[Any], tx: Any) -> None:
        raise Reject("never")

    return app


if __name__ == "__main__":
    database, sink, point, nth = sys.argv[1:]
    kill_at(point, int(nth))
    app_of(database, sink).process(Message(topic=TOPIC, id="m1", payload=b"{}"))
