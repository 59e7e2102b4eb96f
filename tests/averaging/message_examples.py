"""One example of every message, and the golden files of their bytes.

There is a file for each protocol number that this build speaks. ``python -m
tests.averaging.message_examples`` writes that of the newest one anew, to which a new message adds a
line. Once a release has written it, the file of an older number never changes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from averaging import messages as said
from averaging.messages import Commit, Entry, Head, Link, Message, Opening, Stamp
from dht import protocol
from dht.identity import PeerId

GOLDEN = Path(__file__).parent.parent / "golden"


ANNA = PeerId("12D3KooWAnna")
BORIS = PeerId("12D3KooWBoris")
ROUND = bytes(range(32))
TOPIC = bytes(range(16))
LINKS = (Link(7, bytes([7] * 32), 70_000), Link(6, bytes([6] * 32), 60_000))
HEAD = Head(7, bytes([7] * 32), LINKS, ((ANNA, bytes(64)),))

COMMIT = Commit(
    topic=TOPIC,
    fragment=3,
    leader=ANNA,
    leader_incarnation=1_750_000_000_000,
    nonce=5,
    parents=(LINKS[0],),
    members=(
        Entry(ANNA, 1_750_000_000_000, 9, 0, 7, 0, 240, 24, 98_304, True),
        Entry(BORIS, 1_750_000_000_001, 4, 0, 6, 1, 120, 12, 49_152, False),
    ),
    reducers=(ANNA, BORIS),
    shares=(100, 230),
    codec="int4",
    merge="mean",
    eta=1.0,
    mu=0.5,
    batch_tokens_max=4096,
    contributors_min=2,
    upload_s=30.0,
    round_s=180.0,
)

FULL = msgspec.structs.replace(
    COMMIT,
    codec="int2",
    codec_down="int4",
    on_probation=(1,),
    directive=Stamp(7, bytes(range(16))),
)
"""With all fields that are left out of the bytes where they have nothing to say."""

OPENING = Opening(
    fragment=3,
    round=ROUND,
    slice=1,
    commit=said.encode_commit(COMMIT),
    signature=bytes(64),
)

EXAMPLES: tuple[Message, ...] = (
    said.Join(
        fragment=3,
        topic=TOPIC,
        incarnation=1_750_000_000_000,
        join=9,
        head=HEAD,
        base_version=7,
        staleness=0,
        mark=240,
        steps=24,
        tokens=98_304,
        batch_tokens_max=4096,
        bytes_per_s=12.5e6,
        reachable=True,
        codecs=("f32", "int4"),
        attempt=2,
        signatures=((1, bytes(range(64))),),
    ),
    said.Noted(3, 9),
    said.Redirect(3, 9, BORIS, 2),
    said.Call(3, HEAD, 29.5, 2),
    said.Coming(3),
    said.Pass(3, "not enough steps"),
    said.Withdraw(3, 9, 1_760_000_000_000),
    said.Refused(3, 9, "I am behind you", another_leads=True),
    said.Committed(
        3,
        said.encode_commit(COMMIT),
        bytes(64),
        (said.ParentCertificate(1, ((said.short_name(ANNA), bytes(64)),)),),
    ),
    said.Declined(3, ROUND, "I stand elsewhere now", absent=True),
    said.Behind(3, HEAD, bytes(32)),
    said.Compare(3, HEAD),
    said.Closed(3, 8, ROUND),
    said.Finished(3, ROUND, HEAD),
    said.Void(3, ROUND, "decided", forsworn=True, ballot=2, votes=((1, bytes(64)),)),
    said.Report(3, ROUND, 1, (0, 2), ((1, "value 17 of layer.0.weight is nan"),)),
    said.Reassign(3, ROUND, 2, 1, BORIS),
    said.Missing(3, ROUND, 1),
    said.Prepare(3, ROUND, 2),
    said.Promise(3, ROUND, 2, 0, (0, 1), bytes([9]) * 64),
    said.Propose(3, ROUND, 2, (0, 1), bytes([7]) * 64),
    said.Accepted(3, ROUND, 2, bytes(64)),
    said.Sealed(3, ROUND, 2, (0, 1), ((0, bytes(64)), (2, bytes(64)))),
    said.Forswear(3, ROUND, 2),
    said.Forsworn(3, ROUND, HEAD, bytes(64)),
    said.Ask(3, ROUND),
    said.Bits(3, ROUND, bytes(32)),
    said.Accused(0, bytes(32), BORIS),
    said.Directed(3, b"a directive of the run's owner"),
    said.Suspected(0, BORIS),
)


def golden_file(number: int) -> Path:
    """The golden file of a protocol number."""
    return GOLDEN / f"protocol_{number}" / "messages.txt"


def golden_lines(number: int) -> list[str]:
    """The examples in the form of a protocol number, with whatever it can say."""
    lines = [
        f"{type(example).__name__} {said.encode(example, number).hex()}"
        for example in EXAMPLES
        if said.MESSAGES_SINCE.get(type(example), number) <= number
    ]
    lines += [f"Commit {said.encode_commit(commit).hex()}" for commit in (COMMIT, FULL)]
    lines.append(f"Opening {said.encode_opening(OPENING).hex()}")
    return lines


if __name__ == "__main__":
    golden_file(protocol.NEWEST).write_text("\n".join(golden_lines(protocol.NEWEST)) + "\n")
