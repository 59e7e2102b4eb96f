"""The account reads what the trainer is just writing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from averaging.history.merged_map import Mark, MergedMap
from peer.agent.account import Account
from peer.bridge.shared_memory import SharedTensors
from tests.peer.trainer.learner_pair import INCARNATION, ME, Pair, moved


@contextmanager
def between_instructions(codes: set[CodeType], do: Callable[[], object]) -> Iterator[None]:
    """Run ``do`` between any two instructions of these functions, as another process may."""

    def at_call(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return at_instruction

    def at_instruction(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            sys.settrace(None)
            do()
            sys.settrace(at_call)
        return at_instruction

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)


def test_the_account_is_right_whenever_it_is_read_while_the_trainer_adopts() -> None:
    """A new mark with the tokens of the one before made merged work of discarded work."""

    async def story() -> None:
        pair = Pair()
        states = await pair.found()
        sizes = [fragment.size for fragment in pair.layout.fragments]
        account = Account(ME, pair.memory, sizes, pair.port.tokens_at)
        account.open(None, earlier_tokens=0, ended_cleanly=True)
        writes = {SharedTensors.note_adoption.__code__, SharedTensors._note_base.__code__}
        reads = 0

        def read() -> None:
            nonlocal reads
            reads += 1
            account.update(states)

        for _ in range(3):
            snapshot = await pair.offer(0, amount=0.25)
            merged = MergedMap({ME: Mark(INCARNATION, snapshot.mark, pair.memory.tokens)})
            states[0] = moved(states[0], 1.0, merged)
            pair.port.adopt(0, states[0], contained=snapshot.mark)
            with between_instructions(writes, read):
                pair.learner.step(10)
            pair.port.rang()
            fate = account.update(states)
            assert (fate.discarded, fate.excess) == ({}, 0.0)
        assert reads > 100

    asyncio.run(story())
