"""Trainer and agent of two releases on one machine."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext

import msgspec
import pytest

from dht.protocol import NEWEST, OLDEST
from peer.bridge.messages import LineBroken, decode_from_agent, decode_from_trainer, pack
from peer.bridge.shared_memory import SharedTensors
from tests.golden.snapshots import BEGIN, FROM_AGENT, FROM_TRAINER, HERE

MEMORY = json.loads((HERE / "shared_memory.json").read_text())
HEADER_BYTES = 4


def test_either_side_skips_what_it_does_not_know() -> None:
    """The side of a later release says the same first: fields are only appended."""
    sides = (FROM_TRAINER, decode_from_trainer), (FROM_AGENT, decode_from_agent)
    for messages, decode in sides:
        for message in messages:
            fields = msgspec.msgpack.decode(pack(message)[HEADER_BYTES:])
            assert decode(msgspec.msgpack.encode([*fields, "of a later release"])) == message


def test_a_trainer_states_its_number_and_is_refused_two_numbers_away() -> None:
    for number, fits in ((OLDEST - 1, False), (OLDEST, True), (NEWEST, True), (NEWEST + 1, False)):
        frame = pack(msgspec.structs.replace(BEGIN, version=number))[HEADER_BYTES:]
        with nullcontext() if fits else pytest.raises(msgspec.ValidationError):
            decode_from_trainer(frame)


def test_shared_memory_is_laid_out_as_it_was() -> None:
    memory = SharedTensors.create([5, 7], layout=bytes(range(32)), incarnation=42, coarse=True)
    memory.hold_pages()
    for name, at in (("memory_header", 0), ("memory_progress", 256), ("memory_control", 4096)):
        expected = bytes.fromhex(MEMORY[name])
        assert os.pread(memory.descriptor, len(expected), at) == expected, name
    memory.close()


def test_shared_memory_of_another_kind_is_refused_with_what_to_do() -> None:
    memory = SharedTensors.create([5], layout=bytes(32), incarnation=42, coarse=False)
    os.pwrite(memory.descriptor, (3).to_bytes(2, "little"), 0)
    with pytest.raises(LineBroken, match=r"another kind.*start the trainer again"):
        SharedTensors(os.dup(memory.descriptor))
    memory.close()
