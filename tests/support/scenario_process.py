"""Worker processes of the tests: started, watched line by line, held, killed."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any, Self

from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S
from tests.support.warm import Warm

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Plan:
    """What a worker process does.

    Args:
        deliveries: (id, payload) in order.
        crash: the name of the point at which it kills itself, the `crash_at`-th time.
        hold: points at which it waits until `go`.
        table: it also runs what is due in the table, once.
    """

    url: str
    deliveries: Sequence[tuple[str | int, bytes]] = ()
    mode: str = "inline"
    crash: str | None = None
    crash_at: int = 1
    hold: tuple[str, ...] = ()
    table: bool = False
    lease_s: float = 60.0

    def text(self) -> str:
        plan = asdict(self)
        plan["deliveries"] = [
            (delivery, base64.b64encode(payload).decode()) for delivery, payload in self.deliveries
        ]
        return json.dumps(plan)


class WorkerProcess:
    """`with WorkerProcess(plan) as worker`; whatever happens, it is gone afterwards."""

    def __init__(self, plan: Plan, folder: Path | None = None) -> None:
        """`folder` takes a plan that is too long for a command line."""
        text = plan.text()
        if folder is not None:
            path = folder / f"plan-{next(_numbers)}.json"
            path.write_text(text)
            text = f"@{path}"
        self._process = Warm(
            ["tests.support.scenario_service", text],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said: Queue[dict[str, Any] | None] = Queue()
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        self._errors: list[str] = []
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._end()

    def _end(self) -> None:
        self._process.wait(DEADLINE_S)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()

    @property
    def errors(self) -> str:
        """All that it wrote to its standard error; complete once it has ended."""
        return "".join(self._errors)

    def said(self) -> dict[str, Any] | None:
        """The next thing it says; None when it has ended."""
        try:
            return self._said.get(timeout=DEADLINE_S)
        except Empty:
            raise AssertionError(f"the worker says nothing; its errors: {self.errors}") from None

    def until(self, **wanted: Any) -> dict[str, Any]:
        """Wait until it says this."""
        while (said := self.said()) is not None:
            if all(said.get(name) == value for name, value in wanted.items()):
                return said
        raise AssertionError(f"the worker ended before {wanted}; its errors: {self.errors}")

    def go(self) -> None:
        """Let it go on from the point it holds at."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def rest(self) -> list[dict[str, Any]]:
        """Everything it still says, until its end."""
        said = []
        while (line := self.said()) is not None:
            said.append(line)
        return said

    def ended(self) -> int:
        """Its exit status; negative is the signal that killed it."""
        self._end()
        return self._process.wait()
