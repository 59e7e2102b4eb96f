"""Admission under each mode, with bans, dates and numbers of directives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dht.identity import Identity, PeerId
from dht.membership.admission import DELEGATES_MAX, NO_INVITE
from dht.membership.credentials import Directive, InviteKey, Refused, Signer, encode
from dht.record_keeper import RecordKeeper
from dht.records import PeerRecord, Rejected, check, seal
from tests.dht.membership.signers import (
    DAY,
    DELEGATE,
    DELEGATES,
    NOW,
    OWNER,
    OWNERS,
    RUN,
    admission,
    banning,
    credential,
    invitation,
    key,
)

ANNA, BORIS = key("anna"), key("boris")


def why(
    door: object, peer: PeerId = ANNA.peer_id, *, now: float = NOW, role: str = "learner"
) -> str:
    reason = door.refusal(peer, now=now, role=role)  # type: ignore[attr-defined]
    return reason or ""


def admitted(by: InviteKey | None = None, peer: Identity = ANNA):  # type: ignore[no-untyped-def]
    door = admission()
    assert door.show(peer.peer_id, credential(peer.peer_id, by), now=NOW) is None
    return door


def test_an_open_run_admits_everybody_and_a_listed_one_its_list() -> None:
    assert not why(admission("open", owner=None))
    listed = admission("listed", owner=None, listed=frozenset([ANNA.peer_id]))
    assert not why(listed)
    assert "admits only the peers it lists" in why(listed, BORIS.peer_id)


def test_a_peer_that_is_proved_to_lie_is_refused_in_every_mode_also_the_owner() -> None:
    listed = admission("listed", owner=None, listed=frozenset([ANNA.peer_id]))
    for door in (admission("open", owner=None), listed, admitted()):
        assert not why(door)
        door.convicted[ANNA.peer_id] = "merged slice 0 falsely"
        assert why(door).endswith("is banned: it was proved that it merged slice 0 falsely")
    door.convicted[OWNER.peer_id] = "signed two seals in ballot 0"
    assert "two seals" in why(door, OWNER.peer_id)


def test_an_invited_run_admits_a_peer_that_shows_a_credential() -> None:
    door = admission()
    assert why(door) == NO_INVITE
    assert "not that of peer" in (door.show(ANNA.peer_id, credential(BORIS.peer_id), now=NOW) or "")
    assert why(door) == NO_INVITE
    assert not why(admitted())
    assert why(admitted(), BORIS.peer_id) == NO_INVITE
    assert not why(door, OWNER.peer_id)


def test_the_owner_and_delegates_in_force_are_vouched_for() -> None:
    door = admission("open")
    assert door.vouches_for(OWNER.peer_id, now=NOW)
    assert not door.vouches_for(DELEGATE.peer_id, now=NOW)
    assert not door.vouches_for(ANNA.peer_id, now=NOW)

    door.take(banning(signer=DELEGATES), now=NOW)

    assert door.vouches_for(DELEGATE.peer_id, now=NOW)


def test_an_invite_ends_at_its_date() -> None:
    door = admitted(invitation(days=2))
    assert not why(door, now=NOW + 2 * DAY - 1)
    assert "expired" in why(door, now=NOW + 2 * DAY)


def test_a_keepers_invite_does_not_admit_a_learner_and_a_learners_admits_a_keeper() -> None:
    keeper = admitted(invitation(role="keeper"))
    assert "for a keeper, not for a learner" in why(keeper)
    assert not why(keeper, role="keeper")
    assert not why(admitted(), role="keeper")


def test_a_second_invite_replaces_one_that_allows_less_or_is_banned() -> None:
    door = admitted(invitation("first", role="keeper"))
    second = invitation("second", days=1)
    assert door.show(ANNA.peer_id, credential(ANNA.peer_id, second), now=NOW) is None
    assert not why(door)
    door.show(ANNA.peer_id, credential(ANNA.peer_id, invitation("first", role="keeper")), now=NOW)
    assert not why(door)
    door.take(banning(second.secret.public_key), now=NOW)
    assert "banned" in why(door)
    door.show(ANNA.peer_id, credential(ANNA.peer_id, invitation("third", days=0.5)), now=NOW)
    assert not why(door)


def test_a_ban_of_a_peer_an_invite_or_a_delegate_takes_effect_at_once() -> None:
    by = invitation(signer=DELEGATES)
    for banned in (ANNA, by.secret, DELEGATE):
        door = admitted(by)
        assert isinstance(door.take(banning(banned.public_key), now=NOW), Directive)
        assert "banned" in why(door)
    open_run = admission("open")
    open_run.take(banning(ANNA.public_key), now=NOW)
    assert "banned from the run by directive 1 of its owner" in why(open_run)
    assert not why(open_run, BORIS.peer_id)


def test_a_delegate_bans_peers_and_invites_but_no_delegates_and_not_for_ever() -> None:
    by = invitation(signer=DELEGATES)
    door = admitted(by)
    door.take(banning(DELEGATE.public_key, OWNER.public_key, signer=DELEGATES), now=NOW)
    assert not why(door)
    assert not why(door, OWNER.peer_id)
    door.take(banning(ANNA.public_key, number=2, signer=DELEGATES), now=NOW)
    assert "of the delegate" in why(door)
    # Nobody can tell when a directive was signed, so it ends with its signer's delegation.
    own = admitted(invitation(days=50))
    own.take(banning(ANNA.public_key, signer=DELEGATES), now=NOW)
    assert "banned" in why(own)
    assert not why(own, now=NOW + 10 * DAY)
    assert isinstance(
        admission().take(banning(ANNA.public_key, signer=DELEGATES), now=NOW + 10 * DAY), Refused
    )


def test_a_banned_delegates_bans_and_invites_end() -> None:
    door = admitted()
    door.take(banning(ANNA.public_key, signer=DELEGATES), now=NOW)
    assert "banned" in why(door)
    door.take(banning(DELEGATE.public_key), now=NOW)
    assert not why(door)
    assert "no delegate" in _reason(
        door.take(banning(ANNA.public_key, number=9, signer=DELEGATES), now=NOW)
    )


def _reason(verdict: object) -> str:
    assert isinstance(verdict, Refused)
    return verdict.reason


def test_a_lower_number_is_refused_and_told() -> None:
    door = admission()
    assert isinstance(door.take(banning(ANNA.public_key, number=5), now=NOW), Directive)
    assert door.take(banning(ANNA.public_key, number=5), now=NOW) is None
    told = _reason(door.take(banning(number=4), now=NOW))
    assert "directive 4" in told
    assert "directive 5, which is in force" in told
    assert isinstance(door.take(banning(number=6), now=NOW), Directive), "a ban can be lifted"


def test_a_run_without_an_owner_takes_no_directives() -> None:
    door = admission("open", owner=None)
    assert "no owner" in _reason(door.take(banning(ANNA.public_key), now=NOW))


def test_directives_of_many_delegates_are_bounded_and_the_owner_always_has_room() -> None:
    door = admission()

    def by(name: str, days: float = 10) -> bytes:
        granted = OWNERS.delegate(key(name).public_key, int(NOW + days * DAY))
        return encode(Signer(key(name), RUN, granted).directive(1, frozenset()))

    for number in range(DELEGATES_MAX):
        assert isinstance(door.take(by(f"d{number}", days=1), now=NOW), Directive)
    assert "delegates have directives" in _reason(door.take(by("more"), now=NOW))
    assert isinstance(door.take(banning(), now=NOW), Directive)
    assert isinstance(door.take(by("more"), now=NOW + DAY), Directive), "the old ones have expired"


@given(order=st.permutations(range(8)))
def test_peers_agree_whatever_the_order_in_which_directives_arrive(order: list[int]) -> None:
    directives = [
        *(banning(ANNA.public_key, number=number) for number in (1, 2, 3)),
        banning(BORIS.public_key, number=3),  # two of one number: an owner's mistake
        *(banning(BORIS.public_key, number=n, signer=DELEGATES) for n in (1, 2)),
        banning(number=3, signer=DELEGATES),
        banning(number=1),
    ]
    door, straight = admission(), admission()
    for index in order:
        door.take(directives[index], now=NOW)
    for data in directives:
        straight.take(data, now=NOW)
    assert door.digest(NOW) == straight.digest(NOW)
    assert door.in_force(NOW) == straight.in_force(NOW)
    third = admission()
    for data in door.to_pass_on(NOW):
        assert isinstance(third.take(data, now=NOW), Directive)
    assert third.digest(NOW) == door.digest(NOW)


# --- records -----------------------------------------------------------------------------------


def record(peer: Identity, shown: bytes, role: str = "learner", *, trains: bool = False) -> bytes:
    made = PeerRecord(
        protocol=(1, 1),
        role=role,  # type: ignore[arg-type]
        incarnation=1,
        trains=trains,
        credential=shown,
    )
    return seal(made, peer, key=f"{RUN}/peers/", sequence=1, ttl_s=30)


def test_a_keeper_of_records_refuses_those_of_peers_that_are_not_admitted() -> None:
    door = admission()
    keeper = RecordKeeper(judge=lambda sealed: door.judge_record(sealed, now=NOW))
    stranger = keeper.admit(record(BORIS, b""), now=0.0)
    assert isinstance(stranger, Rejected)
    assert (stranger.reason, stranger.detail) == ("unadmitted", NO_INVITE)
    replayed = keeper.admit(record(BORIS, credential(ANNA.peer_id)), now=0.0)
    assert isinstance(replayed, Rejected)
    assert not isinstance(keeper.admit(record(ANNA, credential(ANNA.peer_id)), now=0.0), Rejected)
    wrong_role = record(BORIS, credential(BORIS.peer_id, invitation(role="keeper")))
    assert isinstance(keeper.admit(wrong_role, now=0.0), Rejected)
    by = invitation(role="keeper")
    training = record(BORIS, credential(BORIS.peer_id, by), "keeper", trains=True)
    assert isinstance(keeper.admit(training, now=0.0), Rejected), "rounds would wait for it"
    as_keeper = record(BORIS, credential(BORIS.peer_id, invitation(role="keeper")), "keeper")
    assert not isinstance(keeper.admit(as_keeper, now=0.0), Rejected)


def test_a_record_without_a_credential_is_written_as_before() -> None:
    sealed = check(record(ANNA, b""))
    with_credential = check(record(ANNA, credential(ANNA.peer_id)))
    assert not isinstance(sealed, Rejected)
    assert not isinstance(with_credential, Rejected)
    assert sealed.record.credential == b""
    assert with_credential.record.credential == credential(ANNA.peer_id)
