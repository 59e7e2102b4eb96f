"""The decoders of bytes from strangers, each with examples and the one error that it may raise."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from blake3 import blake3

from averaging import messages as said
from averaging.errors import BadPayload
from averaging.guard import auditing
from averaging.guard.auditing import (
    AskProof,
    AskReading,
    AskSources,
    AskUpload,
    read_headers,
)
from averaging.guard.rules import proofs
from averaging.guard.rules.proofs import BadProof, Proof, decode_head, encode_head, size_of_data
from averaging.history.claims import (
    decode_claims,
    decode_statement,
    encode_claims,
    encode_statement,
)
from averaging.history.manifest import describe, read_manifest
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.parent_maps import ParentMap, decode_maps, encode_maps
from averaging.history.readings import Reading, decode_reading, encode_reading
from averaging.history.replay import ReplayHead
from averaging.live.states import fetch_server
from averaging.live.states.fetch_server import AskManifest, AskPiece, AskReplay
from averaging.live.streams.questions import read_request
from averaging.messages import BadMessage
from averaging.numbers.arithmetic import squares_at_most
from averaging.numbers.arrays import arithmetic
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named, codec_names
from dht import addresses
from dht.identity import Identity, RunId
from dht.libp2p import directory_wire
from dht.libp2p.directory_wire import MalformedMessage, place_of, read_records, write_records
from dht.libp2p.framing.frame_stream import HEADER, FrameStream, FrameType
from dht.libp2p.framing.packing import packing, unpacking
from dht.libp2p.framing.sealing import KEY_BYTES, NUMBER_BYTES, Ticket
from dht.libp2p.hivemind_directory import parsed
from dht.libp2p.hivemind_imports import PeerID, dht_pb2
from dht.libp2p.lane import port_mapping
from dht.libp2p.lane import wire as lane_wire
from dht.libp2p.lane.port_mapping import NotMapped
from dht.membership import credentials, hello
from dht.membership.credentials import (
    InviteKey,
    Signer,
    admit,
    delegation_text,
    parse_delegation,
    parse_invite,
    read_credential,
    read_directive,
)
from dht.membership.orders import Amendment, Attested, End, Orders, Rollback, Root
from dht.records import (
    PEER_RECORD_MAX_BYTES,
    PeerRecord,
    Rejected,
    check,
    seal,
)
from peer import description, status
from peer.calls import ATTESTABLE, Call, Kept
from peer.description import Described, Description
from peer.errors import LinkError, RunFileError
from peer.extras import run_lists
from peer.extras.credit.accounting import wire as credit
from peer.extras.site import run_page as run_page
from peer.joining.link import Link, parse_link
from peer.run_file.reading import from_canonical, parse
from peer.run_file.sections import FilesData, FileSource, HfModel, Lora, RunFile
from tests.averaging.guard.rules.audited_rounds import (
    COURT,
    Round,
    commit_of,
    heads_of_proofs,
    of_a_site,
)
from tests.averaging.live.served_states import state_of
from tests.averaging.message_examples import COMMIT, EXAMPLES, FULL, HEAD, OPENING
from tests.peer.extras.credit.accounting.books import RUN as CREDIT_RUN
from tests.peer.extras.credit.accounting.books import a_tally
from tests.peer.extras.site.example_pages import a_page
from tests.peer.statuses import a_status

ANNA = Identity.from_seed(b"a" * 32)
CLAIMS = [each for _, each in sorted(Round(of_a_site(commit_of())).claims.items())]
PROOFS = heads_of_proofs()
A_TALLY = a_tally()
RUN = RunId("5f" * 32)
KEY = f"{RUN}/peers/01"
RECORD = PeerRecord(protocol=(1, 1), role="learner", incarnation=7, name="anna")
SEALED = seal(RECORD, ANNA, key=KEY, sequence=1, ttl_s=30.0)
SIGNED_FROM = 96
"""The body of a sealed record begins after signature and key."""


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder. Anything but ``error`` that it raises is a bug."""

    examples: Sequence[bytes]
    decode: Callable[[bytes], Any]
    error: type[Exception] | tuple[type[Exception], ...] = ()
    written: Callable[[Any], Any] | None = None
    """What is read is written by this as the same bytes: there is one form of each value."""
    values: Sequence[Any] = ()
    """What the examples are read as, where they come from values."""

    @classmethod
    def of(
        cls,
        values: Sequence[Any],
        encode: Callable[[Any], bytes],
        decode: Callable[[bytes], Any],
        error: type[Exception],
    ) -> Target:
        return cls([encode(value) for value in values], decode, error, values=values)


