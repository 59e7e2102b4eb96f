"""Event logs become stories. The logs here are written by the event log itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from peer import cli
from peer.errors import Unusable
from peer.extras.explain import (
    Log,
    aligned,
    overview,
    peer_story,
    read_logs,
    round_story,
    timeline,
)
from peer.views.event_log import EventLog, read_events
from tests.peer.events.written_events import ANNA, BORIS, CLARA, ROUND, a_round

Said = tuple[float, str, Mapping[str, Any]]
Tell = Callable[..., Path]


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    """Writes one peer's log and returns its folder."""

    def write(peer: str, name: str, *said: Said) -> Path:
        clock = [said[0][0]]
        folder = tmp_path / name
        (folder / "events.jsonl").unlink(missing_ok=True)
        log = EventLog(
            folder / "events.jsonl", owner={"peer": peer, "name": name}, wall_time=lambda: clock[0]
        )
        for clock[0], event, fields in said:
            log.write(event, fields)
        log.close()
        return folder

    return write


def logs_of(*folders: Path) -> list[Log]:
    return aligned(
        [
            log
            for folder in folders
            for log in read_logs(read_events(folder / "events.jsonl"), place=folder.name)
        ],
    )


def texts(lines: list[Any]) -> str:
    return "\n".join(f"{line.who}: {line.text}" for line in lines)


def two_peers(tell: Tell, *, off_s: float = 0.0) -> list[Log]:
    anna = tell(
        ANNA,
        "anna",
        (99.0, "round", a_round(fragment=1, round="cd" * 32, left_out={})),
        (100.0, "joining", {"fragment": 2, "leader": BORIS}),
        (100.5, "joining", {"fragment": 1, "leader": CLARA}),
        (101.5, "heard_finished", {"fragment": 2, "peer": BORIS}),
        (102.0, "round", a_round()),
    )
    boris = tell(
        BORIS,
        "boris",
        (50.0 + off_s, "joining", {"fragment": 2, "leader": CLARA}),
        (51.0 + off_s, "idle", {"fragment": 2}),
        (100.2 + off_s, "gathering", {"fragment": 2, "group": 3}),
        (
            101.0 + off_s,
            "closed",
            {"fragment": 2, "members": 3, "live": 3, "reason": "all came", "waited_s": 0.8},
        ),
        (102.1 + off_s, "round", a_round(seconds=1.9)),
    )
    return logs_of(anna, boris)


def test_the_story_of_a_round_is_told_by_every_log(tell: Tell) -> None:
    story = texts(round_story(two_peers(tell), "2/7"))
    assert "led by boris, 3 members: anna, boris, aClara" in story
    assert "boris: closed, fragment 2, members 3, live 3, reason all came, waited_s 0.8" in story
    assert "merged: anna 75% (24 steps, 1.54 k tokens), boris 25%" in story
    assert "left out: aClara, because not in every slice by the deadline" in story
    assert "anna: fragment 2 version 7: done in 1.5 s with its work; 22.1 kB up" in story
    assert "no report of aClara in these logs" in story


def test_a_round_is_found_by_the_beginning_of_its_id_too(tell: Tell) -> None:
    logs = two_peers(tell)
    assert round_story(logs, ROUND[:8]) == round_story(logs, "2/7")
    with pytest.raises(Unusable, match="2/7"):
        round_story(logs, "2/8")


@pytest.mark.parametrize(
    "wanted", ["9", "a", "", "ababa", "2/", "/7", "2/x", "2/7/1", "1/" + "7" * 5000, "x"]
)
def test_what_names_no_round_is_told_with_what_does(tell: Tell, wanted: str) -> None:
    """A number alone was the beginning of an id: `--round 9` told of any round, or of none."""
    logs = [*two_peers(tell), *logs_of(tell(CLARA, "c", (1.0, "round", a_round(round="9" * 64))))]
    with pytest.raises(Unusable, match=r"such as 2/7, or the first 6 or more characters of"):
        round_story(logs, wanted)
    assert round_story(logs, "9" * 6)
    assert round_story(logs, ROUND[:6].upper())


