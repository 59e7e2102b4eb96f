"""Forged, replayed, damaged and outlived credentials: none is believed, none crashes a reader."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import PUBLIC_KEY_BYTES, PeerId
from dht.membership.credentials import (
    BANS_MAX,
    Credential,
    Directive,
    Invite,
    InviteKey,
    Refused,
    Signer,
    admit,
    delegation_text,
    encode,
    parse_delegation,
    parse_invite,
    read_credential,
    read_directive,
)
from dht.membership.orders import End, Orders
from dht.records import CREDENTIAL_MAX_BYTES, DIRECTIVE_MAX_BYTES
from tests.dht.membership.signers import (
    DAY,
    DELEGATE,
    DELEGATES,
    NOW,
    OTHER_RUN,
    OWNER,
    OWNERS,
    RUN,
    banning,
    credential,
    delegation,
    invitation,
    key,
)

ANNA, BORIS, MALLORY = (key(name) for name in ("anna", "boris", "mallory"))


def read(data: bytes, peer: PeerId = ANNA.peer_id) -> Credential | Refused:
    return read_credential(data, peer=peer, run=RUN, owner=OWNER.peer_id)


def reason(data: bytes, peer: PeerId = ANNA.peer_id) -> str:
    verdict = read(data, peer)
    assert isinstance(verdict, Refused), verdict
    return verdict.reason


def reason_of_directive(data: bytes) -> str:
    verdict = read_directive(data, run=RUN, owner=OWNER.peer_id)
    assert isinstance(verdict, Refused), verdict
    return verdict.reason


@pytest.mark.parametrize("signer", [OWNERS, DELEGATES])
def test_a_credential_by_the_owner_or_a_delegate_is_believed(signer: Signer) -> None:
    by = invitation(signer=signer)
    verdict = read(credential(ANNA.peer_id, by))
    assert isinstance(verdict, Credential)
    assert verdict.invite == by.invite


def test_the_largest_credential_and_directive_fit_their_limits() -> None:
    by = invitation(signer=DELEGATES)
    assert len(credential(ANNA.peer_id, by)) <= CREDENTIAL_MAX_BYTES
    keys = [number.to_bytes(PUBLIC_KEY_BYTES, "big") for number in range(BANS_MAX)]
    data = banning(*keys, number=2**32, signer=DELEGATES)
    assert len(data) <= DIRECTIVE_MAX_BYTES
    assert isinstance(read_directive(data, run=RUN, owner=OWNER.peer_id), Directive)


@pytest.mark.parametrize("version", [2**53, 10**20])
def test_no_directive_is_signed_that_nobody_can_read(version: int) -> None:
    """It took the place of the last one beside the owner's key."""
    with pytest.raises(ValueError, match="directive"):
        OWNERS.directive(2, frozenset(), Orders(end=End(version=version)))


def test_a_credential_of_another_peer_is_refused() -> None:
    told = reason(credential(BORIS.peer_id))
    assert "not that of peer" in told
    assert "joins again with the link of an invite" in told


def test_a_credential_for_another_run_is_refused() -> None:
    everything = invitation(signer=Signer(OWNER, OTHER_RUN))
    assert "not signed by" in reason(credential(ANNA.peer_id, everything, run=OTHER_RUN))
    assert "not signed by" in reason(credential(ANNA.peer_id, everything))
    assert "not that of peer" in reason(credential(ANNA.peer_id, run=OTHER_RUN))


def test_an_invite_signed_by_anybody_else_is_refused() -> None:
    assert "not signed by" in reason(
        credential(ANNA.peer_id, invitation(signer=Signer(MALLORY, RUN)))
    )
    stolen = Signer(MALLORY, RUN, delegation())
    assert "not signed by" in reason(credential(ANNA.peer_id, invitation(signer=stolen)))


def test_a_credential_signed_by_another_key_than_the_invites_is_refused() -> None:
    assert "not that of peer" in reason(
        encode(admit(invitation().invite, MALLORY, ANNA.peer_id, RUN))
    )