def _signed(body: bytes) -> Any:
    """Check a record whose signature is right, as anybody can make it."""
    body = body[: PEER_RECORD_MAX_BYTES - SIGNED_FROM]
    return check(ANNA.sign(b"shoal record\0" + body) + ANNA.public_key + body)


_NODE = dht_pb2.NodeInfo(node_id=place_of(PeerID.from_base58(ANNA.peer_id).to_bytes()))
_STORE = dht_pb2.StoreRequest(
    keys=[bytes(20)],
    subkeys=[directory_wire.NO_SUBKEY],
    values=[SEALED],
    expiration_time=[0.0],
    in_cache=[False],
    peer=_NODE,
)
_FIND = dht_pb2.FindRequest(keys=[bytes(20)], peer=_NODE)
_FOUND = dht_pb2.FindResponse(
    results=[
        dht_pb2.FindResult(
            type=dht_pb2.FOUND_REGULAR,
            value=write_records([SEALED, SEALED]),
            nearest_node_ids=[_NODE.node_id],
            nearest_peer_ids=[PeerID.from_base58(ANNA.peer_id).to_bytes()],
        )
    ],
    peer=_NODE,
)
_SENDER = PeerID.from_base58(ANNA.peer_id).to_bytes()


def _request(kind: Any) -> Callable[[bytes], Any]:
    rule = directory_wire.rule_for(kind.DESCRIPTOR.name)

    def read(data: bytes) -> None:
        rule.check(parsed(kind, data, directory_wire.MESSAGE_MAX_BYTES), _SENDER)

    return read


def _frames(data: bytes, ticket: Ticket | None = None) -> None:
    """Give bytes to a stream in pieces, as a socket would."""
    stream = FrameStream(lambda stream, message: None)
    if ticket is not None:
        stream.seals = ticket.seals(dialled=False)
    stream.connection_made(_Nowhere())
    for start in range(0, len(data), 37):
        piece = data[start : start + 37]
        while piece and stream._broken is None:
            room = stream.get_buffer(-1)
            taken = min(len(room), len(piece))
            room[:taken] = piece[:taken]
            stream.buffer_updated(taken)
            piece = piece[taken:]
    stream.cut()
    stream.connection_lost(None)


class _Nowhere(asyncio.Transport):
    """A socket whose other end reads nothing."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


_ADAPTS = RunFile(
    model=HfModel(
        config={"model_type": "llama"},
        config_unset=["sliding_window"],
        base=f"owner/name@{'0' * 40}",
        base_files=[f"model.safetensors#sha256={'0' * 64}"],
        lora=Lora(targets=["q_proj"]),
    ),
    data=FilesData(
        form="chat",
        columns=["said"],
        template={"user": "{content}: ", "assistant": "{content}"},
        sources=[FileSource(files=["a.jsonl"])],
    ),
)


def _run_file(data: bytes) -> RunFile:
    return from_canonical(data, blake3(data).hexdigest())


def _proof(data: bytes) -> Any:
    """Read a proof's head, and judge it without its bytes, as anybody can make it."""
    head = decode_head(data)
    with suppress(BadProof):
        size_of_data(head, COURT)
        proofs.check(Proof(head), COURT)
    return head