def test_the_story_of_a_round_has_only_events_that_led_to_it(tell: Tell) -> None:
    story = round_story(two_peers(tell), "2/7")
    said = [(line.who, line.text) for line in story]
    assert ("anna", "joining, fragment 2, leader boris") in said
    assert ("boris", "gathering, fragment 2, group 3") in said
    assert not any("aClara" in text and text.startswith("joining") for _, text in said), said
    times = [line.at for line in story]
    assert times == sorted(times)
    assert story[0].text.startswith("round abababab")


def test_a_clock_that_is_an_hour_off_is_corrected_by_the_rounds_in_common(tell: Tell) -> None:
    right, wrong = two_peers(tell), two_peers(tell, off_s=3600.0)
    assert wrong[1].clock_off_s == pytest.approx(-3600.1)
    # boris' last word defines his clock; it came 0.1 s after anna's.
    assert [log.name for log, _ in timeline(wrong)][-2:] == ["anna", "boris"]
    assert [line.text for line in round_story(wrong, "2/7")] != []
    assert len(round_story(wrong, "2/7")) == len(round_story(right, "2/7"))
    assert "the clock of boris was 3600.1 s ahead" in texts(overview(wrong))


def test_small_clock_offsets_are_not_corrected(tell: Tell) -> None:
    assert [log.clock_off_s for log in two_peers(tell, off_s=0.5)] == [0.0, 0.0]


def test_the_story_of_a_peer_sums_up_ordinary_rounds(tell: Tell) -> None:
    fine = [
        (100.0 + n, "round", a_round(round=f"{n:064x}", left_out={}, contributed=n != 3))
        for n in range(5)
    ]
    anna = tell(
        ANNA,
        "anna",
        (90.0, "phase", {"name": "ready", "text": "in the run"}),
        *fine,
        (110.0, "work_lost", {"fragment": 1, "tokens": 512, "reason": "crash"}),
    )
    boris = tell(
        BORIS,
        "boris",
        (89.0, "peer_joined", {"text": "clara joined", "peer": CLARA, "name": "clara"}),
        (105.0, "upload_refused", {"peer": ANNA, "slice": 0, "reason": f"norm of {ANNA} is huge"}),
        (106.0, "upload_refused", {"peer": ANNA, "slice": 0, "reason": f"norm of {ANNA} is huge"}),
    )
    logs = logs_of(anna, boris)
    assert [(line.who, line.text) for line in peer_story(logs, "anna")] == [
        ("anna", "ready: in the run"),
        ("anna", "5 rounds finished, 4 with its work"),
        ("boris", "refused slice 0 of anna: norm of anna is huge (2 times)"),
        (
            "anna",
            "lost 512 tokens of work in fragment 1: the process that did it ended before it was "
            "merged (crash)",
        ),
    ]
    assert texts(peer_story(logs, "clara")) == "boris: clara joined"
    with pytest.raises(Unusable, match=r"anna -> .*, boris -> .*, clara -> "):
        peer_story(logs, "dora")


def test_the_story_of_a_peer_tells_why_it_was_left_out(tell: Tell) -> None:
    story = texts(peer_story(two_peers(tell), CLARA[-6:]))
    assert "anna: round 2/7 left it out: not in every slice by the deadline" in story


def test_the_summary_names_the_most_frequent_problems(tell: Tell) -> None:
    given_up = a_round(outcome="given up", reason="the deadline has come", contributed=False)
    anna = tell(ANNA, "anna", (1.0, "round", a_round()), (2.0, "round", given_up))
    story = texts(overview(logs_of(anna)))
    assert "1 round, 1 of them finished" in story
    assert "left out once: aClara: not in every slice" in story
    assert "once: fragment 2 version 7: gave up after 1.5 s, work kept" in story


def test_an_unknown_event_of_a_later_version_is_told_by_its_fields(tell: Tell) -> None:
    anna = tell(ANNA, "anna", (1.0, "sang", {"song": "la"}), (2.0, "closed", {"fragment": 1}))
    assert "sang, song la" in texts(peer_story(logs_of(anna), "anna"))


