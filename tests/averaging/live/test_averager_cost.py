"""The cost of a round for each peer as the group grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from averaging import messages as said
from averaging.history.claims import encode_statement
from averaging.live.slices import reducing, uploading
from averaging.live.slices.evidence import Evidence
from averaging.live.streams.links import Transport
from averaging.messages import Accepted, Committed, Message, Propose, Sealed
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Layout, TensorSpec, reducers_count
from averaging.round import participation
from averaging.round.gathering.objections import Parents
from averaging.round.opinions.certificates import Certificates
from averaging.round.sealing.paxos import Coordinator
from averaging.rules.due import DuePolicy
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import QuorumPolicy
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, swarm

UNITS = 64
ROUNDS = 2
CERTIFICATE_BYTES_MAX = 3_000
CERTIFICATE_S_MAX = 10e-3
"""Cost of signatures, sent and checked, for each peer and round in a group of 16."""
BYTES_MAX_OF_FOUR_GROUPS = 8_000
"""The same where four groups meld: a certificate for each parent of a meld."""
LAYOUT = Layout.build([TensorSpec(f"t{i:02}", (64, 65)) for i in range(UNITS)], 1)
ENCODED = codec_named("f32").encoded_size(LAYOUT.fragments[0].unit_sizes)
SLICE_BYTES_MIN = 64 << 10
"""A sixteenth of the fragment: all of the largest group reduce."""


@pytest.mark.parametrize("members", [2, 3, 5, 8, pytest.param(16, marks=pytest.mark.slow)])
async def test_bytes_and_messages_per_peer_stay_in_bounds_as_the_group_grows(members: int) -> None:
    policy = replace(
        POLICY,
        due=DuePolicy(cycle_steps=4, fragments=1),
        quorum=QuorumPolicy(required="all", wait_s=20.0),
        codec="f32",
        slice_bytes_min=SLICE_BYTES_MIN,
    )

    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        peers = [await made.add(f"peer {i}", policy=policy) for i in range(members)]
        for peer in peers:
            assert peer.learner is not None
            peer.learner.is_noisy = False  # a cost does not depend on the values
        await made.live(4.0 * ROUNDS + 3.0)
        # Before they leave: a round that somebody leaves at the commit has cost uploads too.
        costs = [replace(peer.averager.stats) for peer in peers]
        told = sum(p.averager.transport.counters["messages_sent"] for p in peers)
        for peer in peers:
            assert await peer.averager.drain(timeout_s=20.0)
            await made.until(lambda peer=peer: not peer.averager.rounds_kept, within_s=120.0)  # type: ignore[misc]
        made.check()
        rounds = max(stats.rounds for stats in costs)
        assert rounds >= 1
        reducers = reducers_count(members, ENCODED, slice_bytes_min=SLICE_BYTES_MIN)
        assert reducers == members
        for stats in costs:
            for each in (stats.sent_bytes / rounds, stats.received_bytes / rounds):
                assert each <= 2.1 * ENCODED, f"{each / ENCODED:.2f} times the fragment"
        # A dozen for each member (join to finished), a report per reducer and member.
        most = 12 * members + 2 * members * reducers
        assert told <= most * rounds, f"{told / rounds:.0f} messages a round"


def test_the_number_of_reducers_follows_from_the_encoded_size() -> None:
    assert reducers_count(16, 1) == 1
    assert reducers_count(16, 256 << 10) == 1
    assert reducers_count(16, (256 << 10) + 1) == 2
    assert reducers_count(4, 100 << 20) == 4


class Stopwatch:
    """Time of the thread in some functions, those that they call included once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **facts: Any) -> Any:
            began, self._depth = time.thread_time(), self._depth + 1
            try:
                return function(*args, **facts)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - began

        return timed


