"""Every table of what others can cause is filled with ten times its places of cheap keys.

What the entries of honest peers are worth, and the limits that liars have used up, outlive it. The
tables whose entries are all worth the same are listed with the reason why that costs nobody
anything. A table that is new in the source has to be added here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from averaging.guard.auditing import Auditing
from averaging.guard.kept_proofs import Kept, Verdict
from averaging.guard.rules.probation import Probation
from averaging.guard.rules.spot_checks import SpotChecks
from averaging.guard.rules.witness import Witness
from averaging.history.audit import Audit
from averaging.live.settings import AveragerSettings, RunTerms
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.policy import ProbationPolicy, RoundPolicy
from averaging.rules.reputation import Deed, Reputation
from dht.bounded_mapping import ALL, BoundedMapping
from dht.identity import PeerId, RunId
from dht.libp2p.framing.sealing import Ticket, Tickets
from dht.limits import Rate
from dht.membership.admission import Admission, Terms
from peer.agent.peer import Repeats
from tests.averaging.round.machines import machine

ROOT = Path(__file__).parent.parent
PACKAGES = ("dht", "averaging", "peer")

OF_THEIR_OWN = ("work seen", "tokens in states", "reputation")
"""Tables of a machine that are flooded by themselves."""

PLACES_MAX = 512
"""Larger tables are made smaller, as a flood reads all of a table again and again."""

HONEST = tuple(PeerId(name) for name in ("anna", "boris", "clara"))
LIAR = PeerId("liar")

HARMLESS = {
    "answered": "a peer that answered once is told of as reachable again",
    "answered with orders": "a peer is sent the order in force once more",
    "callers": "a peer that has just said hello is said hello to",
    "clock samples": "measured again at the next hello, and only of peers that count",
    "credentials not asked for": "a peer is asked for its credential once more",
    "tried addresses": "the addresses of a peer are tried once more",
    "distances": "set anew at each look, and connected peers are the youngest",
    "holders": "the key is searched for again",
    "marks": "the own learner's",
    "met addresses": "used for one verdict",
    "open bundles": "the own data",
    "outcomes of offers": "one word on a page",
    "outcomes of rounds": "own rounds, and rounds whose rosters name this machine",
    "own digests": "of states that this peer itself has made",
    "own readings": "the own learner's",
    "peers apart": "told again",
    "pieces ahead": "the own data",
    "reduced for others": "what a keeper has merged itself",
    "refused states": "states that this peer has taken and gone back from",
    "rounds not entered": "rounds whose rosters name this machine",
    "unanswered": "a peer is dialled once more before somebody listens",
    "told of orders": "a peer is sent the order in force once more",
}
"""Tables whose oldest entry is forgotten, and why nobody loses by it."""


@dataclass(frozen=True)
class Flood:
    """A table with entries that must stay, and what fills it."""

    table: BoundedMapping[Any, Any]
    stays: dict[Any, Any]
    cheap: Callable[[int], tuple[Any, Any]]


def key(number: int) -> PeerId:
    return PeerId(f"key{number}")


def worked(probation: Probation) -> Probation:
    """Three peers have merged some rounds, and the others none."""
    for _ in range(8):
        probation.saw_merged(HONEST, HONEST, 0.0)
    return probation


def tables_of_a_machine() -> Iterator[Flood]:
    """The tables that keep those who have worked before all others."""
    before = set(ALL)
    rounds = machine(others=HONEST)
    assert isinstance(rounds.peers.electors, Probation)
    worked(rounds.peers.electors)
    for table in set(ALL) - before:
        if table.name in HARMLESS or table.name in OF_THEIR_OWN:
            continue
        match table.name:
            case "certificates":
                signed: dict[Any, Any] = {b"link": {HONEST[0]: b"signature"}}
                yield Flood(table, signed, lambda number: (number, {key(number): b"signature"}))
            case _:
                stays = dict.fromkeys(HONEST, "kept")
                yield Flood(table, stays, lambda number: (key(number), None))


def tables_of_what_liars_do() -> Iterator[Flood]:
    reputation = Reputation()
    for _ in range(3):
        reputation.saw(LIAR, Deed.LIES, 0.0)
        reputation.saw(LIAR, Deed.WASTES_TIME, 0.0)
        reputation.led_nowhere(LIAR, 0.0, fragment=0, version=0)
    yield Flood(
        reputation._records,
        dict(reputation._records),
        lambda number: struck_once(reputation, number),
    )
    checks = SpotChecks(reputation, every_steps=1, random=lambda: 0.5)
    yield Flood(checks._unclear, {LIAR: 3.0}, lambda number: (key(number), 1.2))
    yield Flood(checks._named, {LIAR: set(HONEST)}, lambda number: (key(number), {key(0)}))
    told = Repeats()
    told.is_due("the disk is full", now=99.0)
    yield Flood(told._told, dict(told._told), lambda number: (str(number), (9.0, 60.0)))


def struck_once(reputation: Reputation, number: int) -> tuple[Any, Any]:
    """A key does once one of what keys of liars can do."""
    deed = (Deed.LIES, Deed.WASTES_TIME, Deed.LEADS_NOWHERE, Deed.STAYS_AWAY)[number % 4]
    reputation.saw(key(number), deed, 1.0)
    entry = key(number), deed.ground, 0
    return entry, reputation._records.get(entry)


def tables_of_audits() -> Iterator[Flood]:
    probation = worked(Probation(ProbationPolicy(rounds=4)))

    def by(leader: PeerId) -> Any:
        return SimpleNamespace(commit=SimpleNamespace(leader=leader))

    around = SimpleNamespace(
        host=SimpleNamespace(peer_id=PeerId("me")),
        me=SimpleNamespace(identity=SimpleNamespace(sign=bytes)),
        terms=RunTerms(RunId("run"), Layout.build([TensorSpec("w", (4,))], 1), RoundPolicy()),
        settings=AveragerSettings(),
        around=SimpleNamespace(verify=None),
        strike=lambda peer: None,
        spawn=None,
        worth=probation.worth,
        is_established=lambda peer: True,
        threads=None,
        now=lambda: 0.0,
    )
    audits = Auditing(around, probation)  # type: ignore[arg-type]
    yield Flood(
        audits.kept_proofs.proofs,
        {b"proof": Kept(HONEST[0], 1000)},
        lambda number: (number, Kept(key(number), 1 << 20)),
    )

    def verdict(peer: PeerId) -> Verdict:
        return Verdict(peer, "lied", b"", probation.worth(peer))

    yield Flood(
        audits.kept_proofs.verdicts,
        {HONEST[0]: verdict(HONEST[0])},
        lambda number: (key(number), verdict(key(number))),
    )
    witness = Witness(None, probation.worth)  # type: ignore[arg-type]
    yield Flood(
        witness._rounds, {b"round": by(HONEST[0])}, lambda number: (number, by(key(number)))
    )


def tables_of_work() -> Iterator[Flood]:
    """Those who go on working are remembered, however many merge once beside them."""
    probation = Probation(ProbationPolicy(rounds=4))
    probation.took_state(90, dict.fromkeys(HONEST, 1000))
    worked(probation)
    yield Flood(
        probation._tokens_unseen, dict(probation._tokens_unseen), lambda number: (key(number), 1)
    )

    def merges_once(number: int) -> tuple[PeerId, Any]:
        probation.saw_merged([key(number), *HONEST], [key(number), *HONEST], 1.0)
        return key(number), probation._seen.get(key(number))

    yield Flood(probation._seen, dict(probation._seen), merges_once)
    votes = Audit(probation.worth)._votes
    stays = {(b"lineage", peer): b"digest" for peer in HONEST}
    yield Flood(votes, stays, lambda number: ((b"lineage", key(number)), b"another"))


def tables_of_limits() -> Iterator[Flood]:
    """Those that have used up what they may are not forgotten for those that have used little."""
    rate = Rate[PeerId](1.0, 16.0, authors_max=64)
    assert [rate.spend(LIAR, 0.0) for _ in range(17)].count(True) == 16
    yield Flood(rate._left, dict(rate._left), lambda number: spent_once(rate, number))
    tickets = Tickets(life_s=30.0, tickets_max=128)
    yield Flood(
        tickets._issued,
        {bytes([n]): (peer, Ticket.new(), 30.0) for n, peer in enumerate(HONEST)},
        lambda number: (b"%d" % number, (key(number % 32), Ticket.new(), 30.0)),
    )
    admission = Admission(Terms("run", "invited"))  # type: ignore[arg-type]

    def invited_by(link: str) -> Any:
        return SimpleNamespace(invite=SimpleNamespace(key=link))

    yield Flood(
        admission._shown,
        {peer: invited_by(f"link of {peer}") for peer in HONEST},
        lambda number: (key(number), invited_by("one link")),
    )


def spent_once(rate: Rate[PeerId], number: int) -> tuple[PeerId, Any]:
    rate.spend(key(number), 1.0)
    return key(number), rate._left.get(key(number))


FLOODS = (
    tables_of_a_machine,
    tables_of_what_liars_do,
    tables_of_audits,
    tables_of_work,
    tables_of_limits,
)


@pytest.mark.parametrize("floods", FLOODS, ids=lambda each: each.__name__)
def test_cheap_keys_cost_the_honest_nothing(floods: Callable[[], Iterator[Flood]]) -> None:
    for flood in floods():
        table = flood.table
        table.limit = min(table.limit, PLACES_MAX)
        for kept, value in flood.stays.items():
            table[kept] = value
        for number in range(10 * table.limit):
            cheap, value = flood.cheap(number)
            if value is not None or cheap not in table:
                table[cheap] = value
            assert len(table) <= table.limit, table.name
            assert table.bytes_held <= table.bytes_max, table.name
        lost = flood.stays.keys() - table.keys()
        assert not lost, f"the table '{table.name}' has forgotten {lost}"


def test_each_table_is_flooded_here_or_named_as_harmless() -> None:
    flooded = {flood.table.name for floods in FLOODS for flood in floods()}
    named = set(tables_in_the_source())
    assert named - flooded - HARMLESS.keys() == set()
    assert HARMLESS.keys() <= named
    by_age = {name for name, worth in tables_in_the_source().items() if worth == "by_age"}
    shared = {"credentials", "lane tickets"}
    assert by_age - shared == HARMLESS.keys(), "each author has a share of the others"


def test_each_table_stands_in_the_security_document() -> None:
    told = set(re.findall(r"`([a-z ]+)`", (ROOT / "docs/understand/remembered.md").read_text()))
    assert set(tables_in_the_source()) <= told


@cache
def tables_in_the_source() -> dict[str, str]:
    """The names of the tables that the source makes, each with what it says of worth."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "simulate" in path.as_posix() or path.name == "bounded_mapping.py":
                continue
            if "BoundedMapping" not in (text := path.read_text()):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and "BoundedMapping" in ast.unparse(node.func):
                    name = ast.literal_eval(node.args[0])
                    (worth,) = (each.value for each in node.keywords if each.arg == "worth")
                    found[name] = ast.unparse(worth)
    return found


