"""The table of events agrees with the source, with its documentation, and with its readers."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from docs.site.emissions import PASSED_ON, Computed, Emission, emissions, everywhere
from docs.site.event_fields import fields_of
from peer.events.board import Board
from peer.events.names import Names
from peer.events.sentences import Fields, worded
from peer.events.table import REPORTED, TABLE, Audience, Event, on_screen, own_offer
from peer.simulate import settings
from tests.peer.events.written_events import a_round


@cache
def in_source() -> list[Emission | Computed]:
    return list(everywhere())


def faults(found: Iterable[Emission | Computed], table: dict[str, Event]) -> list[str]:
    """Everything in which emissions and rows differ."""
    told = []
    emitted = set()
    for each in found:
        if isinstance(each, Computed):
            told.append(f"{each.place} computes the name of an event: {each.source}")
            continue
        emitted.add(each.name)
        if each.name not in table:
            told.append(f"{each.place} emits {each.name}, which has no row in the table")
    return told + [f"nothing emits {name}" for name in sorted(table.keys() - emitted)]


def test_the_table_has_exactly_the_events_that_are_emitted() -> None:
    assert not faults(in_source(), dict(TABLE))


@pytest.mark.parametrize(
    ("place", "source", "fault"),
    [
        ("averaging/round/x.py", "self._peer.event('sang')", "emits sang, which has no row"),
        ("averaging/round/x.py", "Note('sang', {})", "emits sang"),
        ("averaging/round/x.py", "note('void' if x else 'sang')", "emits sang"),
        ("dht/presence/x.py", "self._events.tell('sang', text)", "emits sang"),
        ("peer/agent/x.py", "self._owner.told('sang', {})", "emits sang"),
        ("peer/extras/hosting/x.py", "station.event('sang')", "emits sang"),
        ("peer/trainer/x.py", "self._events.append(('sang', {}))", "emits sang"),
        ("peer/views/x.py", "say({'event': 'sang'})", "emits sang"),
        ("peer/agent/x.py", "def f(name): self.event(name)", "computes the name of an event"),
        ("averaging/round/x.py", "self.event(f'{x}_y')", "computes the name of an event"),
    ],
)
def test_a_planted_emission_without_a_row_is_a_fault(place: str, source: str, fault: str) -> None:
    planted = emissions(f"def here():\n    {source}\n", place)
    (found,) = faults([*in_source(), *planted], dict(TABLE))
    assert fault in found


@pytest.mark.parametrize(
    "source", ["self.event('void', song='la')", "told = {'song': 1}\n    Happened('void', told)"]
)
def test_the_fields_of_an_event_are_read_where_it_is_emitted(source: str) -> None:
    (found,) = emissions(f"def here():\n    {source}\n", "peer/agent/x.py")
    assert isinstance(found, Emission) and found.fields == {"song"}


def test_a_planted_row_that_nothing_emits_is_a_fault() -> None:
    row = Event("sang", "sang", Audience.LOG)
    assert faults(in_source(), {**TABLE, "sang": row}) == ["nothing emits sang"]


def test_a_function_that_passes_a_name_on_emits_nothing_itself() -> None:
    source = "def event(self, name): self.log.write(name, {})\n"
    assert list(emissions(source, "peer/agent/x.py")) == []


def test_the_faults_of_an_experiment_have_rows() -> None:
    kinds = get_args(get_type_hints(settings.Event)["kind"])
    assert PASSED_ON["event.kind"] == kinds


def test_events_that_an_agent_passes_on_have_that_audience() -> None:
    reported = {
        each.name
        for each in in_source()
        if isinstance(each, Emission)
        and each.place.startswith("peer/agent/")
        and each.called.endswith((".event", ".told", ".tell", "_on_event", "Happened"))
    }
    assert reported
    assert not [name for name in reported if not TABLE[name].audience & REPORTED]


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_a_sentence_uses_only_fields_of_its_event(row: Event) -> None:
    for sentence in (row.sentence, row.on_screen, row.offer):
        if isinstance(sentence, str):
            spoken = {field for _, field, _, _ in string.Formatter().parse(sentence) if field}
            assert spoken <= fields_of(row.name).keys(), row.name
        elif sentence is not None:
            source = Path(str(sentence.__code__.co_filename)).read_text(encoding="utf-8")
            (found,) = [
                each
                for each in ast.walk(ast.parse(source))
                if isinstance(each, ast.FunctionDef) and each.name == sentence.__name__
            ]
            spoken = {
                str(each.value)
                for each in ast.walk(found)
                if isinstance(each, ast.Constant) and str(each.value) in ALL_FIELDS
            }
            assert spoken <= fields_of(row.name).keys() | {"finished", "replay"}, row.name


ALL_FIELDS = {field for name in TABLE for field in fields_of(name)}

VALUES: dict[str, Any] = {"int": 3, "tokens": 512, "bytes": 1000, "s": 1.5, "float": 0.25}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_every_event_that_a_screen_shows_has_a_sentence_when_its_fields_are_there(
    row: Event,
) -> None:
    if row.sentence is None:
        seen = row.audience & (Audience.SCREEN | Audience.PEER | Audience.TROUBLE)
        assert not seen or "text" in fields_of(row.name)
        return
    values = {field: VALUES.get(kind, "text") for field, kind in fields_of(row.name).items()}
    event = {"event": row.name, **values, **(a_round() if row.name == "round" else {})}
    for sentence in (row.sentence, row.on_screen or row.sentence, row.offer or row.sentence):
        text = worded(sentence, event)
        assert text and "{" not in text, row.name


def test_the_story_of_a_round_has_events_of_its_fragment_only() -> None:
    told = {row.name for row in TABLE.values() if row.audience & Audience.ROUND}
    assert not [name for name in told if "fragment" not in fields_of(name)]


@pytest.mark.parametrize("name", [n for n, row in TABLE.items() if row.audience & Audience.LOG])
def test_only_events_for_metrics_change_the_figures_of_the_page(name: str) -> None:
    board = Board(Names({}))
    board.sample(tokens=1, loss=None)
    before = board.plain() | {"events": []}
    some = {"loss": 1.0, "tokens": 1, "peer": "anna", "name": "anna"}
    fields = a_round() if name == "round" else some
    board.note({"at": 1.0, "event": name, "text": "", **fields})
    changed = board.plain() | {"events": []} != before
    assert changed == bool(TABLE[name].audience & Audience.METRICS)


ROUND: Fields = {
    "event": "round",
    "fragment": 2,
    "version": 7,
    "members": ["a", "b", "c"],
    "contributed": True,
}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (ROUND, "fragment 2 version 7: 3 peers, with my work"),
        ({**ROUND, "contributed": False}, "without my work"),
        ({"event": "round_missed", "fragment": 1, "reason": "late"}, "round missed, work kept"),
        ({"event": "peer_joined", "peer": "12D3", "name": "calm-otter"}, "calm-otter joined"),
        ({"event": "peer_lost", "peer": "12D3", "name": ""}, "12D3 lost"),
        ({"event": "agent_died", "exit_code": -9, "restart_in_s": 0.5}, "training goes on"),
        ({"event": "page", "url": "http://[::1]:7777/"}, "web page: http://[::1]:7777/"),
        (
            {"event": "run_page", "url": "http://192.168.1.5:8080/"},
            "public page of the run: http://192.168.1.5:8080/ (others who reach this machine can",
        ),
        ({"event": "measured", "loss": 1.25, "tokens": 4_500_000}, "held-out loss 1.250 at 4.5 M"),
        ({"event": "phase", "text": "looking for peers"}, "looking for peers"),
        ({"event": "over", "reason": "the run has used its tokens"}, "used its tokens"),
        (
            {"event": "phase", "name": "fetching", "text": "downloading", "done": 0.5},
            "ing: [#####     ] 50%",
        ),
        ({"event": "phase", "name": "leaving", "text": "enough"}, "leaving: enough"),
        ({"event": "fetch_failed", "reason": "nobody to ask"}, "nobody to ask; trying again"),
        (
            {"event": "diverged", "fragment": 1, "majority": ["12D3"], "with_me": 1},
            "or the processor of this machine may be faulty",
        ),
        ({"event": "state_adopted", "fragment": 1, "version": 9, "how": "replay"}, "version 9"),
        (
            {
                "event": "state_adopted",
                "fragment": 1,
                "version": 9,
                "how": "state",
                "rebased": True,
                "from_version": 27,
            },
            "fragment 1: took version 9 of the others in place of its own version 27",
        ),
        ({"event": "given_up", "tokens": 155_000}, "lost 155 k tokens of its work"),
        ({"event": "last_offers", "merged": True, "alone": False}, "handed over"),
        ({"event": "last_offers", "merged": True, "alone": True}, "this peer's own state"),
        ({"event": "optimizer_restored", "step": 12}, "at step 12"),
        ({"event": "exported", "path": "/model"}, "wrote /model"),
        ({"event": "reachability", "text": "reachable: boris dialled it"}, "boris dialled it"),
        ({"event": "something_new", "a": 1}, "something new, a 1"),
    ],
)
def test_an_event_has_a_sentence_for_the_screen(fields: Fields, says: str) -> None:
    assert says in (on_screen(fields) or "")


def test_a_peer_of_another_run_is_not_on_the_screen() -> None:
    """Each peer of each run that meets at the same bootstrap peer was a line of 200 characters."""
    assert not on_screen({"event": "other_run", "text": "boris takes part in run 1, not in run 2"})


def test_an_event_for_programs_only_is_not_on_the_screen() -> None:
    assert on_screen({"event": "adopted", "fragment": 0, "version": 1}) is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {**ROUND, "weight": 0.314, "contributors": 3},
            "merged into fragment 2 version 7, 31% of the work of 3 peers",
        ),
        (
            {**ROUND, "contributed": False, "left_out": "too long"},
            "not merged into fragment 2 version 7: too long; kept for the next round",
        ),
        ({**ROUND, "contributed": False}, "every reducer in time; kept"),
        (
            {"event": "round_missed", "fragment": 1, "reason": "boris left"},
            "fragment 1 not merged: boris left; kept for the next round",
        ),
        (
            {"event": "not_merged", "fragment": 0, "reason": "1 of 2 required peers joined"},
            "fragment 0 not merged: 1 of 2 required peers joined; kept for the next round",
        ),
    ],
)
def test_the_result_of_an_offer_has_a_sentence_with_the_reason(fields: Fields, says: str) -> None:
    assert says in (own_offer(fields) or "")


def test_other_events_say_nothing_of_an_offer() -> None:
    assert own_offer({"event": "peer_joined", "name": "boris"}) is None