def certificate_bytes(message: Message) -> int:
    """Bytes of a message that are signatures under votes, seals and links."""
    bare: Message = message
    head = getattr(message, "head", None)
    if head is not None:
        bare = msgspec.structs.replace(message, head=msgspec.structs.replace(head, signatures=()))
    elif isinstance(message, Accepted | Propose):
        bare = msgspec.structs.replace(message, signature=b"")
    elif isinstance(message, Sealed):
        bare = msgspec.structs.replace(message, votes=())
    elif isinstance(message, Committed):
        bare = msgspec.structs.replace(message, certificates=())
    return len(said.encode(message)) - len(said.encode(bare))


@pytest.mark.bench
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "quorum", "bytes_max"),
    [
        (16, QuorumPolicy(required="all", wait_s=20.0), CERTIFICATE_BYTES_MAX),
        (32, QuorumPolicy(wait_s=20.0), CERTIFICATE_BYTES_MAX),
        (64, QuorumPolicy(wait_s=20.0), BYTES_MAX_OF_FOUR_GROUPS),
    ],
    ids=["one group", "two groups", "several groups"],
)
def test_certificates_cost_little_in_groups_of_16(
    monkeypatch: pytest.MonkeyPatch, members: int, quorum: QuorumPolicy, bytes_max: int
) -> None:
    watch, sent = Stopwatch(), [0]
    for owner, name in (
        (Certificates, "beside"),
        (Parents, "hear"),
        (Parents, "objection"),
        (Certificates, "show"),
        (Certificates, "hear"),
        (Certificates, "is_certified"),
        (Coordinator, "accepted_by"),
        (participation, "is_chosen"),
    ):
        monkeypatch.setattr(owner, name, watch.around(getattr(owner, name)))
    send = Transport.send

    def counted(self: Transport, peer: Any, data: bytes) -> None:
        sent[0] += certificate_bytes(said.decode(data))
        send(self, peer, data)

    monkeypatch.setattr(Transport, "send", counted)
    policy = replace(POLICY, due=DuePolicy(cycle_steps=8, fragments=1), quorum=quorum)
    layout = Layout.build([TensorSpec("tensor", (16, 8))], 1)
    assert_cheap("signatures", members, policy, layout, watch, sent, bytes_max=bytes_max)


def assert_cheap(
    what: str,
    members: int,
    policy: RoundPolicy,
    layout: Layout,
    watch: Stopwatch,
    sent: Sequence[int],
    *,
    bytes_max: int = CERTIFICATE_BYTES_MAX,
) -> None:
    """Let a swarm live, and print and check the cost for each peer and round."""

    async def main() -> None:
        async with swarm(MemoryNetwork(), layout=layout) as made:
            peers = [await made.add(f"peer {i}", policy=policy) for i in range(members)]
            await made.live(45.0)
            made.check()
            rounds = max(peer.averager.stats.rounds for peer in peers)
            assert rounds >= 3
            each, bytes_each = watch.seconds / rounds / members, sent[0] / rounds / members
            print(  # noqa: T201
                f"{bytes_each:.0f} bytes and {1e3 * each:.2f} ms of {what}"
                f" for each peer and round ({members} members, {rounds} rounds)"
            )
            assert bytes_each <= bytes_max
            assert each <= CERTIFICATE_S_MAX

    run(main())


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_claims_about_slices_cost_little_in_a_group_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    members, watch, sent = 16, Stopwatch(), [0]
    for name in ("claim_own", "claim_alone", "claim_merged", "check"):
        monkeypatch.setattr(Evidence, name, watch.around(getattr(Evidence, name)))
    encode = encode_statement

    def counted(statement: Any) -> bytes:
        sent[0] += len(data := encode(statement))
        return data

    monkeypatch.setattr(uploading, "encode_statement", counted)
    monkeypatch.setattr(reducing, "encode_statement", counted)
    policy = replace(
        POLICY,
        due=DuePolicy(cycle_steps=8, fragments=1),
        quorum=QuorumPolicy(required="all", wait_s=20.0),
        slice_bytes_min=1,
    )

    layout = Layout.build([TensorSpec(f"t{i:02}", (16, 8)) for i in range(members)], 1)
    assert_cheap("claims", members, policy, layout, watch, sent)
