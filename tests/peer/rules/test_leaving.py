"""How long a peer that leaves stays."""

from __future__ import annotations

import pytest

from peer.rules.leaving import Departure, LastOffers, Stay, lacks, stay, who_leaves_too
from peer.status import PeerStatus
from tests.peer.statuses import a_status

MBIT = 125_000.0


def offers(megabytes: float, mbit: float, company_s: float = 0.0) -> LastOffers:
    return LastOffers(
        encoded_bytes=int(1e6 * megabytes), bytes_per_s=mbit * MBIT, company_s=company_s
    )


def test_it_takes_as_long_as_the_line_needs_for_the_bytes_and_the_others_for_steps() -> None:
    assert offers(5.0, 5.0).expected_s == pytest.approx(10.0)
    assert offers(5.0, 0.0).expected_s == pytest.approx(10.0), "an unknown line is of 5 Mbit/s"
    assert offers(5.0, 5.0, company_s=15.0).expected_s == pytest.approx(25.0)


def test_a_peer_stays_three_times_as_long_within_bounds() -> None:
    assert offers(5.0, 5.0).patience_s(least_s=12.0, most_s=300.0) == pytest.approx(30.0)
    assert offers(0.1, 50.0).patience_s(least_s=12.0, most_s=300.0) == 12.0
    assert offers(50.0, 1.0).patience_s(least_s=12.0, most_s=300.0) == 300.0
    assert offers(50.0, 1.0).patience_s(least_s=12.0, most_s=0.0) == 12.0


def test_merging_and_handing_over_share_the_patience_that_a_leaving_peer_has() -> None:
    departure = Departure("its owner asked it to leave", 0, False, timeout_s=30.0, patience_s=300.0)
    assert departure.patience_left_s(5.0) == 300.0
    assert departure.patience_left_s(130.0) == 200.0
    assert departure.patience_left_s(331.0) == 0.0


def test_leaving_takes_no_longer_than_its_patience_and_the_end_of_it_is_for_saving() -> None:
    assert stay(300.0, drain_s=30.0) == Stay(30.0, 260.0, last_words_s=10.0)
    assert stay(30.0, drain_s=30.0) == Stay(20.0, 0.0, last_words_s=10.0)
    assert stay(6.0, drain_s=30.0) == Stay(4.0, 0.0, last_words_s=2.0)
    assert stay(300.0, drain_s=30.0).longest_s == 300.0


def leaver(versions: tuple[int, ...], pending: float = 0.0, model: str = "ab") -> PeerStatus:
    fates = {"pending": pending}
    return a_status(name="boris", phase="leaving", versions=versions, fates=fates, model=model)


def test_peers_that_leave_together_wait_for_work_and_for_one_model() -> None:
    """Of five that left at once three kept other models than the last."""
    same, keeper = leaver((3, 4)), a_status(role="keeper", versions=(3, 4), model="ab")
    assert who_leaves_too((3, 4), [same, keeper], model="ab") == []
    for other in (leaver((3, 4), pending=11.0), leaver((3, 5)), leaver((2, 4))):
        assert len(who_leaves_too((3, 4), [same, other], model="ab")) == 1
    assert who_leaves_too((3, 4), [leaver((3, 4), model="cd")], model="ab")
    behind = a_status(role="keeper", versions=(3, 3), model="cd")
    assert who_leaves_too((3, 4), [same, behind], model="ab")


def test_nobody_stays_for_those_that_leave_while_another_trains_on() -> None:
    stays = a_status(name="clara", phase="ready", versions=(3, 4))
    assert who_leaves_too((3, 4), [leaver((3, 5)), stays], model="ab") == []
    newcomer = a_status(name="dora", phase="fetching", versions=())
    assert who_leaves_too((3, 4), [leaver((3, 5)), newcomer], model="ab")


@pytest.mark.parametrize(
    ("theirs", "is_lacking"),
    [((3, 4), False), ((4, 4), False), ((3, 3), True), ((), True), ((3,), True)],
)
def test_a_leaving_peer_waits_for_those_that_lack_a_version(
    theirs: tuple[int, ...], is_lacking: bool
) -> None:
    assert lacks(theirs, (3, 4)) is is_lacking
