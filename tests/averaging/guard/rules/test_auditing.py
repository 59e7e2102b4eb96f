"""Drawing pieces, striking peers, and noticing contradictions."""

from __future__ import annotations

import random

import msgspec
import pytest

from averaging import messages as said
from averaging.guard.rules import selection
from averaging.guard.rules.witness import BALLOTS_MAX, ROUNDS_KEPT_MAX, Witness
from averaging.history.claims import Claim
from dht.identity import PeerId
from tests.averaging.guard.rules.audited_rounds import COURT, WHO, Round, commit_of

ANNA = PeerId("anna")


@pytest.mark.parametrize("auditors", [1, 3, 15, 63])
def test_audits_cost_half_the_rate_of_a_round_s_bytes(auditors: int) -> None:
    """An auditor fetches the uploads of all but itself, and uploads are half of a round's bytes."""
    members, rate = auditors + 1, 0.1
    of_one_audit = (members - 1) / (2 * (members - 1))
    expected = auditors * selection.chance(rate, auditors) * of_one_audit
    assert expected == pytest.approx(0.05)


@pytest.mark.parametrize("auditors", [1, 3, 15])
def test_a_liar_in_one_piece_of_each_round_is_found_after_about_ten(auditors: int) -> None:
    rng, liars = random.Random(auditors), 400
    chance = selection.chance(0.1, auditors)
    rounds = [0] * liars
    for liar in range(liars):
        found = False
        while not found:
            rounds[liar] += 1
            tickets = [rng.randbytes(64) for _ in range(auditors)]
            found = any(selection.drawn(each, {0: 1}, chance=chance) for each in tickets)
    assert 9.0 < sum(rounds) / liars < 11.0
    assert 23 < sorted(rounds)[liars * 95 // 100] < 36, "one in twenty lies longer"


@pytest.mark.parametrize(
    ("rate", "pieces", "share", "mean"),
    [
        (0.1, 1, 0.25, 95.0),
        (0.5, 1, 0.74, 15.0),
        (0.1, 2, 0.44, 45.0),
        (0.1, 3, 0.56, 28.0),
        (0.1, 4, 0.67, 20.0),
        (0.1, 6, 0.78, 12.0),
        (0.1, 16, 0.96, 2.5),
    ],
)
def test_a_reducer_in_one_round_of_ten_is_found_within_twenty_rounds_by_its_number_of_pieces(
    rate: float, pieces: int, share: float, mean: float
) -> None:
    """The reducer falsifies all of each slice that it merges. The bytes are those of the rate,
    however many pieces there are; a reducer that falsifies one of them is found no sooner, and does
    that much less harm. ``share``: of the liars. ``mean``: number of rounds from the first lie to
    the ban.
    """
    rng, liars, auditors = random.Random(f"{rate} {pieces}"), 800, 9
    chance = selection.chance(rate, auditors)
    rounds = [0] * liars
    for liar in range(liars):
        lies = True
        while True:
            tickets = [rng.randbytes(64) for _ in range(auditors * lies)]
            if any(selection.drawn(each, {0: pieces}, chance=chance) for each in tickets):
                break
            rounds[liar] += 1
            lies = rng.random() < 0.1
    assert sum(each <= 20 for each in rounds) / liars == pytest.approx(share, abs=0.05)
    assert sum(rounds) / liars == pytest.approx(mean, rel=0.2)


@pytest.mark.parametrize("auditors", [1, 3, 15])
def test_a_piece_is_drawn_by_somebody_as_often_as_the_rate_says(auditors: int) -> None:
    rng, rate, found, tries = random.Random(auditors), 0.1, 0, 4000
    chance = selection.chance(rate, auditors)
    for _ in range(tries):
        tickets = [rng.randbytes(64) for _ in range(auditors)]
        found += any(selection.drawn(each, {0: 1}, chance=chance) for each in tickets)
    assert 0.8 * rate < found / tries < 1.2 * rate


def test_a_draw_follows_from_the_ticket_and_names_pieces_that_exist() -> None:
    drawn = selection.drawn(bytes(64), {0: 3, 2: 1}, chance=1.0)

    assert drawn == [(0, (0, 2)), (1, (0,)), (2, (0,))], "in all slices that have such a piece"
    assert selection.drawn(bytes(64), {0: 3, 2: 1}, chance=0.0) == []
    half = selection.drawn(b"a", {0: 100}, chance=0.5)
    assert half == selection.drawn(b"a", {0: 100}, chance=0.5)
    assert half != selection.drawn(b"b", {0: 100}, chance=0.5)


def test_a_witness_proves_two_votes_of_a_voter_and_two_proposals_of_a_coordinator() -> None:
    round_, sign = Round(commit_of()), WHO[1].sign
    witness = Witness(COURT)
    assert witness.sees_commit(round_.encoded, WHO[0].sign(round_.encoded)) == []

    def sealed(seal: tuple[int, ...]) -> said.Sealed:
        vote = sign(said.vote(round_.name, 0, seal))
        return said.Sealed(0, round_.name, 0, seal, ((1, vote),))

    def proposed(seal: tuple[int, ...]) -> said.Propose:
        return said.Propose(0, round_.name, 0, seal, sign(said.vote(round_.name, 0, seal)))

    assert witness.sees(ANNA, sealed((0, 1))) == []
    assert witness.sees(ANNA, sealed((0, 1))) == []
    assert len(witness.sees(ANNA, sealed((0, 1, 2)))) == 1
    assert len(witness.sees(WHO[1].peer_id, proposed((0, 2)))) == 1
    assert Witness(COURT).sees(ANNA, sealed((0, 1))) == [], "of unknown rounds nothing is known"


def test_a_forged_statement_neither_proves_anything_nor_hides_what_comes_later() -> None:
    witness, round_, sign = Witness(COURT), Round(commit_of()), WHO[1].sign
    witness.sees_commit(round_.encoded, WHO[0].sign(round_.encoded))
    name = round_.name

    def proposed(seal: tuple[int, ...], signature: bytes = b"") -> said.Propose:
        signature = signature or sign(said.vote(name, 0, seal))
        return said.Propose(0, name, 0, seal, signature)

    me = WHO[1].peer_id
    assert witness.sees(me, proposed((0, 1), bytes(64))) == []
    assert witness.sees(me, proposed((0, 2))) == []
    assert witness.sees(me, proposed((0, 3), bytes(64))) == []
    assert len(witness.sees(me, proposed((0, 3)))) == 1


def test_a_claim_that_a_reducer_made_up_gives_way_to_those_of_its_author() -> None:
    """A source is seen as the reducer lists it, before anybody looks at its signature."""
    round_ = Round(commit_of())
    witness = Witness(COURT)
    witness.sees_commit(round_.encoded, WHO[0].sign(round_.encoded))
    true = round_.claims[2]
    made_up = msgspec.structs.replace(true, made=bytes(32))

    def sees(claim: Claim) -> int:
        return len(witness.sees_claim(round_.encoded, 0, claim, merged=False))

    assert [sees(claim) for claim in (made_up, true, made_up, true)] == [0, 0, 0, 0]
    assert sees(round_.signed(2, [2], bytes(32), merged=False)) == 1


def promise_in(
    round_: Round, ballot: int, last: int | None, seal: tuple[int, ...] = ()
) -> said.Promise:
    signature = WHO[1].sign(said.promise_text(round_.name, ballot, last, seal))
    return said.Promise(0, round_.name, ballot, last, seal, signature)


def sealed_with(signature: bytes, round_: Round) -> said.Sealed:
    return said.Sealed(0, round_.name, 0, (0, 1), ((1, signature),))


@pytest.mark.parametrize("vote_first", [False, True])
def test_a_witness_proves_that_a_voter_has_denied_its_vote(vote_first: bool) -> None:
    round_, voter = Round(commit_of()), WHO[1]
    witness = Witness(COURT)
    witness.sees_commit(round_.encoded, WHO[0].sign(round_.encoded))
    true = sealed_with(voter.sign(said.vote(round_.name, 0, (0, 1))), round_)
    denial, confession = promise_in(round_, 2, None), promise_in(round_, 3, 0, (0, 1))
    unsigned = msgspec.structs.replace(denial, signature=bytes(64))
    first, then = (true, denial) if vote_first else (denial, true)

    assert witness.sees(voter.peer_id, sealed_with(bytes(64), round_)) == [], "whoever forged it"
    assert witness.sees(voter.peer_id, unsigned) == []
    assert witness.sees(voter.peer_id, first) == []
    assert witness.sees(voter.peer_id, confession) == []
    assert len(witness.sees(voter.peer_id, then)) == 1


@pytest.mark.parametrize("is_over", [False, True])
def test_a_witness_keeps_a_promise_until_its_round_is_over(is_over: bool) -> None:
    round_, voter = Round(commit_of()), WHO[1]
    witness = Witness(COURT)
    witness.sees_commit(round_.encoded, WHO[0].sign(round_.encoded))
    witness.sees(voter.peer_id, promise_in(round_, 2, None))

    witness.round_is_over(round_.name if is_over else bytes(32))

    vote = voter.sign(said.vote(round_.name, 0, (0, 1)))
    assert len(witness.sees(voter.peer_id, sealed_with(vote, round_))) == (not is_over)


def test_a_witness_proves_two_commits_of_one_attempt() -> None:
    witness, first = Witness(COURT), commit_of()
    other = msgspec.structs.replace(first, upload_s=first.upload_s + 1.0)
    later = msgspec.structs.replace(first, nonce=first.nonce + 1)

    def sees(commit: said.Commit) -> int:
        encoded = said.encode_commit(commit)
        return len(witness.sees_commit(encoded, WHO[0].sign(encoded)))

    assert [sees(first), sees(first), sees(later), sees(other)] == [0, 0, 0, 1]


def test_a_witness_forgets_rounds_of_a_leader_of_many_first() -> None:
    witness, plain = Witness(COURT), commit_of()
    first = said.encode_commit(plain)
    assert witness.sees_commit(first, WHO[0].sign(first)) == []
    for nonce in range(2 * ROUNDS_KEPT_MAX):
        encoded = said.encode_commit(
            msgspec.structs.replace(plain, leader=WHO[2].peer_id, nonce=nonce)
        )
        assert witness.sees_commit(encoded, WHO[2].sign(encoded)) == []
    second = said.encode_commit(msgspec.structs.replace(plain, upload_s=plain.upload_s + 1.0))

    assert len(witness.sees_commit(second, WHO[0].sign(second))) == 1


def test_a_witness_keeps_no_commit_that_its_leader_has_not_signed_nor_votes_of_its_round() -> None:
    witness, commit = Witness(COURT), commit_of()
    encoded = said.encode_commit(commit)
    witness.sees_commit(encoded, bytes(64))
    round_ = Round(commit)
    for seal in ((0, 1), (0, 2)):
        vote = WHO[1].sign(said.vote(round_.name, 0, seal))
        assert witness.sees(ANNA, said.Sealed(0, round_.name, 0, seal, ((1, vote),))) == []
    assert not witness._rounds


def test_forged_votes_of_a_member_leave_a_place_for_its_own() -> None:
    witness, round_, voter = Witness(COURT), Round(commit_of()), WHO[1]
    witness.sees_commit(round_.encoded, WHO[0].sign(round_.encoded))

    def sealed(ballot: int, seal: tuple[int, ...], signature: bytes = bytes(64)) -> said.Sealed:
        return said.Sealed(0, round_.name, ballot, seal, ((1, signature),))

    true = [voter.sign(said.vote(round_.name, 900, seal)) for seal in ((0, 1), (0, 2))]
    for ballot in range(10 * BALLOTS_MAX):
        assert witness.sees(ANNA, sealed(ballot, (0, 1))) == []
    assert witness.sees(ANNA, sealed(900, (0, 1), true[0])) == []
    for ballot in range(1000, 1000 + 10 * BALLOTS_MAX):
        assert witness.sees(ANNA, sealed(ballot, (0, 1))) == []
    assert len(witness.sees(ANNA, sealed(900, (0, 2), true[1]))) == 1
