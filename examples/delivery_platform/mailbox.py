"""A mail server that keeps what it is sent, for the demonstration and the tests."""

from __future__ import annotations

import email
import socketserver
import threading
from collections.abc import Callable
from email.message import Message
from typing import Self


class Mailbox(socketserver.ThreadingTCPServer):
    """Speaks as much SMTP as smtplib does; as a context manager it runs in a thread.

    Args:
        arrived: called with each mail once it is accepted.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, arrived: Callable[[Message], object] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.mails: list[Message] = []
        self._arrived = arrived
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def accept(self, content: bytes) -> None:
        mail = email.message_from_bytes(content)
        with self._lock:
            self.mails.append(mail)
            if self._arrived is not None:
                self._arrived(mail)

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()
        self.server_close()


class _Session(socketserver.StreamRequestHandler):
    server: Mailbox

    def handle(self) -> None:
        self._say("220 mailbox")
        for line in self.rfile:
            verb = line.strip().upper()
            if verb == b"DATA":
                self._say("354 go on")
                if (content := self._content()) is None:
                    return  # the client died in the middle of it: no mail
                self.server.accept(content)
            elif verb == b"QUIT":
                self._say("221 bye")
                return
            self._say("250 fine")

    def _content(self) -> bytes | None:
        lines: list[bytes] = []
        for line in self.rfile:
            if line == b".\r\n":
                return b"".join(lines)
            lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
        return None

    def _say(self, answer: str) -> None:
        try:
            self.wfile.write(answer.encode() + b"\r\n")
        except OSError:
            # the client is gone; what it has sent is kept all the same
            self.rfile.close()
