"""A stream that is read ahead in a thread, so that the training loop does not wait for data.

The position of a ``Prefetched`` stream is that of its reader: batches that wait in memory do not
count, so a checkpoint resumes at the exact sequence whatever was read ahead.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Condition, Thread, current_thread
from typing import Any, TypeVar

from averaging.history.readings import SEQUENCES_MAX, Reading
from peer.data.batches.sequences import Sequences, TokenStream, digest_of

T = TypeVar("T")
Place = Callable[[Sequences], Any]
"""Work of the thread on a batch, such as copying it to a device."""

TOKENS_MAX = 1 << 22
"""Tokens that wait in memory at most, unless two batches have more."""

BATCHES_MIN, BATCHES_MAX = 2, 64

END_WITHIN_S = 1.0


def in_background(work: Callable[[], T], *, name: str) -> Future[T]:
    """Start ``work`` in a thread that ends with the process, whatever it waits for."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return result


class Prefetched:
    """A ``TokenStream`` that reads another one ahead. Used by one thread at a time."""

    def __init__(self, stream: TokenStream, *, digests: bool = False) -> None:
        """``digests``: have ``reading`` say what was read last."""
        self._stream = stream
        self._state = stream.state()
        self._digests = digests
        self.reading: Reading | None = None
        """The last batch that was taken, so that another peer may read it too."""
        self._reader: _Reader | None = None
        self._end = weakref.finalize(self, lambda: None)

    def next(self, sequences: int) -> Sequences:
        batch: Sequences = self.take(sequences)
        return batch

    def take(
        self, sequences: int, place: Place | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """The next batch as ``place`` returned it, or ``None`` if it takes longer.

        Batches of another size, or for another place, are read anew from the same position. An
        error of the stream is raised in the turn of the batch that it concerns.
        """
        reader = self._reader
        if reader is None or not reader.reads(sequences, place):
            self._stop()
            reader = self._reader = _Reader(self._stream, sequences, place, self._digests)
            self._end = weakref.finalize(self, reader.end)
        try:
            taken = reader.take(timeout_s)
        except BaseException:
            self._stop()
            raise
        if taken is None:
            return None
        before = self._state
        batch, self._state, digest = taken
        whole = min(sequences, SEQUENCES_MAX)
        self.reading = Reading(before, whole, digest) if digest else None
        return batch

    def state(self) -> dict[str, int]:
        return dict(self._state)

    def restore_position(self, state: Mapping[str, int]) -> None:
        self._stop()
        self._stream.restore_position(state)
        self._state = self._stream.state()

    def _stop(self) -> None:
        """End the thread, and continue after the last batch that was taken."""
        if self._reader is not None:
            self._end.detach()
            self._reader.stop()
            self._reader = None
            self._stream.restore_position(self._state)


class _Reader:
    """The thread that reads ahead. It refers to no ``Prefetched``, whose end therefore ends it."""

    def __init__(
        self, stream: TokenStream, sequences: int, place: Place | None, digests: bool
    ) -> None:
        self._digests = digests
        self._stream = stream
        self._sequences = sequences
        self._place = place
        self._depth: int | None = None
        self._changed = Condition()  # reentrant: ``end`` may be called by the garbage collector
        self._ready: deque[tuple[Any, dict[str, int], bytes]] = deque()
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def reads(self, sequences: int, place: Place | None) -> bool:
        return (sequences, place) == (self._sequences, self._place)

    def take(self, timeout_s: float | None) -> tuple[Any, dict[str, int], bytes] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure, timeout_s)
            if self._ready:
                taken = self._ready.popleft()
                self._changed.notify_all()
                return taken
            if self._failure is not None:
                raise self._failure
            return None

    def stop(self, timeout_s: float | None = None) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not current_thread():
            self._thread.join(timeout_s)

    def end(self) -> None:
        """Stop without waiting for a source that does not answer: the process may be ending."""
        self.stop(END_WITHIN_S)

    def _run(self) -> None:
        try:
            while self._may_read():
                batch = self._stream.next(self._sequences)
                if self._depth is None:
                    fitting = TOKENS_MAX // max(1, batch.size)
                    self._depth = min(max(fitting, BATCHES_MIN), BATCHES_MAX)
                digest = digest_of(batch[:SEQUENCES_MAX]) if self._digests else b""
                placed = batch if self._place is None else self._place(batch)
                with self._changed:
                    self._ready.append((placed, self._stream.state(), digest))
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _may_read(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._depth is None or len(self._ready) < self._depth
            )
            return not self._stopping
