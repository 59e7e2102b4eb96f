"""Messages on the wire: golden bytes, bounds, and refusal of any other bytes."""

import msgspec
import pytest

from averaging import messages as said
from averaging.messages import BadMessage, Commit, Entry, Head, Link, Message, Opening
from dht import protocol
from dht.identity import PeerId
from dht.protocol import NEWEST, OLDEST
from tests.averaging.message_examples import (
    COMMIT,
    EXAMPLES,
    FULL,
    HEAD,
    OPENING,
    golden_file,
    golden_lines,
)
from tests.averaging.next_protocol import NEXT, SPOKEN, next_protocol  # noqa: F401


def test_every_message_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(Message.__args__)


@pytest.mark.parametrize("number", range(OLDEST, NEWEST + 1))
def test_the_bytes_on_the_wire_do_not_change(number: int) -> None:
    """Once there is a release, a change of these bytes is a new protocol number.

    ``python -m tests.averaging.message_examples`` writes the file of the newest number.
    """
    assert golden_file(number).read_text().splitlines() == golden_lines(number)


@pytest.mark.parametrize("number", range(OLDEST, NEWEST + 1))
def test_the_golden_bytes_of_each_number_are_read(number: int) -> None:
    for line in golden_file(number).read_text().splitlines():
        kind, _, encoded = line.partition(" ")
        data = bytes.fromhex(encoded)
        match kind:
            case "Commit":
                assert said.encode_commit(said.decode_commit(data)) == data
            case "Opening":
                assert said.encode_opening(said.decode_opening(data)) == data
            case _:
                assert said.encode(said.decode(data), number) == data


@pytest.mark.usefixtures("next_protocol")
def test_what_is_too_new_for_a_protocol_number_is_left_out_and_refused_if_present() -> None:
    """As if it came with the next number that a call says that a member leaves."""
    call = said.Call(3, HEAD, 29.5, leaves=True)
    assert said.decode(said.encode(call, NEXT), SPOKEN) == call
    assert said.decode(said.encode(call, NEWEST), SPOKEN) == said.Call(3, HEAD, 29.5)

    with pytest.raises(BadMessage, match="leaves is of protocol 2, the message of 1"):
        said.decode(bytes([NEWEST]) + said.encode(call, NEXT)[1:], SPOKEN)
    with pytest.raises(BadMessage, match="of protocol 1 that came with a later one"):
        said.decode(said.encode(said.Suspected(0, PeerId("a")), NEWEST), SPOKEN)


def test_another_protocol_is_refused_with_the_side_that_is_too_old() -> None:
    data = said.encode(EXAMPLES[0])

    with pytest.raises(BadMessage, match=r"protocol 3, .* speaks 1: this side is too old: upgrade"):
        said.decode(bytes([3]) + data[1:])
    with pytest.raises(BadMessage, match=r"protocol 1, .* 2 to 3: the other side is too old"):
        said.decode(data, (2, 3))


def test_a_commit_of_a_later_protocol_is_refused_as_such_whatever_else_is_in_it() -> None:
    fields: list[object] = [*msgspec.structs.astuple(FULL)]
    place = Commit.__struct_fields__.index("protocol")
    for later in ([*fields[:place], 3], [*fields[:place], 3, "a field of tomorrow"]):
        with pytest.raises(BadMessage, match=r"protocol 3, .*this side is too old: upgrade it"):
            said.decode_commit(msgspec.msgpack.encode(later))
    with pytest.raises(BadMessage, match="at most length"):
        said.decode_commit(msgspec.msgpack.encode([*fields, "a field of nobody"]))


@pytest.mark.parametrize(
    ("theirs", "ours", "found"),
    [
        ((1, 1), (1, 2), 1),
        ((1, 2), (1, 2), 2),
        ((2, 3), (1, 2), 2),
        ((1, 2), (2, 3), 2),
        ((3, 4), (1, 2), None),
        ((1, 1), (2, 3), None),
    ],
)
def test_two_sides_speak_the_newest_number_that_both_know(
    theirs: tuple[int, int], ours: tuple[int, int], found: int | None
) -> None:
    assert protocol.common(theirs, ours) == found
    if found is None:
        too_old = "this side" if theirs > ours else "the other side"
        assert protocol.advice(theirs, ours).startswith(f"{too_old} is too old")


def test_a_message_above_the_limit_is_refused() -> None:
    with pytest.raises(BadMessage, match="bytes; at most"):
        said.decode(bytes([NEWEST]) + bytes(said.MESSAGE_MAX_BYTES))


def test_a_full_roster_with_chains_fits_into_one_message() -> None:
    members = tuple(
        Entry(
            peer=PeerId("12D3KooW" + f"{index:044}"),
            incarnation=2**52,
            join=2**40,
            parent=0,
            base_version=2**40,
            staleness=8,
            mark=2**40,
            steps=2**40,
            tokens=2**52,
            reachable=True,
            claimed_tokens=2**52,
            batch_tokens_max=2**40,
            bytes_per_s=1e9,
            site="a home of ten machines",
            signature=bytes(64),
        )
        for index in range(said.ROSTER_MAX)
    )
    links = tuple(Link(2**40 + index, bytes(32), 2**52) for index in range(24))
    commit = msgspec.structs.replace(
        COMMIT,
        members=members,
        parents=links[:16],
        ancestors=(links,) * 16,
        reducers=tuple(entry.peer for entry in members),
        shares=(2**40,) * len(members),
    )

    message = said.Committed(0, said.encode_commit(commit), bytes(64))
    assert said.decode(said.encode(message)) == message
    assert said.decode_commit(message.commit) == commit


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"members": (COMMIT.members[0],) * 2}, "twice"),
        ({"shares": (1,)}, "shares for"),
        ({"shares": (0, 0)}, "no slice"),
        ({"eta": float("nan")}, "eta"),
        ({"mu": -1.0}, "mu"),
        ({"parents": COMMIT.parents * 2}, "no chain for each"),
        ({"ancestors": (COMMIT.parents,)}, "one for a single parent"),
        (
            {"members": (msgspec.structs.replace(COMMIT.members[0], parent=4),)},
            "parent that is not listed",
        ),
    ],
)
def test_a_commit_that_makes_no_sense_is_refused(changes: dict[str, object], problem: str) -> None:
    commit = msgspec.structs.replace(COMMIT, **changes)

    with pytest.raises(BadMessage, match=problem):
        said.decode_commit(said.encode_commit(commit))


@pytest.mark.parametrize(
    "message",
    [
        said.Ask(0, bytes(31)),
        said.Ask(-1, bytes(32)),
        said.Call(0, HEAD, float("inf")),
        said.Call(0, HEAD, -1.0),
        said.Redirect(0, 1, PeerId("x" * 65)),
        said.Pass(0, "x" * 301),
        said.Propose(0, bytes(32), 1, tuple(range(said.ROSTER_MAX + 1))),
        said.Behind(0, Head(1, bytes(32), HEAD.links * 20), bytes(32)),
    ],
)
def test_a_field_beyond_its_bound_is_refused(message: Message) -> None:
    with pytest.raises(BadMessage):
        said.decode(said.encode(message))


def test_the_round_is_named_by_every_byte_of_its_commit() -> None:
    other = msgspec.structs.replace(COMMIT, nonce=COMMIT.nonce + 1)

    assert said.digest(said.encode_commit(COMMIT)) != said.digest(said.encode_commit(other))
    assert isinstance(COMMIT, Commit) and isinstance(OPENING, Opening)
