"""`txbox run` in a process of its own, and what it answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any, Self

from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm import Warm
from tests.support.webhook.senders import Answer, Endpoint


class TxboxRun:
    """`with TxboxRun(tmp_path, url=…) as run`: gone when the block ends.

    Args:
        words: options of the command.
        verb: "run", "relay" or "maintain".
        plan: see tests/support/webhook/served.py.
    """

    def __init__(self, directory: Path, *words: str, verb: str = "run", **plan: Any) -> None:
        self.directory = directory
        plan["directory"] = str(directory)
        self.process = Warm(
            ["txbox", verb, "--app", "tests.support.webhook.served:app", "--verbose", *words],
            cwd=ROOT,
            env={**os.environ, "TEST_PLAN": json.dumps(plan)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.decode().strip())

    def says(self, text: str, times: int = 1) -> list[str]:
        """Wait until that many log lines hold the text."""

        def found() -> list[str] | None:
            lines = [line for line in self.lines if text in line]
            assert len(lines) >= times or self._thread.is_alive(), f"ended: {self.lines}"
            return lines if len(lines) >= times else None

        said: list[str] = eventually(found, f"{times} x {text!r} in {self.lines}")
        return said

    def handling(self, own_id: str) -> None:
        eventually((self.directory / f"handling-{own_id}").exists, f"the start of {own_id}")

    def open_the_gate(self) -> None:
        (self.directory / "gate").touch()

    @property
    def hook(self) -> Endpoint:
        return Endpoint(self._port("/hook"))

    @property
    def health_port(self) -> int:
        return self._port("/livez")

    def _port(self, path: str) -> int:
        def found() -> int | None:
            for line in self.lines:
                match = re.search(rf"Listening on http://\S+:(\d+) for .*{path}", line)
                if match:
                    return int(match[1])
            assert self._thread.is_alive(), f"ended: {self.lines}"
            return None

        return int(eventually(found, f"a port for {path} in {self.lines}"))

    def get(self, path: str, method: str = "GET") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.health_port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            text = response.read().decode()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, text, found)

    def because(self, path: str) -> list[str]:
        """Why not; empty when it is so."""
        answer = self.get(path)
        body = json.loads(answer.text)
        assert body[path.strip("/").replace("livez", "alive").replace("readyz", "ready")] is (
            answer.status == 200
        )
        why: list[str] = body["because"]
        assert bool(why) is (answer.status == 503)
        return why

    def ready(self) -> Self:
        eventually(lambda: self.because("/readyz") == [], "readiness")
        return self

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").text.splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }

    def ended(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:
            # pytest shows it with the failure
            print(*self.lines[-40:], sep="\n")
        if self.process.poll() is None:
            self.process.kill()
        self.ended()
        if not self._thread.is_alive():
            assert self.process.stderr is not None
            self.process.stderr.close()
