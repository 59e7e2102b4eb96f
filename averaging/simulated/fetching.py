"""One attempt of a simulated peer to take what others made: a replay, or a whole state.

A state comes from one source, with the signatures under its newest link. A lineage is signed, its
bits are not: so other peers that count are asked at the same moment for the digest of theirs, and a
state is taken when as many hold the same bits as a live peer wants
(``averaging.round.gathering.catching_up.CatchingUp.holders_min``). The rounds of a replay are
compared with the digests in their heads, and have to lead to the lineage that was asked for.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice, takewhile

from averaging.errors import BadPayload, LineageBroken
from averaging.history.attested import numbers_digest
from averaging.history.lineage import bound
from averaging.history.replay import ReplayEntry
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import Link, Signatures
from averaging.numbers.arithmetic import encoded_size
from averaging.numbers.codec import Scratch
from averaging.round.fetched_states import prefers_replay
from averaging.round.gathering.catching_up import fetch_timeout_s
from averaging.round.interface.effects import CatchUp, Rebase
from averaging.simulated.wires import MARK_BYTES, STREAM_OVERHEAD_BYTES, WiredNode
from dht.identity import PeerId

REQUEST_BYTES = 200
DIGEST_BYTES = 100
PATIENCE_S = 2.0
"""Others may take so long to answer after the state is here."""
ASKED_MAX = 8
"""Peers that are asked for the digest of their state."""

_scratch = Scratch()


class Fetching:
    """An attempt to catch up with a source, or to rebase on it. It ends once, in one way."""

    def __init__(self, node: WiredNode, effect: CatchUp | Rebase, before: FragmentState) -> None:
        self._node = node
        self._effect = effect
        self._source = effect.source
        self._before = before
        self._is_over = False
        self._state: FragmentState | None = None
        self._signatures: Signatures = ()
        self._asked: set[PeerId] = set()
        """Peers that have yet to tell the digest of their state."""
        self._digests: dict[PeerId, tuple[bytes, bytes]] = {}
        """The lineages and the digests of the states of others."""

    def __repr__(self) -> str:
        return f"Fetching({self._node.name} from {self._source})"

    def begin(self) -> None:
        node, before = self._node, self._before
        network = node.wires.network
        network.transfer(node.name, self._source, REQUEST_BYTES, self._serve, self._fail)
        size = before.theta.nbytes + before.momentum.nbytes
        wait_s = fetch_timeout_s(node.machine.policy, size)
        node.wires.heap.call_in(wait_s, node.when_awake, self._fail)

    def abandon(self) -> None:
        """Another attempt has begun."""
        self._is_over = True

    def _ends(self) -> bool:
        """End the attempt. ``False``: it is over already."""
        if self._is_over or not self._node.is_alive:
            return False
        self._is_over = True
        return True

    def _fail(self) -> None:
        if self._ends():
            self._node.fetch_failed()

    # At the source

    def _serve(self) -> None:
        """The request has come to the source."""
        node = self._node
        other = node.wires.node(self._source, node.fragment.index)
        if other is None or other.state is None:
            return
        payload_bytes = encoded_size(node.machine.policy.codecs[1], node.fragment.unit_sizes)
        replays = node.replay is not None and prefers_replay(
            self._effect, self._before, payload_bytes=payload_bytes, needs_way=False
        )
        if replays:
            since = other.served_rounds(node.name, self._before.version, self._before.lineage)
            wanted = self._effect.version
            entries = tuple(takewhile(lambda entry: entry.version <= wanted, since))
            if entries:
                self._send(entries, 0)
                return
        state = other.served(node.name)
        if state is None:
            return
        size = node.wires.bulk(state.theta.nbytes + state.momentum.nbytes)
        size += MARK_BYTES * len(state.merged)
        node.fetched_bytes += size
        signatures = other.shown(state).signatures
        self._ask_others(signatures)
        node.wires.network.transfer(
            self._source, node.name, size, lambda: self._arrived(state, signatures), lambda: None
        )

    # Rounds

    def _send(self, entries: tuple[ReplayEntry, ...], sent: int) -> None:
        """Send one entry after the other: the line may become faster or slower meanwhile."""
        if sent == len(entries):
            self._replayed(entries)
            return
        node = self._node
        size = node.wires.bulk(len(entries[sent].payload)) + STREAM_OVERHEAD_BYTES
        node.fetched_bytes += size
        node.wires.network.transfer(
            self._source, node.name, size, lambda: self._send(entries, sent + 1), lambda: None
        )

    def _replayed(self, entries: tuple[ReplayEntry, ...]) -> None:
        if not self._ends():
            return
        if self._leads_there(entries):
            self._node.replayed(self._before, entries)
        else:
            self._node.fetch_failed()

    def _leads_there(self, entries: tuple[ReplayEntry, ...]) -> bool:
        """True if these rounds are what their heads say, and lead to the lineage asked for."""
        standing, sizes = Standing.of(self._before), self._node.fragment.unit_sizes
        try:
            for entry in entries:
                standing = entry.head.after(standing)
                entry.check(sizes, _scratch)
        except (LineageBroken, BadPayload):
            return False
        return standing.lineage == self._effect.lineage

    # A state

    def _ask_others(self, signatures: Signatures) -> None:
        """Ask others at the moment at which the source is asked: they go on."""
        node = self._node
        certificates, now = node.machine.certificates, node.now()
        source_counts = certificates.counts(self._source, now)
        if node.wires.shortcuts or (source_counts and certificates.holders_min(now) < 2):
            return
        signers = [peer for peer, _ in signatures]
        others = dict.fromkeys([*signers, *sorted(node.machine.peers.view)])
        counting = (
            peer
            for peer in others
            if peer not in (self._source, node.name) and certificates.counts(peer, now)
        )
        self._asked = set(islice(counting, ASKED_MAX))
        for peer in sorted(self._asked):
            node.wires.network.transfer(
                node.name,
                peer,
                REQUEST_BYTES,
                lambda peer=peer: self._tell(peer),  # type: ignore[misc]
                lambda: None,
            )

    def _tell(self, peer: PeerId) -> None:
        """The request has come to one of the others."""
        node = self._node
        other = node.wires.node(peer, node.fragment.index)
        state = None if other is None else other.served(node.name)
        if state is None:
            return
        shown = state.lineage, state.digest()
        node.wires.network.transfer(
            peer, node.name, DIGEST_BYTES, lambda: self._take_digest(peer, shown), lambda: None
        )

    def _take_digest(self, peer: PeerId, shown: tuple[bytes, bytes]) -> None:
        self._asked.discard(peer)
        self._digests[peer] = shown
        self._consider()

    def _arrived(self, state: FragmentState, signatures: Signatures) -> None:
        if bound(state.history, state.merged.digest()) != state.lineage:
            self._fail()  # as a manifest is refused whose lineage does not bind its merged map
            return
        self._state, self._signatures = state, signatures
        self._digests[self._source] = state.lineage, state.digest()
        self._consider()
        if not self._is_over:
            heap, node = self._node.wires.heap, self._node
            heap.call_in(PATIENCE_S, node.when_awake, self._decide)

    def _consider(self) -> None:
        """Decide once all have answered, or most agree with the source."""
        agree = list(self._digests.values()).count(self._digests.get(self._source, (b"", b"")))
        if not self._asked or 2 * agree > len(self._asked) + len(self._digests):
            self._decide()

    def _decide(self) -> None:
        """Take the state if enough hold the same bits, and no more hold others of its lineage."""
        state, node = self._state, self._node
        if state is None or self._is_over or not node.is_alive:
            return
        now, certificates = node.now(), node.machine.certificates
        camps = Counter(
            digest
            for peer, (lineage, digest) in self._digests.items()
            if lineage == state.lineage and certificates.counts(peer, now)
        )
        _, mine = self._digests[self._source]
        known = certificates.known_digest(Link(*state.chain.tip))
        if known is None:
            enough = camps[mine] >= node.machine.catching_up.holders_min(now)
            is_right = enough and camps[mine] == max(camps.values())
        else:
            is_right = numbers_digest(state) == known
        if node.wires.shortcuts or is_right:
            if self._ends():
                node.fetched(state, self._signatures, self._effect)
        else:
            self._fail()