def test_a_delegate_of_a_delegate_is_refused() -> None:
    second = DELEGATES.delegate(MALLORY.public_key, NOW + DAY)
    theirs = Signer(MALLORY, RUN, second)
    assert "delegation is not signed by the owner" in reason(
        credential(ANNA.peer_id, invitation(signer=theirs, days=0.5))
    )
    assert "delegation is not signed by the owner" in reason_of_directive(
        banning(ANNA.public_key, signer=theirs)
    )


def test_an_invite_that_outlives_its_delegation_is_refused() -> None:
    assert isinstance(
        read(credential(ANNA.peer_id, invitation(signer=DELEGATES, days=10))), Credential
    )
    assert "outlives" in reason(
        credential(ANNA.peer_id, invitation(signer=DELEGATES, days=10.0001))
    )


def test_a_changed_role_or_date_is_refused() -> None:
    by = invitation(role="keeper")
    for change in ({"role": "learner"}, {"expires_at": NOW + 1000 * DAY}):
        changed = InviteKey(msgspec.structs.replace(by.invite, **change), by.secret)
        assert "not signed by" in reason(credential(ANNA.peer_id, changed))


def test_a_delegation_is_not_valid_as_an_invite_nor_the_other_way_round() -> None:
    granted = delegation()
    as_invite = Invite(
        key=granted.key,
        role="learner",
        expires_at=granted.expires_at,
        signature=granted.signature,
    )
    assert "not signed by" in reason(encode(admit(as_invite, DELEGATE, ANNA.peer_id, RUN)))


def test_fields_in_another_order_or_form_are_refused() -> None:
    invite, signature = msgspec.msgpack.decode(credential(ANNA.peer_id))
    for other in (
        [signature, invite],
        [[*invite[:2], invite[3], invite[2], *invite[4:]], signature],
        [invite, signature, None],
        [invite],
        {"invite": invite, "signature": signature},
    ):
        assert "no credential" in reason(msgspec.msgpack.encode(other))
    # The same value with a longer form of its first byte.
    longer = b"\xdc\x00\x02" + credential(ANNA.peer_id)[1:]
    assert "shortest form" in reason(longer)


def test_unsorted_or_repeated_bans_are_refused() -> None:
    one, two = sorted((ANNA.public_key, BORIS.public_key))
    for bans in ((two, one), (one, one)):
        unsigned = msgspec.structs.replace(OWNERS.directive(1, frozenset()), bans=bans)
        assert "ascending" in reason_of_directive(encode(unsigned))


@given(data=st.data())
def test_a_changed_or_truncated_byte_is_refused(data: st.DataObject) -> None:
    signer = data.draw(st.sampled_from([OWNERS, DELEGATES]))
    genuine = data.draw(
        st.sampled_from(
            [
                credential(ANNA.peer_id, invitation(signer=signer)),
                banning(BORIS.public_key, signer=signer),
            ]
        )
    )
    place = data.draw(st.integers(0, len(genuine) - 1))
    bit = data.draw(st.integers(0, 7))
    changed = bytearray(genuine)
    changed[place] ^= 1 << bit
    for forged in (bytes(changed), genuine[:place], genuine + b"\xc0"):
        assert isinstance(read(forged), Refused)
        assert isinstance(read_directive(forged, run=RUN, owner=OWNER.peer_id), Refused)


def test_texts_are_read_back_and_damaged_ones_are_refused() -> None:
    by = invitation(signer=DELEGATES)
    again = parse_invite(str(by))
    assert again.invite == by.invite
    assert again.secret.peer_id == by.invite.id
    assert str(by) not in repr(by), "the private half of an invite is not for logs"
    text = delegation_text(delegation())
    assert parse_delegation(text) == delegation()
    for damaged in (str(by)[:-3], str(by) + "AAAA", "", "?", "A" * 700):
        with pytest.raises(ValueError, match="damaged"):
            parse_invite(damaged)
        with pytest.raises(ValueError, match="damaged"):
            parse_delegation(damaged)
    with pytest.raises(ValueError, match="do not belong together"):
        parse_invite(str(InviteKey(by.invite, key("another"))))
