"""Messages on the line between trainer and agent: framing, and damaged streams."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.history.readings import Reading
from peer.bridge.messages import (
    Batches,
    Beat,
    Frames,
    FromAgent,
    FromTrainer,
    Happened,
    HasRead,
    Leave,
    LineBroken,
    Measure,
    Measured,
    Over,
    Phase,
    Progress,
    Report,
    Tried,
    Try,
    decode_from_agent,
    decode_from_trainer,
    pack,
)
from peer.status import PeerRow, Training
from tests.peer.bridge.example_messages import BEGIN
from tests.peer.statuses import a_status

FROM_TRAINER: list[FromTrainer] = [
    BEGIN,
    Beat(),
    Leave(3.5),
    Batches("batch 00ff"),
    Measured(asked=Measure(3, 900), loss=2.5, sequences=7),
    Measured(asked=Measure(0, gate=2), loss=2.5, sequences=7),
    HasRead({3: Reading({"position": 5}, 8, bytes(32)), 4: None}),
    Tried(number=1, losses=(2.5, 2.25)),
    Tried(number=2, other_data=True),
    Progress(Training(steps=3, loss=2.5, device_bytes=2e9)),
]
FROM_AGENT: list[FromAgent] = [
    Beat(),
    Phase(name="fetching", text="downloading", done=0.5),
    Report(
        status=a_status(link="shoal://x", temperature_c=61.0),
        rows=(PeerRow(name="boris", state="training", share=0.5),),
        scheduled_tokens=5,
    ),
    Happened("round", {"members": ["a", "b"], "seconds": 0.5, "reason": None, "contributed": True}),
    Measure(4, 900),
    Measure(0, gate=2),
    Over("left", 0, finished=False),
    Try(
        number=1,
        path="/somewhere/trial.f32",
        fragment=2,
        author="12D3",
        reading=Reading({"0/visit": 3, "sequence": 7}, 8, bytes(32)),
    ),
]


@given(st.integers(1, 9))
def test_messages_survive_however_the_stream_is_cut(size: int) -> None:
    stream = b"".join(pack(message) for message in (*FROM_TRAINER, *FROM_AGENT))
    frames = Frames()
    found: list[bytes] = []
    for start in range(0, len(stream), size):
        found += frames.feed(stream[start : start + size])
    trainers, agents = found[: len(FROM_TRAINER)], found[len(FROM_TRAINER) :]
    assert [decode_from_trainer(frame) for frame in trainers] == FROM_TRAINER
    assert [decode_from_agent(frame) for frame in agents] == FROM_AGENT


def test_a_torn_stream_is_noticed_before_anything_is_allocated() -> None:
    with pytest.raises(LineBroken, match="announced"):
        Frames().feed(b"\xff\xff\xff\xff")
    with pytest.raises(msgspec.DecodeError):
        decode_from_agent(pack(BEGIN)[4:])
