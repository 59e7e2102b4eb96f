"""Statements that convict a peer, and statements that do not."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from averaging import messages
from averaging.guard.rules.proofs import (
    DIRECTIVES_MAX,
    BadProof,
    Contradiction,
    FalseMerge,
    Guilty,
    Proof,
    Right,
    SignedCommit,
    check,
    decode_head,
    encode_head,
    size_of_data,
)
from averaging.history.claims import Claim
from averaging.messages import BadMessage, Stamp
from averaging.numbers import chunks
from averaging.numbers.chunks import root_of
from averaging.numbers.codecs import codec_names
from averaging.numbers.merge import rule_names
from dht.identity import PeerId
from tests.averaging.guard.rules.audited_rounds import (
    COURT,
    REDUCER,
    SLICE,
    WHO,
    Round,
    commit_of,
    denied_vote,
    in_pieces,
    of_a_site,
    signed_claim,
    two_votes,
)
from tests.fuzz.inputs import hostile

ACCUSED = WHO[REDUCER].peer_id
ROUNDS = {
    **{f"{codec}": commit_of(codec=codec) for codec in sorted(codec_names())},
    **{rule: commit_of(merge=rule, codec="int4") for rule in rule_names()},
    "meld": commit_of("meld"),
    "meld with rda": commit_of("meld", merge="rda"),
    "a site": of_a_site(commit_of()),
    "a site in a meld": of_a_site(commit_of("meld", codec="f32")),
    **{
        f"pieces of {name}": in_pieces(commit_of(merge=name, codec="int4")) for name in rule_names()
    },
    "pieces of a meld": in_pieces(commit_of("meld")),
    "pieces of a site": in_pieces(of_a_site(commit_of())),
}


def altered(data: bytes) -> bytes:
    """The same with one code changed, which decodes as well."""
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("name", ROUNDS)
def test_a_right_merge_convicts_nobody_and_a_false_one_its_reducer(name: str) -> None:
    round_ = Round(ROUNDS[name])
    right = round_.right()

    with pytest.raises(Right):
        check(round_.proof(round_.audit(right)), COURT)
    first = altered(right[:40]) + right[40:]  # within the audited piece
    proof = round_.proof(round_.audit(first))
    assert check(proof, COURT) == Guilty(ACCUSED, "merged slice 0 falsely")
    assert size_of_data(proof.head, COURT) == len(proof.data)


@pytest.mark.parametrize("kind", ["merge", "meld"])
def test_a_delegate_that_bundles_falsely_is_convicted_like_a_reducer(kind: str) -> None:
    round_ = Round(of_a_site(commit_of(kind)))
    bundle = round_.uploads[2]

    with pytest.raises(Right):
        check(round_.proof(round_.audit_of_bundle(2, bundle), alone=True), COURT)
    false = altered(bundle[:40]) + bundle[40:]
    proof = round_.proof(round_.audit_of_bundle(2, false), alone=True)
    assert check(proof, COURT) == Guilty(WHO[2].peer_id, "merged slice 0 falsely")


@pytest.mark.parametrize("name", [each for each in ROUNDS if "pieces" in each])
def test_a_lie_in_one_piece_is_seen_in_that_piece_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_MIN_VALUES", 1)
    round_ = Round(ROUNDS[name])
    ends = [place.stop for _, place in round_.cutting.pieces(SLICE, merged=True)]
    right = round_.right()
    assert len(ends) == 3 and ends[-1] == len(right)
    false = altered(right[: ends[1]]) + right[ends[1] :]
    for piece in range(3):
        round_.piece = piece
        with pytest.raises(Right):
            check(round_.proof(round_.audit(right)), COURT)
        proof = round_.proof(round_.audit(false))
        if piece == 1:
            assert check(proof, COURT) == Guilty(ACCUSED, "merged slice 0 falsely")
        else:
            with pytest.raises(Right):
                check(proof, COURT)


@pytest.mark.parametrize("is_right", [True, False])
def test_an_audit_checks_signatures_only_of_a_false_merge(is_right: bool) -> None:
    checked: list[bytes] = []

    def noting(peer: PeerId, signed: bytes, signature: bytes) -> bool:
        checked.append(signature)
        return COURT.verify(peer, signed, signature)

    round_ = Round(commit_of())
    right = round_.right()
    proof = round_.proof(round_.audit(right if is_right else altered(right[:40]) + right[40:]))
    court = replace(COURT, verify=noting)
    if is_right:
        with pytest.raises(Right):
            check(proof, court, merges_first=True)
    else:
        assert check(proof, court, merges_first=True).peer == ACCUSED
    assert len(checked) == (0 if is_right else 5)


def test_a_source_that_nobody_has_signed_convicts_where_its_bytes_are_not_shown() -> None:
    round_ = Round(commit_of())
    unsigned = msgspec.structs.replace(round_.claims[3], signature=bytes(64))
    round_.claims[3] = unsigned
    proof = round_.proof(round_.audit(round_.right()))
    with pytest.raises(Right):
        check(proof, COURT, merges_first=True)
    assert "has not signed" in check(proof, COURT).what


def test_a_forged_source_convicts_before_any_byte_is_fetched() -> None:
    round_ = Round(commit_of())
    sources = [round_.claims[number] for number in range(4)]
    forged = [*sources[:3], msgspec.structs.replace(sources[3], made=bytes(32))]

    proof = round_.audit(round_.right(), sources=forged).proof()

    assert check(proof, COURT) == Guilty(ACCUSED, "claims an upload that its sender has not signed")
    assert size_of_data(proof.head, COURT) == 0


def test_sources_that_are_not_those_of_the_contributors_convict() -> None:
    round_ = Round(commit_of())
    sources = [round_.claims[number] for number in range(4)]
    result = round_.right()

    for fewer, members in ((sources[:3], range(4)), (sources, range(3)), (sources[::-1], range(4))):
        proof = round_.audit(result, sources=fewer, members=list(members)).proof()
        assert check(proof, COURT).peer == ACCUSED
    proof = round_.audit(result, members=[0, 1, 2, 3, 9]).proof()
    assert check(proof, COURT).what == "claims contributors that the round does not have"


@pytest.mark.parametrize("codec", ["int4", "f32"])
def test_an_upload_that_nobody_can_decode_convicts_the_peer_that_merges_it(codec: str) -> None:
    round_ = Round(commit_of(codec=codec))
    bad = np.float32(np.nan).tobytes() + round_.uploads[3][4:]
    round_.uploads[3] = bad
    made = root_of(round_.leaves(bad))
    round_.claims[3] = round_.signed(3, [3], made, merged=False)

    what = check(round_.proof(round_.audit(bytes(len(bad)))), COURT).what
    assert what.startswith("merged an upload that nobody can decode")


def test_only_the_run_s_own_rounds_are_judged() -> None:
    round_ = Round(commit_of())
    proof = round_.proof(round_.audit(altered(round_.right())))
    other = msgspec.structs.replace(commit_of(), topic=bytes([1]) * 16)
    elsewhere = Round(other)

    with pytest.raises(BadProof, match="another run"):
        check(elsewhere.proof(elsewhere.audit(altered(elsewhere.right()))), COURT)
    unsigned = msgspec.structs.replace(proof.head.claim, made=bytes(32))  # type: ignore[union-attr]
    with pytest.raises(BadProof, match="has not signed"):
        check(Proof(msgspec.structs.replace(proof.head, claim=unsigned), proof.data), COURT)


def test_a_lie_is_proved_whether_or_not_the_run_was_taken_back_before_it_or_since() -> None:
    """After a rollback no audit proved anything, and proofs from before it were refused by peers
    that came later, at the cost of those that showed them."""

    def topic_after(rollback: int) -> bytes:
        return rollback.to_bytes(16, "big")

    court = replace(COURT, topic_after=topic_after)
    plain = commit_of()
    for topic, stamp, ours in (
        (COURT.topic, None, True),
        (COURT.topic, 9, True),
        (topic_after(7), 7, True),
        (topic_after(7), 9, True),
        (topic_after(7), 6, False),
        (topic_after(7), 7 + DIRECTIVES_MAX, False),
        (topic_after(7), None, False),
    ):
        directive = None if stamp is None else Stamp(stamp, bytes(16))
        round_ = Round(msgspec.structs.replace(plain, topic=topic, directive=directive))
        proof = round_.proof(round_.audit(altered(round_.right())))
        if ours:
            assert check(proof, court).peer == ACCUSED
        else:
            with pytest.raises(BadProof, match="another run"):
                check(proof, court)


def honest_evidence() -> list[Proof]:
    made = []
    for name in ("int8", "rda", "meld", "a site"):
        round_ = Round(ROUNDS[name])
        made.append(round_.proof(round_.audit(round_.right())))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_no_change_of_honest_evidence_convicts_anybody(seed: int) -> None:
    rng = random.Random(seed)
    for proof in honest_evidence():
        encoded = encode_head(proof.head)
        for _ in range(60):
            data = bytearray(proof.data)
            try:
                head = decode_head(hostile(encoded, rng)) if rng.random() < 0.7 else proof.head
            except BadMessage:
                continue
            if rng.random() < 0.5:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            with pytest.raises(BadProof):
                print(seed, check(Proof(head, data), COURT))  # noqa: T201


# Two statements where an honest peer makes one


@pytest.mark.parametrize("last", [None, (0, (0, 1)), (1, (0, 2)), (1, ())])
def test_a_vote_that_its_author_denies_to_a_later_coordinator_convicts_it(
    last: tuple[int, tuple[int, ...]] | None,
) -> None:
    guilty = check(Proof(denied_vote(last)), COURT)
    assert (guilty.peer, guilty.what) == (WHO[1].peer_id, "denied its vote in ballot 1")
    with pytest.raises(BadProof):
        check(Proof(denied_vote(last, forged=True)), COURT)


@pytest.mark.parametrize(
    ("last", "voted_in"),
    [((1, (0, 1)), 1), ((2, (0, 2)), 1), ((2, ()), 1), (None, 4), (None, 5), ((1, (0, 1)), 5)],
)
def test_a_promise_that_tells_of_its_author_s_last_vote_convicts_nobody(
    last: tuple[int, tuple[int, ...]] | None, voted_in: int
) -> None:
    with pytest.raises(BadProof, match="agree"):
        check(Proof(denied_vote(last, voted_in=voted_in)), COURT)


def test_two_votes_in_one_ballot_convict_and_a_vote_repeated_or_forged_does_not() -> None:
    assert check(Proof(two_votes((0, 2))), COURT).peer == WHO[1].peer_id
    assert check(Proof(two_votes(())), COURT).what == "signed two seals in ballot 0"
    for head in (two_votes((0, 1)), two_votes((0, 2), forged=True)):
        with pytest.raises(BadProof):
            check(Proof(head), COURT)


def test_two_commits_under_one_number_convict_and_under_two_do_not() -> None:
    first = commit_of()
    other = msgspec.structs.replace(first, round_s=first.round_s + 1.0)

    def signed(commit: messages.Commit, by: int = 0) -> SignedCommit:
        encoded = messages.encode_commit(commit)
        return SignedCommit(commit.leader, WHO[by].sign(encoded), encoded)

    def verdict(second: SignedCommit) -> Guilty:
        return check(Proof(Contradiction(signed(first), second)), COURT)

    assert verdict(signed(other)) == Guilty(ACCUSED, "signed two commits for one attempt")
    later = msgspec.structs.replace(other, nonce=other.nonce + 1)
    restarted = msgspec.structs.replace(other, leader_incarnation=2)
    for harmless in (signed(first), signed(other, by=1), signed(later), signed(restarted)):
        with pytest.raises(BadProof):
            verdict(harmless)


def test_two_uploads_of_one_slice_convict_their_sender() -> None:
    round_ = Round(commit_of())
    first = round_.claims[2]

    def verdict(second: Claim) -> Guilty:
        head = Contradiction(signed_claim(round_, first), signed_claim(round_, second))
        return check(Proof(head), COURT)

    other = round_.signed(2, [2], bytes(32), merged=False)
    assert verdict(other) == Guilty(WHO[2].peer_id, "signed two uploads of slice 0")
    bundle = round_.signed(2, [2, 3], bytes(32), merged=False)
    for harmless in (first, round_.claims[1], bundle):
        with pytest.raises(BadProof):
            verdict(harmless)


# Bytes


def test_a_proof_of_another_length_than_the_layout_says_proves_nothing() -> None:
    round_ = Round(commit_of())
    proof = round_.proof(round_.audit(altered(round_.right()[:40]) + round_.right()[40:]))
    assert isinstance(proof.head, FalseMerge)

    for data in (b"", bytes(proof.data)[:-1], bytes(proof.data) + b"\0"):
        with pytest.raises(BadProof, match="the layout says"):
            check(Proof(proof.head, data), COURT)
