"""A few threads for arithmetic beside the event loop.

numpy and blake3 release the interpreter's lock, so that sending and receiving
go on meanwhile. On the virtual loop the work runs inline, and deterministically.

Work on few bytes runs inline everywhere: it takes less time than to hand it over and to hear of its
end, which is 50 to 100 us beside a busy loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from averaging.numbers.arrays import check_subnormals
from averaging.numbers.codec import Scratch

SMALL_BYTES = 16 << 10
"""Work on so many bytes, or fewer, runs in the loop."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def threads_for(processors: int) -> int:
    """Number of threads for arithmetic on a machine with so many processors.

    The loop that moves bytes and the trainer need some too; where threads crowd processors each
    takes the others' memory out of the cache, and the loop waits for its turn.
    """
    return max(1, min(2, processors // 2))


def is_small(size: int) -> bool:
    """True if work on so many bytes is not worth a thread."""
    return size <= SMALL_BYTES


class Threads:
    """A pool for codec work. Every thread is checked once for arithmetic that others can repeat,
    and so is the one that makes the pool, whose loop does what is small."""

    def __init__(self, count: int) -> None:
        check_subnormals()
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(count, "averaging", initializer=check_subnormals)

    async def run(self, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run ``work`` beside the loop. Cancelling the wait does not stop the work."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*args, **kwargs))

    async def run_on(
        self, size: int, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """``run`` for work on so many bytes."""
        return work(*args, **kwargs) if is_small(size) else await self.run(work, *args, **kwargs)

    async def run_telling(
        self, size: int, work: Callable[[Callable[[_T], None]], _R], *, tell: Callable[[_T], None]
    ) -> _R:
        """``run_on`` for work of many parts, which says how far it is without stopping.

        Reports of ``work`` are told in the loop, in order, and all of them before this returns. To
        hand each part over by itself would cost a part's time where the loop is busy with bytes.
        """
        if is_small(size):
            return work(tell)
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