BUSY_WORDS = re.compile(
    r"\btoo many (calls|streams|bulk|rounds|fetches|dial-backs|others|requests)\b"
    r"|meetings at once|no room for uploads|group is full|received already"
    r"|not kept here|is kept here"
    r"|as an audit needs"
)
NO_REFUSAL_OF_A_BUSY_PEER = {"that proof is not kept here"}
"""What only one says that had named the proof and never had it."""


def test_each_answer_of_a_busy_peer_stands_with_its_consequence_in_the_document() -> None:
    text = (ROOT / "docs/understand/remembered.md").read_text()
    _, _, table = text.partition("## What a busy peer answers")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    named = {answer for row in rows for answer in re.findall(r"`([^`]+)`", row)}
    said = {answer.rstrip("\n") for answer in busy_answers()}
    assert said - NO_REFUSAL_OF_A_BUSY_PEER == named


def busy_answers() -> Iterator[str]:
    """The constants of the source that read like answers of a busy peer."""
    for package in ("dht", "averaging", "peer/agent", "peer/extras/site", "peer/views"):
        for path in (ROOT / package).rglob("*.py"):
            if not BUSY_WORDS.search(source := path.read_text()):
                continue
            tree = ast.parse(source)
            alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
            docstrings = {id(value) for value in alone}
            for node in ast.walk(tree):
                if not isinstance(node, ast.Constant) or id(node) in docstrings:
                    continue
                if isinstance(node.value, str) and BUSY_WORDS.search(node.value):
                    yield node.value
