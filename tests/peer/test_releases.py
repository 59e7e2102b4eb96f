"""Messages of a build before within one machine, read by this one.

The files of ``tests/golden/protocol_1`` were written by that release's own code. They never change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from dht.protocol import NEWEST, OLDEST
from peer.bridge.messages import (
    Begin,
    check_begin,
    decode_from_agent,
    decode_from_trainer,
    pack,
)
from peer.bridge.shared_memory import SharedTensors
from peer.errors import OtherRelease

BEFORE = Path(__file__).parents[1] / "golden" / f"protocol_{OLDEST}"
BRIDGE = json.loads((BEFORE / "bridge.json").read_text())
FROM_TRAINER = [bytes.fromhex(each) for each in BRIDGE["from_trainer"]]
FROM_AGENT = [bytes.fromhex(each) for each in BRIDGE["from_agent"]]
HEADER_BYTES = 4


def test_an_agent_understands_the_trainer_that_was_started_before_the_upgrade() -> None:
    for framed in FROM_TRAINER:
        message = decode_from_trainer(framed[HEADER_BYTES:])
        if isinstance(message, Begin):
            check_begin(framed[HEADER_BYTES:])
            assert message.version == OLDEST
        written = msgspec.msgpack.decode(framed[HEADER_BYTES:])
        again = msgspec.msgpack.decode(pack(message)[HEADER_BYTES:])
        assert again[: len(written)] == written, "fields are only appended"


def test_such_a_trainer_understands_the_new_agent_because_it_says_the_same_first() -> None:
    """A reader of an array takes the fields that it knows, and leaves the rest."""
    for framed in FROM_AGENT:
        written = msgspec.msgpack.decode(framed[HEADER_BYTES:])
        message = decode_from_agent(framed[HEADER_BYTES:])
        again = msgspec.msgpack.decode(pack(message)[HEADER_BYTES:])
        assert again[: len(written)] == written, "fields are only appended"
        assert decode_from_agent(msgspec.msgpack.encode([*again, "of a later release"])) == message


def test_a_trainer_states_its_number_and_is_refused_two_numbers_away() -> None:
    begin = decode_from_trainer(FROM_TRAINER[0][HEADER_BYTES:])
    assert isinstance(begin, Begin)
    for number, fits in ((OLDEST - 1, False), (OLDEST, True), (NEWEST, True), (NEWEST + 1, False)):
        frame = pack(msgspec.structs.replace(begin, version=number))[HEADER_BYTES:]
        if fits:
            check_begin(frame)
            continue
        with pytest.raises(OtherRelease, match=f"speaks protocol {number}, .*start the trainer"):
            check_begin(frame)
    # Whatever fields a later Begin has: the number is read before them.
    with pytest.raises(OtherRelease):
        check_begin(msgspec.msgpack.encode(["Begin", NEWEST + 1, {"a": "map"}]))
    assert Begin.__struct_fields__[0] == "version"


def test_shared_memory_is_laid_out_as_it_was() -> None:
    memory = SharedTensors.create([5, 7], layout=bytes(range(32)), incarnation=42, coarse=True)
    memory.hold_pages()  # as a release before, which knows of no slots that may be emptied
    for name, at in (("memory_header", 0), ("memory_progress", 256), ("memory_control", 4096)):
        expected = bytes.fromhex(BRIDGE[name])
        assert os.pread(memory.descriptor, len(expected), at) == expected, name
    memory.close()


def test_shared_memory_of_another_version_is_refused_with_what_to_do() -> None:
    memory = SharedTensors.create([5], layout=bytes(32), incarnation=42, coarse=False)
    os.pwrite(memory.descriptor, (3).to_bytes(2, "little"), 0)
    with pytest.raises(OtherRelease, match=r"version 3, .*start the trainer again"):
        SharedTensors(os.dup(memory.descriptor))
    os.pwrite(memory.descriptor, bytes(8), 0)
    with pytest.raises(ValueError, match="another kind"):
        SharedTensors(os.dup(memory.descriptor))
    memory.close()