def _text(read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda data: read(data.decode("utf-8", errors="replace"))


def _hello(message: Any) -> Target:
    return Target.of([message], hello.write, partial(hello.read, type(message)), ValueError)


def _answer(call: Call[Any, Any], *answers: Any) -> Target:
    return Target.of(answers, call.encode, call.decode, ValueError)


_PASSED = (hello.Passed(SEALED, 1.5),)
_NUMBER, _SECRET = bytes(NUMBER_BYTES), bytes(KEY_BYTES)
_TICKET = Ticket(_NUMBER, _SECRET, _SECRET)
LANE: tuple[lane_wire.Message, ...] = (
    _TICKET,
    lane_wire.LaneOffer(_TICKET, 7700),
    lane_wire.Begin("/shoal/x/1"),
    lane_wire.Answer(seen_ip="203.0.113.7", seen_port=7),
    lane_wire.Punch((("203.0.113.7", 7700), ("2606:4700::1", 7701))),
    lane_wire.PunchOffer(_TICKET, (("203.0.113.7", 7700),)),
    lane_wire.Circuit(ANNA.peer_id, _NUMBER),
    lane_wire.Leg(7700, _NUMBER),
    lane_wire.Via(ANNA.peer_id, _NUMBER),
)
_OWNER = Signer(Identity.from_seed(b"o" * 32), RUN)
_DELEGATE = Identity.from_seed(b"d" * 32)
_DELEGATION = _OWNER.delegate(_DELEGATE.public_key, 2_000_000_000)
_BY_DELEGATE = Signer(_DELEGATE, RUN, _DELEGATION)
_SECRET_OF_INVITE = Identity.from_seed(b"i" * 32)
_INVITES = [
    signer.invite(_SECRET_OF_INVITE.public_key, "learner", 1_900_000_000)
    for signer in (_OWNER, _BY_DELEGATE)
]
_CREDENTIALS = [
    credentials.encode(admit(invite, _SECRET_OF_INVITE, ANNA.peer_id, RUN)) for invite in _INVITES
]
_ORDERS = Orders(
    paused=True,
    end=End(version=900),
    amendments=(Amendment(30, (("inner.learning_rate", 5e-4), ("outer.codec", "int8"))),),
    attested=(Attested(20, bytes(32), bytes(32)),) * 2,
    rollback=Rollback(3, (Root(11, bytes(32)),) * 2),
)
_DIRECTIVES = [
    credentials.encode(signer.directive(1, frozenset({ANNA.public_key})))
    for signer in (_OWNER, _BY_DELEGATE)
]
_WITH_ORDERS = credentials.encode(_OWNER.directive(7, frozenset({ANNA.public_key}), _ORDERS))


SIZES = (64, 300)
"""Units of the payloads that are decoded."""


def _payload(codec: str) -> bytes:
    made, values = codec_named(codec), np.linspace(-1.0, 1.0, sum(SIZES), dtype=np.float32)
    out = bytearray(made.encoded_size(SIZES))
    with arithmetic():
        made.encode(values, SIZES, out, SCRATCH)
    return bytes(out)


SCRATCH = Scratch()


def _decoded_by(name: str) -> Callable[[bytes], Any]:
    codec, out = codec_named(name), np.zeros(sum(SIZES), np.float32)

    def read(data: bytes) -> None:
        with arithmetic():
            codec.check(data, SIZES, SCRATCH)
            assert np.isfinite(squares_at_most(codec, memoryview(data), SIZES)).all()
            codec.decode(data, SIZES, out, SCRATCH)
        assert np.isfinite(out).all(), "what was checked is finite"

    return read


def _reply(kind: Any, to: Any) -> Callable[[bytes], Any]:
    rule = directory_wire.rule_for(to.DESCRIPTOR.name)

    def read(data: bytes) -> None:
        rule.check_reply(parsed(kind, data, rule.reply_max_bytes), _SENDER)

    return read


def _believed(read: Callable[..., Any], **known: Any) -> Callable[[bytes], Any]:
    return _accepted(lambda data: read(data, run=RUN, owner=_OWNER.key.peer_id, **known))


def _accepted(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Raise a refusal that a decoder returns, so that examples are known to be believed."""

    def raising(data: bytes) -> Any:
        verdict = read(data)
        if isinstance(verdict, credentials.Refused | Rejected):
            raise ValueError(verdict)
        return verdict

    return raising


_STATE = state_of(1, 1000)
_SEALED_HEADER = HEADER.pack(3, FrameType.PREAMBLE)
_SEALED_FRAMES = _SEALED_HEADER + _TICKET.seals(dialled=True).mine.close(_SEALED_HEADER, b"abc")
_FRAMES = b"\x03abc" + b"".join(
    HEADER.pack(len(content), kind) + content
    for kind, content in ((FrameType.DATA, b"x" * 50), (FrameType.END, b""))
)


_Result = TypeVar("_Result")


def _result_of(work: Generator[None, None, _Result]) -> _Result:
    """The value that a generator returns in the end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result


_PACKED = _result_of(packing([memoryview(bytes(5000))])) or b""
_AT = "/ip4/203.0.113.7/tcp/7700/p2p/" + ANNA.peer_id

TARGETS: dict[str, Target] = {
    "message": Target.of(EXAMPLES, said.encode, said.decode, BadMessage),
    "commit": Target.of((COMMIT, FULL), said.encode_commit, said.decode_commit, BadMessage),
    "signatures": Target.of(
        [HEAD.signatures], said.encode_signatures, said.decode_signatures, BadMessage
    ),
    "opening": Target.of([OPENING], said.encode_opening, said.decode_opening, BadMessage),
    "merged_maps": Target(
        [encode_maps({0: ParentMap(MergedMap({ANNA.peer_id: Mark(1, 2, 3)}), bytes(32))})],
        decode_maps,
        BadPayload,
    ),
    "manifest": Target(
        [bytes(describe(_STATE))],
        lambda data: read_manifest(data, fragment=0, pieces=_STATE.pieces),
        BadMessage,
    ),
    "statement": Target.of(
        [each.statement for each in CLAIMS], encode_statement, decode_statement, BadMessage
    ),
    "claims": Target.of([tuple(CLAIMS)], encode_claims, decode_claims, BadMessage),
    "proof": Target.of(PROOFS, encode_head, _proof, BadMessage),
    "audit_request": Target(
        [
            msgspec.msgpack.encode(each)
            for each in (
                AskSources(bytes(32), (1, 2), True),
                AskUpload(bytes(32), (1, 3), 2, False),
                AskReading(bytes(32), 5),
                AskProof(bytes(32)),
            )
        ],
        partial(read_request, requests=auditing.REQUESTS),
        BadMessage,
    ),
    "reading": Target.of(
        [Reading({"0/visit": 3}, 8, bytes(32)), None], encode_reading, decode_reading, BadMessage
    ),
    "shown_upload": Target(
        [msgspec.msgpack.encode([(CLAIMS[0], bytes(64))])], read_headers, BadMessage
    ),
    "fetch_request": Target(
        [
            msgspec.msgpack.encode(asked)
            for asked in (
                AskManifest(0),
                AskPiece(0),
                AskReplay(0, 0, _STATE.lineage),
            )
        ],
        partial(read_request, requests=fetch_server.REQUESTS),
        BadMessage,
    ),
    "record": Target([SEALED], _accepted(check), ValueError),
    "signed_record": Target([SEALED[SIGNED_FROM:]], _accepted(_signed), ValueError),
    "credential": Target(_CREDENTIALS, _believed(read_credential, peer=ANNA.peer_id), ValueError),
    "directive": Target([*_DIRECTIVES, _WITH_ORDERS], _believed(read_directive), ValueError),
    "invite_text": Target(
        [str(InviteKey(invite, _SECRET_OF_INVITE)).encode() for invite in _INVITES],
        _text(parse_invite),
        ValueError,
    ),
    "delegation_text": Target(
        [delegation_text(_DELEGATION).encode()], _text(parse_delegation), ValueError
    ),
    "papers": Target.of(
        [hello.Papers(run=RUN, credential=_CREDENTIALS[0], digest=bytes(16), directives=(b"x",))],
        hello.write,
        lambda data: hello.read(hello.Papers, data, max_bytes=hello.PAPERS_MAX_BYTES),
        ValueError,
    ),
    "replay_head": Target(
        [ReplayHead(said.encode_commit(COMMIT), (0,), (bytes(32),)).encode()],
        ReplayHead.decode,
        BadMessage,
    ),
    "hello": _hello(hello.Hello(run=RUN, record=SEALED, passed=_PASSED)),
    "hello_reply": _hello(
        hello.HelloReply(run=RUN, record=SEALED, passed=_PASSED, received_at=1.0, sent_at=2.0)
    ),
    "dial_back": _hello(
        hello.DialBack(peer=ANNA.peer_id, nonce=bytes(16), addresses=(bytes(8),), relay=True)
    ),
    "dial_back_reply": _hello(hello.DialBackReply(verdict="not reached")),
    "description": Target(
        [
            description.page(
                Description.of(
                    [Described("weight", (3, 4), kind="head")], [Described("base", (2,), "ab12")]
                ),
                0,
            )
        ],
        description.CALL.decode,
        ValueError,
    ),
    "attestable": _answer(ATTESTABLE, (Kept(1, 8, bytes(32), bytes(32), bytes(32), 100),)),
    "credit_digests": Target(
        [credit.CALL.request(CREDIT_RUN, credit.digests(A_TALLY))],
        lambda data: credit.CALL.asked(data, CREDIT_RUN),
        ValueError,
    ),
    "credit_part": Target([credit.encode(A_TALLY)], credit.decode, ValueError),
    "run_list": Target(
        [msgspec.json.encode({"who": "a host", "runs": [msgspec.to_builtins(a_page())]})],
        run_lists.decode,
        ValueError,
    ),
    "question": Target(
        [status.CALL.request(CREDIT_RUN, "anna")],
        lambda data: status.CALL.asked(data, CREDIT_RUN),
        ValueError,
    ),
    "run_page": _answer(run_page.CALL, a_page()),
    "status": _answer(
        status.CALL,
        a_status(),
        a_status(loss=None, held_out=None, versions=(), reachable=None),
    ),
    "port_mapping": Target(
        [struct.pack("!BBHIHHI", 0, 130, 0, 1000, 7700, 7701, 3600)],
        lambda data: port_mapping.read_reply(data, 7700),
        NotMapped,
    ),
    "frames": Target([_FRAMES], _frames),
    "sealed_frames": Target([_SEALED_FRAMES], partial(_frames, ticket=_TICKET)),
    "packed": Target([_PACKED], lambda data: _result_of(unpacking(bytearray(data))), ValueError),
    "address": Target(
        [
            addresses.pack(addresses.parse(text))
            for text in (
                "/ip4/203.0.113.7/tcp/7700",
                f"/dns4/seed.example.org/tcp/7700/p2p/{ANNA.peer_id}/p2p-circuit"
                f"/p2p/{_OWNER.key.peer_id}",
            )
        ],
        addresses.unpack,
        ValueError,
        written=addresses.pack,
    ),
    "hints": Target(
        [addresses.pack(addresses.parse(_AT))], lambda data: addresses.unpack_all([data])
    ),
    "seed": Target([_AT.encode()], _text(addresses.parse_seed), ValueError),
    "link": Target(
        [
            str(Link(RUN, (addresses.parse(_AT),), InviteKey(invite, _SECRET_OF_INVITE))).encode()
            for invite in _INVITES
        ],
        _text(parse_link),
        LinkError,
    ),
    "run_file": Target(
        [RunFile().canonical(), _ADAPTS.canonical()],
        _run_file,
        RunFileError,
        written=RunFile.canonical,
    ),
    "run_file_text": Target(
        [b"name = 'ours'\n[model]\nlayers = 2\n[outer]\ncodec = 'int4'\n"],
        _text(parse),
        RunFileError,
    ),
    "directory_records": Target.of([[SEALED, b"x"]], write_records, read_records, MalformedMessage),
    "directory_store": Target(
        [_STORE.SerializeToString()], _request(dht_pb2.StoreRequest), MalformedMessage
    ),
    "directory_find": Target(
        [_FIND.SerializeToString()], _request(dht_pb2.FindRequest), MalformedMessage
    ),
    "directory_ping": Target(
        [dht_pb2.PingRequest(peer=_NODE).SerializeToString()],
        _request(dht_pb2.PingRequest),
        MalformedMessage,
    ),
    "directory_found": Target(
        [_FOUND.SerializeToString()],
        _reply(dht_pb2.FindResponse, dht_pb2.FindRequest),
        MalformedMessage,
    ),
    "directory_stored": Target(
        [dht_pb2.StoreResponse(store_ok=[True], peer=_NODE).SerializeToString()],
        _reply(dht_pb2.StoreResponse, dht_pb2.StoreRequest),
        MalformedMessage,
    ),
    "directory_pinged": Target(
        [dht_pb2.PingResponse(peer=_NODE, dht_time=2e9).SerializeToString()],
        _reply(dht_pb2.PingResponse, dht_pb2.PingRequest),
        MalformedMessage,
    ),
}
TARGETS |= {
    f"lane_{type(example).__name__.lower()}": Target.of(
        [example], lane_wire.encode, partial(lane_wire.decode, type(example)), ValueError
    )
    for example in LANE
}
TARGETS |= {
    f"payload_{name}": Target([_payload(name)], _decoded_by(name), BadPayload)
    for name in codec_names()
}
"""Decoders by name. An empty ``error``: the decoder raises nothing, or returns a refusal."""
