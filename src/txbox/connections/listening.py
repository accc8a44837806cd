"""Listens for PostgreSQL's notifications on a connection of its own, and reconnects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Identifier

_log = logging.getLogger("txbox")

_LOOK_S = 0.5
_PAUSE_S = (0.2, 10.0)
# a server that went away without a word is noticed; what the URL says goes first
_ALIVE = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10}


class Listener:
    """Calls `heard` after each notification, and after each connect, since nobody listened before.

    A lost connection, or a pooler that hands it to others, costs notifications and nothing else:
    whoever is woken must look by itself as well.
    """

    def __init__(self, conninfo: str, channel: str, heard: Callable[[], None]) -> None:
        self._conninfo = make_conninfo("", **{**_ALIVE, **conninfo_to_dict(conninfo)})
        self._listen = SQL("LISTEN {}").format(Identifier(channel))
        self._heard = heard
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="txbox-listener", daemon=True)

    def start(self) -> None:
        """Listen in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and close the connection."""
        self._stopped.set()
        self._thread.join(2 * _LOOK_S)

    def _run(self) -> None:
        pause_s = _PAUSE_S[0]
        while not self._stopped.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True) as connection:
                    connection.execute(self._listen)
                    pause_s = _PAUSE_S[0]
                    self._heard()
                    while not self._stopped.is_set():
                        for _ in connection.notifies(timeout=_LOOK_S):
                            self._heard()
            except psycopg.Error as error:
                # the text may quote the URL
                _log.info("Nobody listens for a while, relays poll: %s", type(error).__name__)
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S[1])
