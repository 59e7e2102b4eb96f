"""Heads that are not certified are not followed, whoever shows them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from averaging import messages as said
from averaging.history.chain import Chain
from averaging.history.merged_map import MergedMap
from averaging.history.standing import IAmBehind, Standing, relate
from averaging.messages import Head, Link, Signatures
from averaging.round.gathering.catching_up import ATTEMPTS_IN_VAIN
from averaging.round.interface.effects import CatchUp, Rebase
from averaging.round.interface.inputs import CaughtUp, Received
from averaging.round.machine import FragmentRounds
from averaging.round.opinions.certificates import HOLDERS_MIN, LINKS_KEPT, link_of
from averaging.rules.peer_view import ESTABLISHED_AFTER_S, PeerView
from averaging.rules.quorum import QuorumPolicy, Required
from dht.identity import PeerId
from tests.averaging.round.machines import (
    ANNA,
    BORIS,
    ME,
    POLICY,
    TOPIC,
    behind,
    certified,
    fails,
    lineage,
    machine,
    of,
    sent,
    sign,
    standing,
)

CLARA, DORA, EVE = PeerId("clara"), PeerId("dora"), PeerId("eve")
FIVE = (ANNA, BORIS, CLARA, DORA)
"""The others in a run of five. A round has three members at least, and a majority of them is two;
so the signatures of two make a certificate."""
FOUR = (ANNA, BORIS, CLARA)
AHEAD = standing("start", "one")


def moves(rounds: FragmentRounds, sender: PeerId, head: Head, now: float = 1.0) -> bool:
    """True if a peer that is shown this head goes there."""
    effects = rounds.handle(Received(sender, said.Compare(0, head)), now)
    return bool(of(effects, CatchUp))


def under(link: Link, *signers: PeerId, topic: bytes = TOPIC, fragment: int = 0) -> Signatures:
    claim = said.link_claim(topic, fragment, link)
    return tuple((peer, sign(peer, claim)) for peer in signers)


def with_signatures(head: Head, signatures: Signatures) -> Head:
    return msgspec.structs.replace(head, signatures=signatures)


def test_a_head_that_two_of_five_have_signed_is_followed() -> None:
    assert moves(machine(others=FIVE), ANNA, certified(AHEAD))


@pytest.mark.parametrize("required", [None, 0.75, "all"])
def test_a_run_whose_rounds_wait_for_all_takes_what_half_of_it_made(required: Required) -> None:
    """A partition hides the others: two of four had a round. When they needed the signatures of
    three, the others stayed behind them for four minutes (live storm 65)."""
    policy = replace(POLICY, quorum=QuorumPolicy(required=required))

    assert not moves(machine(others=FOUR, policy=policy), ANNA, certified(AHEAD, (ANNA,)))
    assert moves(machine(others=FOUR, policy=policy), ANNA, certified(AHEAD, (ANNA, BORIS)))


TIP = link_of(AHEAD.head())


@pytest.mark.parametrize(
    "signatures",
    [
        (),
        under(TIP, ANNA),
        under(TIP, ANNA, ANNA, ANNA),
        under(TIP, ANNA, EVE, PeerId("mallory"), PeerId("sybil")),
        ((ANNA, sign(ANNA, b"")), (BORIS, sign(BORIS, b""))),
        ((ANNA, under(TIP, BORIS)[0][1]), (BORIS, under(TIP, ANNA)[0][1])),
        under(TIP, ANNA, BORIS, topic=bytes(16)),
        under(TIP, ANNA, BORIS, fragment=1),
        under(msgspec.structs.replace(TIP, version=0), ANNA, BORIS),
        under(msgspec.structs.replace(TIP, tokens=TIP.tokens - 1), ANNA, BORIS),
        under(msgspec.structs.replace(TIP, lineage=lineage("start")), ANNA, BORIS),
        under(TIP, ANNA, ME),
    ],
    ids=[
        "nobody",
        "one peer's word",
        "the same signer again",
        "a majority of strangers",
        "not signatures",
        "of each other",
        "another run",
        "another fragment",
        "another version",
        "other tokens",
        "another lineage",
        "the reader's own name",
    ],
)
def test_a_head_without_a_certificate_is_not_followed(signatures: Signatures) -> None:
    rounds = machine(others=FIVE)

    assert not moves(rounds, ANNA, with_signatures(AHEAD.head(), signatures))

    assert rounds.counters["uncertified_head"] == 1
    assert rounds.standing == standing("start")


def test_a_link_that_was_signed_certifies_no_other_that_names_it_as_an_ancestor() -> None:
    forged = standing("start", "one", "forged")
    stolen = under(TIP, *FIVE)

    assert not moves(machine(others=FIVE), ANNA, with_signatures(forged.head(), stolen))


@pytest.mark.parametrize("is_light", [False, True])
def test_an_old_certificate_with_another_chain_moves_nobody(is_light: bool) -> None:
    """The certificate is that of a version long past, and the chain shown beside it is made up."""
    mine = standing("start", "one", "two", tokens=1 if is_light else 100)
    made_up = Head(
        1,
        AHEAD.lineage,
        (TIP, Link(2, mine.lineage, 200), Link(0, lineage("elsewhere"), 0)),
    )

    rounds = machine(mine, FIVE)

    assert not moves(rounds, ANNA, with_signatures(made_up, under(TIP, *FIVE)))


def test_a_peer_is_behind_nobody_of_a_lower_version() -> None:
    mine = standing("start", "one", "two")
    claims = Head(1, lineage("x"), (Link(1, lineage("x"), 1), Link(2, mine.lineage, 200)))

    assert not isinstance(relate(mine.head(), mine.chain, claims), IAmBehind)


def test_signers_that_are_not_in_sight_any_more_do_not_count() -> None:
    rounds = machine(others=(ANNA, CLARA, DORA))

    assert not moves(rounds, ANNA, certified(AHEAD, (ANNA, BORIS)))
    assert moves(rounds, ANNA, certified(AHEAD, (ANNA, CLARA)), 20.0)


def test_newcomers_do_not_count_beside_established_peers() -> None:
    rounds = machine(others=FIVE)
    assert isinstance(rounds.peers.view, dict)
    sybils = tuple(PeerId(f"sybil {number}") for number in range(8))
    for peer in sybils:
        rounds.peers.view[peer] = PeerView(first_seen=0.0, heard_at=0.0)

    assert not moves(rounds, sybils[0], certified(AHEAD, (*sybils, ANNA)))


def test_where_nobody_is_established_those_in_sight_must_agree() -> None:
    """A swarm of which every member is new to this peer."""
    rounds = machine(others=FIVE)
    assert isinstance(rounds.peers.view, dict)
    for peer, seen in rounds.peers.view.items():
        rounds.peers.view[peer] = msgspec.structs.replace(
            seen, first_seen=1.0 - ESTABLISHED_AFTER_S / 2
        )

    assert not moves(rounds, ANNA, certified(AHEAD, (ANNA, EVE)))
    assert moves(rounds, ANNA, certified(AHEAD, (ANNA, BORIS)))


def test_of_two_peers_one_takes_the_others_word() -> None:
    assert moves(machine(others=(ANNA,)), ANNA, certified(AHEAD, (ANNA,)))


def test_a_keeper_certifies_nothing_where_others_train() -> None:
    rounds = machine(others=(ANNA,))
    assert isinstance(rounds.peers.view, dict)
    rounds.peers.view[BORIS] = PeerView(first_seen=-1e3, heard_at=0.0, trains=False)
    assert not moves(rounds, BORIS, certified(AHEAD, (BORIS,)))

    rounds = machine(others=())
    rounds.peers.view = {BORIS: PeerView(first_seen=-1e3, heard_at=0.0, trains=False)}
    assert moves(rounds, BORIS, certified(AHEAD, (BORIS,)))


def test_signatures_of_one_link_add_up_and_others_are_asked_for_theirs() -> None:
    rounds = machine(others=FIVE)

    effects = rounds.handle(Received(ANNA, behind_by(ANNA)), 1.0)
    asked = {peer for peer in FIVE if sent(effects, peer)}
    assert asked == {BORIS, CLARA, DORA} and not of(effects, CatchUp)
    assert not sent(rounds.handle(Received(ANNA, behind_by(ANNA)), 1.5)), "not again at once"

    (effect,) = of(rounds.handle(Received(CLARA, behind_by(CLARA)), 2.0), CatchUp)
    assert isinstance(effect, CatchUp) and effect.source == CLARA


def behind_by(sender: PeerId) -> said.Behind:
    return msgspec.structs.replace(behind(AHEAD), head=certified(AHEAD, (sender,)))


def test_a_peer_signs_what_it_shows_if_it_stands_there() -> None:
    rounds = machine(AHEAD, FIVE)
    rounds.handle(Received(BORIS, said.Finished(0, bytes(32), certified(AHEAD, (BORIS,)))), 1.0)

    (answer,) = sent(rounds.handle(Received(ANNA, said.Compare(0, start_head())), 1.0), ANNA)

    assert isinstance(answer, said.Behind)
    assert answer.head.signatures == under(TIP, ME, BORIS)
    assert answer.found == lineage("start")


def start_head() -> Head:
    return certified(standing("start"), (ANNA,))


def test_a_peer_shows_all_signatures_under_its_standing_as_others_count_other_peers() -> None:
    """A peer that had been away counted two of four, of which one could be reached. Nobody showed
    it the signature of the other, as two others were enough: it stayed behind (probation, 400089).
    """
    rounds = machine(AHEAD, FIVE)
    for signer in FOUR:
        rounds.handle(Received(signer, said.Compare(0, certified(AHEAD, (signer,)))), 1.0)

    head = standing("start").head()
    (answer,) = sent(rounds.handle(Received(DORA, said.Compare(0, head)), 1.0), DORA)

    assert isinstance(answer, said.Behind)
    assert {peer for peer, _ in answer.head.signatures} == {ME, *FOUR}


def test_an_answer_to_where_this_peer_stood_before_is_compared_anew() -> None:
    """The answer was sent when the peer stood elsewhere: that lineage was found, not this one."""
    heavy = standing("start", *(f"h{number}" for number in range(8)))
    rounds = machine(standing("start", "mine"), FIVE)
    stale = said.Behind(0, certified(heavy), lineage("start"))

    effects = rounds.handle(Received(ANNA, stale), 1.0)

    assert of(effects, Rebase)


def test_a_peer_that_gets_nowhere_takes_the_word_of_one_in_the_end() -> None:
    """The others have lost what they finished with it; nobody could ever sign it but that one."""
    rounds = machine(others=FIVE)
    head = certified(AHEAD, (ANNA,))
    late = 1.0 + POLICY.doubt_s
    assert isinstance(rounds.peers.view, dict)
    for peer, seen in rounds.peers.view.items():
        rounds.peers.view[peer] = msgspec.structs.replace(seen, heard_at=late)

    assert not moves(rounds, ANNA, head, 1.0)
    assert not moves(rounds, ANNA, head, late), "its own rounds may only be long"
    for _ in range(ATTEMPTS_IN_VAIN):
        fails(rounds, late)
    assert not moves(rounds, EVE, with_signatures(head, under(TIP, EVE)), late)
    assert not moves(rounds, ANNA, head, late - 1.0)
    assert moves(rounds, ANNA, head, late)


def test_a_peer_that_cannot_fetch_a_certified_state_takes_the_bits_of_one_in_the_end() -> None:
    """Boris has signed it and come back with an older one: only Anna still holds its bits. Three
    peers stood on three versions for ever, each of them certified (storm 62)."""
    rounds = machine(others=FIVE)
    head = certified(AHEAD, (ANNA, BORIS))
    late = 2.0 + POLICY.doubt_s
    assert isinstance(rounds.peers.view, dict)
    for peer, seen in rounds.peers.view.items():
        rounds.peers.view[peer] = msgspec.structs.replace(seen, heard_at=late)

    assert moves(rounds, ANNA, head)
    rounds.handle(CaughtUp(None, reason="1 of 2 peers that must hold the same bits"), 2.0)
    for _ in range(ATTEMPTS_IN_VAIN - 1):  # the fetch was one
        assert rounds.catching_up.holders_min(late) == HOLDERS_MIN
        fails(rounds, late)

    assert moves(rounds, ANNA, head, late)
    assert rounds.catching_up.holders_min(late - 0.1) == HOLDERS_MIN
    assert rounds.catching_up.holders_min(late) == 1


@pytest.mark.parametrize(
    ("behind", "in_vain", "alternate", "goes_back"),
    [
        ((BORIS, CLARA), ATTEMPTS_IN_VAIN, False, True),
        ((BORIS,), ATTEMPTS_IN_VAIN, False, False),
        ((BORIS, CLARA), ATTEMPTS_IN_VAIN - 1, False, False),
        ((BORIS, CLARA), ATTEMPTS_IN_VAIN, True, False),
    ],
)
def test_a_peer_that_is_ahead_goes_back_where_most_others_have_stayed_for_long(
    behind: tuple[PeerId, ...], in_vain: int, alternate: bool, goes_back: bool
) -> None:
    """Anna has signed the version and serves other bits: nobody can fetch it. ``alternate``: a peer
    that was behind has come meanwhile."""
    rounds = machine(AHEAD, others=FOUR)
    late = 1.0 + POLICY.doubt_s
    assert isinstance(rounds.peers.view, dict)
    for peer, seen in rounds.peers.view.items():
        rounds.peers.view[peer] = msgspec.structs.replace(seen, heard_at=late)
    assert not moves(rounds, ANNA, certified(AHEAD, (ANNA,)))
    old = certified(standing("start"), (BORIS, CLARA))
    for _ in range(in_vain):
        fails(rounds, 1.0)
    assert not any(moves(rounds, peer, old, at) for at in (1.0, late - 1.0) for peer in behind)
    if alternate:
        moves(rounds, BORIS, certified(AHEAD, (ANNA, BORIS)), late - 0.5)
    assert any(moves(rounds, peer, old, late + 0.1) for peer in behind) == goes_back


@pytest.mark.parametrize("has_left", [True, False])
def test_a_peer_that_has_mixed_alone_goes_back_to_its_own_side(has_left: bool) -> None:
    """Anna has mixed with this peer and serves other bits. Boris and Clara stay on the two sides of
    the mix, and nobody else has signed for the version of Boris, or has its bits."""
    rounds = machine(standing("start", "of Clara", "mine", "mixed"), others=FOUR)
    mine, theirs = standing("start", "of Clara", "mine"), standing("start", "of Clara")
    late = 1.0 + POLICY.doubt_s
    assert isinstance(rounds.peers.view, dict)
    for peer, seen in rounds.peers.view.items():
        rounds.peers.view[peer] = msgspec.structs.replace(seen, heard_at=late)
    if has_left:
        rounds.certificates.left(link_of(mine.head()), b"digest of the own numbers")
    for _ in range(ATTEMPTS_IN_VAIN):
        fails(rounds, 1.0)
    for at in (1.0, late):
        assert not moves(rounds, CLARA, certified(theirs, (ANNA, CLARA)), at)
        assert moves(rounds, BORIS, certified(mine, (BORIS,)), at) == (has_left and at == late)


LIGHTER, HEAVIER = standing("start", *"abcdef"), standing("start", *"ghijklm")
"""Sides of a fork of comparable weight."""


@pytest.mark.parametrize("group_size", [16, 4])
@pytest.mark.parametrize(
    ("mine", "theirs", "gives_way"), [(LIGHTER, HEAVIER, True), (HEAVIER, LIGHTER, False)]
)
def test_the_lighter_side_of_a_fork_gives_way_if_no_round_mixes_the_two(
    mine: Standing, theirs: Standing, gives_way: bool, group_size: int
) -> None:
    """Both may go on for ever where the leaders of one side leave the other out: among several
    groups as well, where two of eight that nobody counted went on for 200 s (probation, 400040)."""
    rounds = machine(mine, FIVE, replace(POLICY, group_size=group_size))
    head = certified(theirs)
    late = 1.0 + POLICY.doubt_s
    assert isinstance(rounds.peers.view, dict)
    for peer, seen in rounds.peers.view.items():
        rounds.peers.view[peer] = msgspec.structs.replace(seen, heard_at=late)

    assert not moves(rounds, ANNA, head, 1.0)
    assert not moves(rounds, ANNA, head, late), "rounds may take longer than that"
    for _ in range(ATTEMPTS_IN_VAIN):
        fails(rounds, late)
    assert moves(rounds, ANNA, head, late) == gives_way


def test_the_runs_tokens_end_it_only_with_a_certificate() -> None:
    policy = replace(POLICY, group_size=4, tokens_end=100)
    others = (*FIVE, EVE)

    def closes(head: Head) -> bool:
        rounds = machine(None, others, policy)
        rounds.handle(Received(ANNA, said.Call(0, head, 1.0)), 1.0)
        return rounds.ending.closed_ranks

    assert not closes(AHEAD.head())
    assert not closes(certified(AHEAD, (ANNA,)))
    assert closes(certified(AHEAD, (ANNA, BORIS)))


def test_signatures_are_kept_of_the_newest_links_only() -> None:
    rounds = machine(others=FIVE)
    for number in range(3 * LINKS_KEPT):
        link = Link(number + 1, lineage(str(number)), 1)
        head = Standing(link.version, link.lineage, Chain([link]), MergedMap()).head()
        signatures = under(link_of(head), ANNA)
        rounds.handle(Received(ANNA, said.Compare(0, with_signatures(head, signatures))), 1.0)

    assert LINKS_KEPT / 2 < len(rounds.certificates._kept) <= LINKS_KEPT
