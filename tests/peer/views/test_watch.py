"""Events become sentences and JSON lines."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dht.identity import Identity, PeerId
from peer.bridge.messages import Fields
from peer.joining.link import only_from
from peer.status import HeldOut, PeerRow
from peer.trainer.loop import Outcome
from peer.trainer.session import Run
from peer.views.screen import ON_A_LINE
from peer.views.watch import (
    LEAVING,
    JsonReporter,
    PlainReporter,
    ScreenReporter,
    Watch,
    done,
    outcome_text,
    progress_line,
    sentence,
    with_whole_shares,
)
from tests.peer.statuses import a_status

ROUND: Fields = {
    "event": "round",
    "fragment": 2,
    "version": 7,
    "members": ["a", "b", "c"],
    "contributed": True,
}


def test_a_loss_that_is_not_finite_is_valid_json() -> None:
    said: list[str] = []
    with JsonReporter(said.append) as reporter:
        reporter.on_event({"event": "measured", "loss": float("nan")})
        reporter.tell_progress(cast(Run, SimpleNamespace(status=a_status(loss=float("inf")))))
    assert [json.loads(line)["loss"] for line in said] == [None, None]


def test_the_last_line_says_how_it_goes_on_from_the_folder() -> None:
    held_out = HeldOut(3, 1.9317, PeerId("p"), 1_070_000)
    status = a_status(steps=12, tokens=96, loss=2.0, held_out=held_out, fates={})
    left = Outcome(
        finished=False, stopped=True, lost=None, status=status, directory=Path("my peer")
    )
    told = "loss 2.000, held-out loss 1.932 at 1.07 M tokens; tokens of this peer: "
    assert told in outcome_text(left)
    assert (done(left)["held_out_loss"], done(left)["held_out_tokens"]) == (1.9317, 1_070_000)
    assert outcome_text(left).endswith("files in my peer, from where the same command goes on")
    over = outcome_text(replace(left, finished=True))
    assert over.endswith("files in my peer; `shoal export 'my peer' OUT` writes the model")


def test_the_plain_reporter_says_sentences_only() -> None:
    said: list[str] = []
    with PlainReporter(said.append) as reporter:
        reporter.on_event(ROUND)
        reporter.on_event({"event": "adopted", "fragment": 0, "version": 1})
    assert said == ["fragment 2 version 7: 3 peers, with my work"]


def test_the_plain_reporter_says_where_a_link_works_that_holds_no_public_address() -> None:
    peer = Identity.from_seed(bytes(32)).peer_id
    said: list[str] = []
    for host in ("203.0.113.7", "192.168.1.5"):
        link = f"shoal://{'ab' * 32}?seed=/ip4/{host}/tcp/7700/p2p/{peer}"
        reporter = PlainReporter(said.append)
        reporter.on_event({"event": "link", "link": link})
        if (limit := only_from(link)) is not None:
            reporter.on_event({"event": "link_limited", "text": limit})
    assert [line.partition("'")[0] for line in said[:2]] == ["others join with: shoal join "] * 2
    assert ["works only in this local network" in line for line in said] == [False, False, True]


def test_the_plain_reporter_offers_no_command_for_a_model_that_a_program_brings() -> None:
    """`shoal join` was offered and then refused: only the program has the model."""
    said: list[str] = []
    PlainReporter(said.append).on_event({"event": "link", "link": "shoal://x", "by_program": True})
    assert said == ["others join with: the same program and the link 'shoal://x'"]


def test_the_plain_reporter_names_the_peers_that_it_has_met() -> None:
    """It printed ids of 52 characters, in which nobody finds the peer that the screen shows."""
    peer = str(Identity.from_seed(bytes(32)).peer_id)
    said: list[str] = []
    reporter = PlainReporter(said.append)
    reporter.on_event({"event": "peer_joined", "peer": peer, "name": "boris"})
    reporter.on_event({"event": "hello_refused", "peer": peer, "text": f"{peer} refused the hello"})
    link = f"shoal://{'ab' * 32}?seed=/ip4/203.0.113.7/tcp/7700/p2p/{peer}"
    reporter.on_event({"event": "link", "link": link})
    assert said[0] == "boris joined" and said[1].startswith("boris refused the hello")
    assert link in said[2]


def test_the_plain_reporter_tells_a_phase_once() -> None:
    said: list[str] = []
    with PlainReporter(said.append) as reporter:
        for done in (0.0, 0.25, 0.5):
            reporter.on_event(
                {"event": "phase", "name": "fetching", "text": "downloading", "done": done}
            )
        reporter.on_event({"event": "phase", "name": "ready", "text": "in the run", "done": 1.0})
    assert said == ["downloading", "in the run"]


def fetching(done: float, sources: int) -> Fields:
    text = f"downloading the state of the run from {sources} peers"
    return {"event": "phase", "name": "fetching", "text": text, "done": done}


def test_a_download_whose_sources_alternate_is_one_bar() -> None:
    said: list[str] = []
    watch = Watch()
    with PlainReporter(said.append) as reporter:
        for step in range(1, 100):
            reporter.on_event(fetching(step / 100, 3 + step % 2))
            watch.on_event(fetching(step / 100, 3 + step % 2))
    assert len(said) == 1
    assert list(watch._news) == ["downloading the state of the run from 4 peers: [######### ] 99%"]
    watch.on_event({"event": "phase", "name": "ready", "text": "in the run", "done": 1.0})
    assert len(watch._news) == 2


def test_the_plain_reporter_tells_the_reason_to_leave_once() -> None:
    said: list[str] = []
    over: Fields = {"event": "over", "reason": "its owner asked it to leave", "finished": False}
    with PlainReporter(said.append) as reporter:
        reporter.on_event(over)
        reporter.on_event({"event": "phase", "name": "leaving", "text": over["reason"]})
        for left in ("handing over 9 k tokens, about 20 s", "handing over 5 k tokens, about 11 s"):
            reporter.on_event({"event": "phase", "name": "leaving", "text": left, "done": 0.0})
        reporter.on_event(over)
    assert said == [over["reason"], f"leaving: {over['reason']}"]


def test_a_line_of_progress_may_lack_a_loss() -> None:
    assert "loss -" in progress_line(a_status(loss=None))


def test_only_known_parts_of_the_speed_are_shown() -> None:
    known = a_status(
        tokens=10 * 425_000,
        step_time_s=1.0,
        share_of_peak=0.367,
        time_left_s=3725.0,
        next_merge_s=12.0,
        device_bytes=17e9,
        temperature_c=61.2,
    )
    assert ", ".join(known.words(ON_A_LINE)) == (
        "425 k tokens/s, 37% of peak, 1:02:05 left, next merge in 0:12, 17 GB on the device, 61 °C"
    )
    assert a_status(tokens=100, step_time_s=1.0).words(ON_A_LINE) == ["10 tokens/s"]
    assert a_status(steps=0).words(ON_A_LINE) == []


def test_the_watch_keeps_a_bounded_number_of_news() -> None:
    watch = Watch()
    for number in range(1000):
        watch.on_event({"event": "something", "number": number})
    assert len(watch._news) <= 50


def test_a_sentence_has_no_control_characters() -> None:
    fields: Fields = {"event": "round_missed", "fragment": 1, "reason": "\x1b[2J\x9bgone"}
    assert (sentence(fields) or "").isprintable()
    assert "gone" in (sentence(fields) or "")


def test_the_shares_on_the_screen_sum_to_a_hundred() -> None:
    def shares(*rows: tuple[str, float]) -> list[float | None]:
        made = [PeerRow(name=name, state="training", share=share) for name, share in rows]
        return [row.share for row in with_whole_shares(made)]

    assert shares(("you", 1 / 3), ("anna", 1 / 3), ("and 9 more", 1 / 3)) == [0.34, 0.33, 0.33]
    assert shares(("you", 0.0)) == [None]


def test_a_request_to_leave_is_acknowledged_before_the_step_under_way_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A person who hears nothing for the minute of a long step presses Ctrl-C again, and loses
    work."""
    PlainReporter(lambda text: None).interrupted()
    assert capfd.readouterr().err == f"shoal: {LEAVING}\n"

    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        with ScreenReporter() as reporter:
            os.read(ours, 4096)
            reporter.interrupted()
            written = os.read(ours, 4096).decode()
    assert written.startswith("\x1b[?25h") and LEAVING[:70] in written
    os.close(ours)
