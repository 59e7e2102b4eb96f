"""Examples of what tallies are made of."""

from __future__ import annotations

from collections.abc import Mapping

from averaging.history.merged_map import Mark, MergedMap
from dht.identity import Identity, PeerId, RunId
from peer.extras.credit.accounting.tally import Tally, stated

RUN = RunId("5f" * 32)
ANNA, BORIS, CLARA, DORA = (Identity.from_seed(letter * 32) for letter in (b"a", b"b", b"c", b"d"))
NAMES = {each.peer_id: name for each, name in zip((ANNA, BORIS, CLARA), "ABC", strict=True)}


def merged(tokens: Mapping[Identity, int]) -> MergedMap:
    """The merged map of a state with so many tokens of each peer."""
    return MergedMap({peer.peer_id: Mark(1, 1, n) for peer, n in tokens.items()})


def tally(*maps: Mapping[Identity, int], run: RunId = RUN) -> Tally:
    """The tally of a peer whose states have these tokens, one map for each fragment."""
    made = Tally(run)
    made.count(map(merged, maps))
    return made


def named(tokens: Mapping[PeerId, int]) -> dict[str, int]:
    return {NAMES[peer]: count for peer, count in tokens.items()}


def a_tally(*, run: RunId = RUN) -> Tally:
    """Anna's tally of a run of two contributors."""
    made = tally({ANNA: 10, BORIS: 5}, {ANNA: 11, BORIS: 5}, run=run)
    made.unite((stated(ANNA, run, 1, "anna"), stated(BORIS, run, 2, "boris")))
    return made
