"""The trainer's side of spot checks: what it has read, and trials of other peers' contributions.

A trial reads another peer's sequences in a thread. At the first safe point after that it measures
their loss twice, with two states of one fragment, and puts the own parameters back: two forward
passes of as many sequences as a reading tells of, during which training waits. Whatever another
peer says and whatever fails on the way, training goes on: the answer is then that nothing can be
told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import torch

from averaging.history.readings import Reading
from dht.identity import PeerId
from peer.bridge.messages import HasRead, Tried, Try
from peer.data.batches.prefetch import in_background
from peer.data.batches.sequences import Sequences, digest_of
from peer.data.feed import Feed
from peer.trainer.learner import Learner

logger = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
TELL_STEPS = 64
"""Steps of which the agent is told at once."""

UNREADABLE = (ValueError, KeyError, IndexError, OverflowError)
"""Errors that a place in the data which does not exist raises."""

LossOf = Callable[[Sequences], float]


class Trials:
    """The trials of one trainer, on its own thread."""

    def __init__(
        self, feed: Feed, learner: Learner, send: Callable[[HasRead | Tried], None]
    ) -> None:
        self._feed = feed
        self._learner = learner
        self._send = send
        self._read: dict[int, Reading | None] = {}
        self._told_at = 0.0
        self._asked: Try | None = None
        self._reading: Future[Sequences] | None = None

    def __repr__(self) -> str:
        return f"Trials(asked={self._asked})"

    def note(self, step: int, *, judges: bool) -> None:
        """A step was made: remember what was read for it, and tell the agent now and then.

        ``judges``: a trial can be measured.
        """
        self._read[step] = self._feed.reading
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY_S or len(self._read) >= TELL_STEPS:
            self._told_at = now
            self._send(HasRead(self._read, judges))
            self._read = {}

    def begin(self, asked: Try) -> None:
        """Read what a trial needs, in a thread; one at a time."""
        if self._reading is not None and not self._reading.done():
            self._send(Tried(number=asked.number))
            return
        self._asked = asked
        work = partial(self._feed.read_as, PeerId(asked.author), asked.reading)
        self._reading = in_background(work, name="trial")

    def try_if_ready(self, loss_of: LossOf | None) -> None:
        """Finish the trial at this safe point if its data is here. Answers at most once."""
        asked, reading = self._asked, self._reading
        if asked is None or reading is None or not reading.done():
            return
        try:
            sequences = reading.result()
        except Exception as error:
            logger.info("trial_without_data author=%s reason=%r", asked.author, error)
            # Anything else, such as data that cannot be had, says nothing of the place.
            self._answer(Tried(number=asked.number, other_data=isinstance(error, UNREADABLE)))
            return
        if digest_of(sequences) != asked.reading.digest:
            self._answer(Tried(number=asked.number, other_data=True))
            return
        if loss_of is None:
            self._answer(Tried(number=asked.number))
            return
        began = time.monotonic()
        try:
            states = torch.from_numpy(np.fromfile(Path(asked.path), np.float32)).chunk(2)
            losses = self._learner.measured_with(
                asked.fragment, states, partial(loss_of, sequences)
            )
        except Exception as error:  # such as a device whose memory is full
            logger.warning("trial_failed path=%s reason=%r", asked.path, error)
            self._answer(Tried(number=asked.number))
            return
        if losses is None:
            return  # at the next safe point
        seconds = time.monotonic() - began
        both = losses[0], losses[1]
        self._answer(Tried(number=asked.number, losses=both, seconds=seconds))

    def _answer(self, tried: Tried) -> None:
        self._asked = self._reading = None
        self._send(tried)
