"""An ASGI application without a server: its lifespan, and requests to it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, NamedTuple, Self


class Reply(NamedTuple):
    status: int
    text: str


class Lived:
    """Inside the block the application has started up; whatever its lifespan raises is raised by the block's ends."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._to: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self._from: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._state: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self._state}
        self._task = asyncio.create_task(
            self._application(scope, self._to.get, self._from.put), name="lifespan"
        )
        await self._said("startup")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._said("shutdown")

    async def _said(self, what: str) -> None:
        assert self._task is not None
        await self._to.put({"type": f"lifespan.{what}"})
        answer = asyncio.create_task(self._from.get())
        await asyncio.wait({answer, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and answer.result()["type"].endswith(".complete"):
            if what == "shutdown":
                await self._task
            return
        answer.cancel()
        await self._task
        raise AssertionError(f"the {what} failed without an error")

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        """One request; an exception is raised unless an answer was sent before, as a server would log it then."""
        path, _, query = path.partition("?")
        sent: list[dict[str, Any]] = []
        gone = asyncio.Event()
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await gone.wait()
                return {"type": "http.disconnect"}
            asked = True
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        given = {"host": "localhost", "content-length": str(len(body)), **(headers or {})}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "root_path": "", "client": ("127.0.0.1", 1), "server": ("localhost", 80),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "state": dict(self._state),
        }  # fmt: skip
        try:
            await self._application(scope, receive, send)
        except Exception:
            if not sent:
                raise
        text = b"".join(each.get("body", b"") for each in sent[1:]).decode()
        return Reply(sent[0]["status"], text)
