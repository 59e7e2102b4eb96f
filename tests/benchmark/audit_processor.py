"""Measures the processor time of auditing as a share of a round's arithmetic, free of load.

``python -m tests.benchmark.audit_processor --members 16 --values 1048576``. One process takes turns
at what a member of a round computes (encode, merge its slice, step) and at what an audit of one
piece computes (signatures, digests, the merge again), and counts its own processor time, so that
other programs do not matter. The share is that of the audits which one member makes of one round on
average. Signing and checking the claims about slices is given apart: that time does not grow with
the model. Moving the bytes is left out on both sides, which makes the shares look larger.

It compares with the check of BTARD (arXiv 2106.11257) for means: each member multiplies its upload
and each merged slice with one vector of random signs, tells the others the products, and compares
those of the merged slices with the weighted sums of the uploads'. A merged slice is rounded by its
codec, so the two differ at an honest reducer, too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import blake3
import msgspec
import numpy as np

from averaging import messages
from averaging.audit import selection
from averaging.audit.claims import (
    Claim,
    Subject,
    claim,
    is_signed,
)
from averaging.audit.inquiry import Inquiry
from averaging.audit.proofs import Court, FalseMerge, Right, check
from averaging.numbers.arithmetic import (
    Moved,
    Weighted,
    cutting_of,
    numbers_of,
)
from averaging.numbers.arrays import Buffer, Float32s, Float64s, arithmetic
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Layout, TensorSpec
from averaging.numbers.outer import Step
from averaging.numbers.piece_digests import digests_of, path_to, root_of
from averaging.rules.weights import weights_of
from dht.identity import Identity, verify
from tests.averaging.history.replayed_rounds import commit_after, founded

ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Processor time in seconds, of one member."""

    round: float
    """Arithmetic of one round, on average over its members."""
    merge: float
    """The merge of a slice."""
    audit: float
    """One audit that asks for a merge that is about right."""
    exact: float
    """One audit that merges to the bit."""
    claims: float
    """Signing and checking the claims of one round."""
    products: float
    """Products of a member's upload and of all merged slices with random signs."""
    audits: float
    """Audits that a member makes of one round, on average."""
    rounding: float
    """Difference between products of an honestly merged slice, as a share of the slice's norm."""

    @property
    def audits_share(self) -> float:
        share = selection.EXACT_SHARE
        return self.audits * ((1 - share) * self.audit + share * self.exact) / self.round

    @property
    def claims_share(self) -> float:
        return self.claims / self.round


