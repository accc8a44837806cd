"""An event loop in a thread, for sources and publishers whose client is async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

Result = TypeVar("Result")


class EventLoop:
    """An event loop in its own thread; `close` ends its tasks."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(
        self, work: Coroutine[Any, Any, Result], within_s: float, clean_up_s: float = 0.0
    ) -> Result:
        """Run a coroutine on the loop and wait for it.

        Args:
            within_s: after this long it is cancelled.
            clean_up_s: how much longer it may take to clean up after that.

        Raises:
            TimeoutError: it took too long, or the client cancelled it.
        """

        async def bounded() -> Result:
            async with asyncio.timeout(within_s):
                return await work

        future = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
        try:
            return future.result(within_s + clean_up_s)
        except CancelledError:
            # clients cancel whoever waits on a connection that dies
            raise TimeoutError("the connection ended during the call") from None
        except TimeoutError as error:
            future.cancel()
            raise TimeoutError(str(error) or f"no answer within {within_s:g} s") from error

    def soon(self, callback: Callable[[], object]) -> None:
        """Call something on the loop without waiting for it."""
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # not asyncio.Runner: it would wait for a name lookup that hangs
        self._loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
