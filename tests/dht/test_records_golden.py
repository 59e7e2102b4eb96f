"""Golden bytes of records: other releases of this program have to read them."""

import json
from pathlib import Path

import msgspec

from dht.addresses import pack, parse
from dht.identity import Identity, RunId
from dht.membership import hello as wire
from dht.membership.credentials import Credential, Directive, read_credential, read_directive
from dht.membership.table import bucket_key
from dht.records import (
    ContributionCounters,
    PeerRecord,
    Sealed,
    check,
    pack_versions,
    seal,
)
from tests.dht.membership.signers import (
    DELEGATES,
    OWNER,
    banning,
    credential,
    invitation,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "protocol_1" / "dht_wire.json"
ANNA = Identity.from_seed(b"a" * 32)
RUN = RunId("5f" * 32)
RECORD = PeerRecord(
    protocol=(1, 1),
    role="keeper",
    incarnation=77,
    addresses=(pack(parse("/ip4/203.0.113.7/tcp/7700")), pack(parse("/dns4/a.example/tcp/1"))),
    reachable=True,
    name="anna",
    site="rack 1",
    trains=True,
    step_time_s=0.25,
    link_bytes_s=1.25e6,
    versions=pack_versions([812, 811, 812, 1000]),
    counters=ContributionCounters(rounds=3, tokens=4_000_000, bytes_sent=5),
    release="0.1.0",
)


def messages() -> dict[str, bytes]:
    sealed = seal(RECORD, ANNA, key=bucket_key(RUN, "01"), sequence=1_750_000_000_000, ttl_s=30)
    passed = (wire.Passed(sealed, 1.5),)
    shown = credential(ANNA.peer_id, invitation(signer=DELEGATES))
    directives = (banning(ANNA.public_key, number=7), banning(number=1, signer=DELEGATES))
    return {
        "key_file": ANNA.to_bytes(),
        "peer_record": sealed,
        "peer_record_with_credential": seal(
            msgspec.structs.replace(RECORD, credential=shown),
            ANNA,
            key=bucket_key(RUN, "01"),
            sequence=1_750_000_000_000,
            ttl_s=30,
        ),
        "papers": wire.write(
            wire.Papers(
                run=RUN,
                credential=shown,
                digest=bytes(range(16)),
                directives=directives,
                not_admitted="no",
                not_taken="older",
            )
        ),
        "hello": wire.write(wire.Hello(run=RUN, record=sealed, passed=passed)),
        "hello_reply": wire.write(
            wire.HelloReply(
                run=RUN, record=sealed, passed=passed, received_at=1.75e9, sent_at=1.75e9 + 0.5
            )
        ),
        "dial_back": wire.write(
            wire.DialBack(
                peer=ANNA.peer_id,
                nonce=bytes(range(16)),
                addresses=RECORD.addresses,
                relay=True,
            )
        ),
        "dial_back_reply": wire.write(wire.DialBackReply(verdict="not reached")),
    }


def test_every_message_is_written_as_it_always_was() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert {name: data.hex() for name, data in messages().items()} == golden


class LaterRecord(PeerRecord, frozen=True, kw_only=True):
    """The peer record of a later release: a field more."""

    altitude_m: float = 0.0


def test_a_release_skips_what_it_does_not_know_in_a_record() -> None:
    later = LaterRecord(**msgspec.structs.asdict(RECORD), altitude_m=8848.0)
    sealed = seal(later, ANNA, key=bucket_key(RUN, "01"), sequence=1, ttl_s=30)
    verdict = check(sealed, run=RUN, peer=ANNA.peer_id)
    assert isinstance(verdict, Sealed) and verdict.record == RECORD


def test_every_golden_message_is_still_understood() -> None:
    golden = {name: bytes.fromhex(text) for name, text in json.loads(GOLDEN.read_text()).items()}
    assert Identity.from_bytes(golden["key_file"]).peer_id == ANNA.peer_id
    verdict = check(golden["peer_record"], run=RUN, peer=ANNA.peer_id)
    assert isinstance(verdict, Sealed) and verdict.record == RECORD
    shown = check(golden["peer_record_with_credential"], run=RUN, peer=ANNA.peer_id)
    assert isinstance(shown, Sealed)
    believed = read_credential(
        shown.record.credential, peer=ANNA.peer_id, run=RUN, owner=OWNER.peer_id
    )
    assert isinstance(believed, Credential)
    papers = wire.read(wire.Papers, golden["papers"], max_bytes=wire.PAPERS_MAX_BYTES)
    assert len(papers.directives) == 2
    for data in papers.directives:
        assert isinstance(read_directive(data, run=RUN, owner=OWNER.peer_id), Directive)
    assert wire.read(wire.Hello, golden["hello"]).run == RUN
    assert wire.read(wire.HelloReply, golden["hello_reply"]).sent_at == 1.75e9 + 0.5
    assert wire.read(wire.DialBack, golden["dial_back"]).relay
    assert wire.read(wire.DialBackReply, golden["dial_back_reply"]).verdict == "not reached"