class Bench:
    """One round of which everything is known, and the work of its first member."""

    def __init__(
        self, members: int, values: int, *, codec: str, merge: str, tensors: int, reducers: int
    ) -> None:
        self.who = [Identity.from_seed(bytes([number + 1]) * 32) for number in range(members)]
        shape = (values // ROWS // reducers // tensors, ROWS)
        specs = [TensorSpec(f"t{i:04}", shape) for i in range(reducers * tensors)]
        self.layout = Layout.build(specs, 1)
        self.slices = reducers
        plain = commit_after(founded(), codec=codec)
        self.commit = msgspec.structs.replace(
            plain,
            leader=self.who[0].peer_id,
            members=tuple(
                msgspec.structs.replace(plain.members[0], peer=each.peer_id) for each in self.who
            ),
            reducers=tuple(each.peer_id for each in self.who[:reducers]),
            shares=(1,) * reducers,
            merge=merge,
        )
        self.encoded = messages.encode_commit(self.commit)
        self.round = messages.digest(self.encoded)
        self.codec, self.numbers = codec_named(codec), numbers_of(self.commit)
        self.cutting = cutting_of(self.commit, self.layout.fragments[0], self.numbers)
        self.court = Court(self.commit.topic, self.layout, verify)
        self.scratch = Scratch()
        self.weights = weights_of(self.commit, range(members))
        rng = np.random.default_rng(1)
        size = self.layout.size
        self.base: Float32s = rng.standard_normal(size).astype(np.float32)
        self.others = [
            (self.base + 0.01 * rng.standard_normal(size)).astype(np.float32)
            for _ in range(members)
        ]
        self.uploads = [self.encode(values) for values in self.others]
        self.merged = bytearray(self.cutting.merged_size)
        for index in range(reducers):
            self.merge(index)
        self.signs = np.empty(size, np.float32)
        self.said = [self.claim_of(number) for number in range(members)]
        self.proof = self.audit_of(index=1 % reducers)

    def encode(self, values: Float32s) -> bytearray:
        out = bytearray(self.cutting.data_size)
        for chunk in self.cutting.all_chunks:
            place = memoryview(out)[chunk.data]
            self.numbers.encode(chunk, Moved(self.base, values), place, self.scratch)
        return out

    def merge(self, index: int) -> None:
        """The work of a slice's reducer."""
        for chunk in self.cutting.chunks[index]:
            payloads = [memoryview(data)[chunk.data] for data in self.uploads]
            for payload in payloads:
                self.numbers.up.check(chunk, payload, self.scratch)
                self.numbers.up.squares(chunk, payload)
            out = memoryview(self.merged)[chunk.merged]
            self.numbers.merge(chunk, Weighted(payloads, self.weights), out, self.scratch)

    def step(self) -> None:
        theta, momentum = self.base.copy(), np.zeros_like(self.base)
        for chunk in self.cutting.all_chunks:
            data = memoryview(self.merged)[chunk.merged]
            self.numbers.step(chunk, data, Step(self.base, theta, momentum), self.scratch)

    def one_round_without_merges(self) -> None:
        self.encode(self.others[0])
        for index in range(self.slices):
            self.merged_leaves(index)
        self.step()

    def _merged_of(self, index: int) -> memoryview:
        return memoryview(self.merged)[self.cutting.merged_of(index)]

    def leaves(self, number: int, index: int) -> list[bytes]:
        data = memoryview(self.uploads[number])[self.cutting.data_of(index)]
        return digests_of(data, (place for _, place in self.cutting.audited(index)))

    def merged_leaves(self, index: int) -> list[bytes]:
        return digests_of(self._merged_of(index), self.cutting.merged_pieces(index))

    def claim_of(self, number: int, index: int = 0, *, merged: bool = False) -> Claim:
        subject, me = Subject(self.round, index, merged), self.who[number]
        made = root_of(self.merged_leaves(index) if merged else self.leaves(number, index))
        members = range(len(self.who)) if merged else [number]
        sources: Sequence[Claim] = self.said if merged else ()
        return claim(subject, self.commit, me.peer_id, members, made, sources=sources, sign=me.sign)

    def one_round_of_claims(self) -> None:
        """A member signs its uploads, checks those of its slice, and the other reducers'."""
        members = len(self.who)
        for index in range(self.slices):
            self.claim_of(0, index)
        for number in range(members):
            self.leaves(number, 0)
            assert is_signed(Subject(self.round, 0, False), self.commit, self.said[number], verify)
        mine = self.claim_of(0, merged=True)
        for _ in range(self.slices - 1):
            assert is_signed(Subject(self.round, 0, True), self.commit, mine, verify)

    def audit_of(self, *, index: int) -> Inquiry:
        said = [self.claim_of(number, index) for number in range(len(self.who))]
        self.said, before = said, self.said
        head = FalseMerge(
            commit=self.encoded,
            slice=index,
            merged=True,
            claim=self.claim_of(index, index, merged=True),
            sources=(),
            piece=0,
            paths=(path_to(0, self.merged_leaves(index)),),
        )
        self.said = before
        pieces = self.cutting.audited(index)
        result = self._merged_of(index)[self.cutting.merged_pieces(index)[0]]
        inquiry = Inquiry(self.commit, head, result, count=len(pieces))
        assert inquiry.take_sources(said)
        place = pieces[0][1]
        for by, _ in inquiry.wanted():
            data = memoryview(self.uploads[by])[self.cutting.data_of(index)]
            assert inquiry.take_upload(by, path_to(0, self.leaves(by, index)), data[place])
        return inquiry

    def one_audit(self, *, exact: bool) -> None:
        try:
            check(self.proof.proof(), self.court, self.scratch, exact=exact, cutting=self.cutting)
        except Right:
            return
        raise AssertionError("an honest merge is convicted")

    def one_round_of_products(self) -> None:
        self.expand_signs()
        for data in (self.uploads[0], self.merged):
            self.products_of(data, self.signs)

    def expand_signs(self) -> None:
        """The random signs that follow from the round."""
        data = blake3.blake3(self.round).digest(length=-(-self.signs.size // 8))
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=self.signs.size)
        np.multiply(bits, np.float32(-2.0), out=self.signs)
        self.signs += 1.0

    def products_of(self, data: Buffer, vector: Float32s) -> Float64s:
        """Inner products of each slice of an encoded vector with a vector."""
        found = np.zeros(self.slices)
        for index, chunks in enumerate(self.cutting.chunks):
            for chunk in chunks:
                other, encoded = vector[chunk.values], memoryview(data)[chunk.data]
                with arithmetic():
                    for part, values in self.codec.pieces(encoded, chunk.sizes, 1.0, self.scratch):
                        found[index] += np.dot(values, other[part])
        return found

    def rounding(self) -> float:
        self.expand_signs()
        lost = self.products_of(self.merged, self.signs)
        for weight, upload in zip(self.weights, self.uploads, strict=True):
            lost -= weight * self.products_of(upload, self.signs)
        merged = np.empty_like(self.signs)
        for chunk in self.cutting.all_chunks:
            encoded = memoryview(self.merged)[chunk.data]
            self.codec.decode(encoded, chunk.sizes, merged[chunk.values], self.scratch)
        return math.sqrt(float(np.mean(lost**2 / self.products_of(self.merged, merged))))

    def audits_per_round(self, rate: float) -> float:
        """Pieces of the other members' slices that one of them draws, on average."""
        pieces = sum(len(self.cutting.audited(index)) for index in range(self.slices))
        others = len(self.who) - 1
        return pieces * others / len(self.who) * selection.chance(rate, others)


def measure(
    members: int,
    values: int,
    *,
    codec: str = "int4",
    merge: str = "mean",
    tensors: int = 1,
    reducers: int | None = None,
    turns: int,
    rate: float,
) -> Times:
    """Return medians over ``turns`` of each part of the work, which take turns."""
    reducers = reducers or members
    bench = Bench(members, values, codec=codec, merge=merge, tensors=tensors, reducers=reducers)
    work: dict[str, Callable[[], None]] = {
        "round": bench.one_round_without_merges,
        "merge": lambda: bench.merge(0),
        "audit": lambda: bench.one_audit(exact=False),
        "exact": lambda: bench.one_audit(exact=True),
        "claims": bench.one_round_of_claims,
        "products": bench.one_round_of_products,
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + 1):
        for name, act in work.items():
            began = time.process_time()
            act()
            if turn:  # the first one allocates
                taken[name].append(time.process_time() - began)
    medians = {name: statistics.median(each) for name, each in taken.items()}
    medians["round"] += medians["merge"] * reducers / members
    return Times(
        **medians,
        audits=bench.audits_per_round(rate),
        rounding=bench.rounding(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--values", type=int, nargs="+", default=[1 << 20, 1 << 22, 1 << 24])
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--merge", default="mean")
    parser.add_argument("--tensors", type=int, default=1, help="equal tensors in each slice")
    parser.add_argument("--reducers", type=int, help="slices; default: one for each member")
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--rate", type=float, default=0.1)
    given = parser.parse_args()
    for values in given.values:
        found = measure(
            given.members,
            values,
            codec=given.codec,
            merge=given.merge,
            tensors=given.tensors,
            reducers=given.reducers,
            turns=given.turns,
            rate=given.rate,
        )
        print(
            f"{values} values: round {1e3 * found.round:.2f} ms, "
            f"{1e3 * found.merge:.2f} ms to merge a slice; audit {1e3 * found.audit:.2f} ms, "
            f"exact {1e3 * found.exact:.2f} ms, {found.audits:.3f} of them: "
            f"{found.audits_share:.2%}; claims {1e3 * found.claims:.2f} ms: "
            f"{found.claims_share:.2%}",
            flush=True,
        )
        if given.merge == "mean":
            print(
                f"products {1e3 * found.products:.2f} ms: {found.products / found.round:.2%}; "
                f"rounding {found.rounding:.2%} of a slice's norm",
                flush=True,
            )


if __name__ == "__main__":
    main()
