"""Records and statuses with extreme, but valid values are shown, and quickly."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.identity import PeerId
from dht.membership.table import PeerTable, bucket_key
from dht.records import (
    COUNT_MAX,
    NUMBER_MAX,
    NUMBER_MIN,
    VERSION_MAX,
    PeerRecord,
    pack_versions,
    seal,
    unpack_versions,
)
from peer import status
from peer.agent.keeper import behind
from peer.agent.network import peer_view
from peer.joining.visit import RunStatus, Silent, status_lines
from peer.status import time_left_s
from peer.views.agent_page import row_of
from tests.fuzz.extremes import extremes
from tests.fuzz.targets import ANNA, RUN
from tests.peer.statuses import a_status

FEW = settings(max_examples=60, deadline=None, derandomize=True)
OBEYED = ("\x1b[2J", "\x9b2J", "\r", "\n", "\x00", "\u202e", "\u200f", "\u200b", "\u2028")
"""Texts that a terminal obeys, or that turn the direction of the text around them."""

NUMBERS = st.none() | st.sampled_from([NUMBER_MIN, 1.0, NUMBER_MAX])
VERSIONS = st.sampled_from([(), (0,), (VERSION_MAX, 0), (VERSION_MAX,) * 256])


@FEW
@given(extremes(status.PeerStatus, peer=st.just("p" * 64)))
def test_an_extreme_status_is_shown(made: status.PeerStatus) -> None:
    heard = status.CALL.decode(status.CALL.encode(made))
    seen = RunStatus("ab" * 32, (heard, heard, a_status()), {})
    assert all(line.isprintable() for line in status_lines(seen))
    json.dumps(seen.plain(), allow_nan=False)


def test_no_text_of_a_status_moves_the_text_around_it() -> None:
    texts = [
        f.name
        for f in msgspec.structs.fields(status.PeerStatus)
        if f.type in (status.Text, status.Words)
    ]
    assert len(texts) >= 8
    for name in texts:
        for text in OBEYED:
            with pytest.raises(ValueError, match="cannot be printed"):
                status.CALL.decode(status.CALL.encode(a_status(**{name: text})))


@FEW
@given(
    extremes(
        PeerRecord,
        protocol=st.sampled_from([(0, 0), (0, COUNT_MAX), (COUNT_MAX, COUNT_MAX)]),
        step_time_s=NUMBERS,
        link_bytes_s=NUMBERS,
        versions=VERSIONS.map(pack_versions),
    )
)
def test_an_extreme_record_is_taken_or_refused_and_shown(made: PeerRecord) -> None:
    key = bucket_key(RUN, "")
    try:
        data = seal(made, ANNA, key=key, sequence=1, ttl_s=30.0)
    except ValueError:
        return  # it is too large
    table = PeerTable(RUN, PeerId("me"))
    assert table.take(data, now=0.0)
    (member,) = table
    assert len(table.changes(1.0)) == len(table.live(1.0)) == table.size_estimate(1.0) - 1
    for told in (None, (2**62, 1e18), (0, float("nan"))):
        json.dumps(msgspec.structs.asdict(row_of(member, told, 1.0)), allow_nan=False)
    peer_view(member)
    assert 0 <= behind((0, 0), [unpack_versions(made.versions)]) <= VERSION_MAX
    left_s = time_left_s(
        tokens_left=1e9,
        step_tokens=2.0**53,
        step_times_s=[made.step_time_s or 0.0],
        date_left_s=None,
    )
    assert left_s is None or left_s >= 0
    silent = Silent(made.name, made.role, made.step_time_s, "it does not answer")
    lines = status_lines(RunStatus("ab" * 32, (), {ANNA.peer_id: silent}))
    assert all(line.isprintable() for line in lines)
