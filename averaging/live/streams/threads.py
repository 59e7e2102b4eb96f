"""A few threads for arithmetic beside the event loop.

numpy and blake3 release the interpreter's lock, so that sending and receiving
go on meanwhile. On the virtual loop the work runs inline, and deterministically.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from averaging.numbers.arrays import check_subnormals
from averaging.numbers.codec import Scratch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def threads_for(processors: int) -> int:
    """Number of threads for arithmetic on a machine with so many processors.

    The loop that moves bytes and the trainer need some too; where threads crowd processors each
    takes the others' memory out of the cache, and the loop waits for its turn.
    """
    return max(1, min(2, processors // 2))


class Threads:
    """A pool for codec work. Every thread is checked once for arithmetic that others can repeat."""

    def __init__(self, count: int) -> None:
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(count, "averaging", initializer=check_subnormals)

    async def run(self, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run ``work`` beside the loop. Cancelling the wait does not stop the work."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*args, **kwargs))

    async def run_telling(
        self, work: Callable[[Callable[[_T], None]], _R], *, tell: Callable[[_T], None]
    ) -> _R:
        """``run`` for work of many parts, which says how far it is without stopping.

        Reports of ``work`` are told in the loop, in order, and all of them before this returns. To
        hand each part over by itself would cost a part's time where the loop is busy with bytes.
        """
        loop = asyncio.get_running_loop()
        mine = threading.get_ident()

        def say(value: _T) -> None:
            if threading.get_ident() == mine:  # inline
                tell(value)
            else:
                loop.call_soon_threadsafe(tell, value)

        return await loop.run_in_executor(self._pool, lambda: work(say))

    def scratch(self) -> Scratch:
        """The calling thread's own working memory."""
        held: Scratch | None = getattr(self._local, "scratch", None)
        if held is None:
            held = self._local.scratch = Scratch()
        return held

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