def test_a_folder_that_had_two_keys_tells_of_two_peers(tell: Tell) -> None:
    """All that the folder's log had was told of the peer of the first key."""
    first = tell(ANNA, "anna", (100.0, "not_finite", {"fragment": 0, "reason": "a"}))
    kept = (first / "events.jsonl").read_bytes()
    second = tell(BORIS, "anna", (200.0, "not_finite", {"fragment": 0, "reason": "b"}))
    again = tell(ANNA, "anna", (300.0, "not_finite", {"fragment": 0, "reason": "c"}))
    assert first == second == again
    path = first / "events.jsonl"
    later = [path.read_bytes()]
    tell(BORIS, "anna", (200.0, "not_finite", {"fragment": 0, "reason": "b"}))
    path.write_bytes(kept + path.read_bytes() + later[0])

    logs = logs_of(first)
    assert [log.peer for log in logs] == [ANNA, BORIS]
    story = texts(peer_story(logs, ANNA))
    assert "(a)" in story and "(b)" not in story and "(c)" in story
    assert "(b)" in texts(peer_story(logs, BORIS))
    assert "1 round" not in texts(overview(logs)) and "2 logs of" in texts(overview(logs))


def test_the_command_reads_files_and_folders(
    tell: Tell, capsys: pytest.CaptureFixture[str]
) -> None:
    two_peers(tell)
    folder = tell(CLARA, "clara", (100.0, "alone", {"fragment": 0}))
    logs = [str(folder.parent / "anna"), str(folder.parent / "boris" / "events.jsonl")]
    assert cli.run(["explain", *logs, "--round", "2/7"]) == 0
    assert "merged: anna 75%" in capsys.readouterr().out
    assert cli.run(["explain", *logs, "--peer", "boris", "--json"]) == 0
    story = json.loads(capsys.readouterr().out)
    assert {"at", "who", "text"} == story["story"][0].keys()


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (["--round", "9/9"], "nothing about round 9/9 in these logs"),
        (["--peer", "nobody"], "no peer 'nobody' is known here; known are anna -> "),
    ],
)
def test_a_round_or_peer_that_is_in_no_log_is_an_error_of_one_line(
    wanted: list[str], says: str, tell: Tell, capsys: pytest.CaptureFixture[str]
) -> None:
    anna = tell(ANNA, "anna", (1.0, "alone", {"fragment": 0}))
    assert cli.run(["explain", str(anna), *wanted]) == 2
    assert says in capsys.readouterr().err
    assert cli.run(["explain", str(anna / "nothing")]) == 2
    assert "no event log" in capsys.readouterr().err
    (anna.parent / "run.toml").write_text("name = 'x'")
    assert cli.run(["explain", str(anna.parent / "run.toml")]) == 2
    assert "there is no event in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        b'{"at":1,"event":"round"}',
        b'{"at":1,"event":"round","round":"ab","fragment":0,"version":1,"outcome":"finished",'
        b'"seconds":1.0,"reason":"","left_out":[],"members":null,"contributors":[]}',
        b'{"at":1e300,"event":"alone"}',
        b'{"at":-1e300,"event":"alone"}',
        b'{"at":1,"event":["alone"]}',
        b"[1]",
        b"\xff\x00\xfe",
        b'{"at":1,"event":"joined","text":"\\u001b[2J"}',
    ],
)
@pytest.mark.parametrize("how", [[], ["--round", "2/7"], ["--peer", "anna"]])
def test_the_rest_of_a_damaged_log_is_told(
    line: bytes, how: list[str], tell: Tell, capsys: pytest.CaptureFixture[str]
) -> None:
    anna = tell(ANNA, "anna", (1.0, "round", a_round()))
    path = anna / "events.jsonl" if anna.is_dir() else anna
    path.write_bytes(path.read_bytes() + line + b"\n")
    assert cli.run(["explain", str(path), *how]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()
