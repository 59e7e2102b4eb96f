"""The screen fits a small terminal and does not fail on missing values."""

import io
import math
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from peer.status import PeerRow
from peer.views.screen import View, draw
from tests.peer.statuses import a_status


def shown(view: View) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80, height=24, force_terminal=False).print(draw(view))
    return out.getvalue().splitlines()


def row(
    name: str,
    state: str,
    steps: int | None = None,
    step_time_s: float | None = None,
    loss: float | None = None,
    version: int | None = None,
    last: str = "",
    share: float | None = None,
    behind: int | None = None,
) -> PeerRow:
    return PeerRow(
        name=name,
        state=state,
        steps=steps,
        step_time_s=step_time_s,
        loss=loss,
        version=version,
        last=last,
        share=share,
        behind=behind,
    )


BUSY = a_status(
    global_tokens=1_234_567,
    tokens_goal=2_000_000,
    rounds=42,
    bytes_sent=12_345_678,
    blocked_s=0.12,
    trained_s=100.0,
    fates={},
)


def busy_view() -> View:
    rows = [
        row(f"learner-{i}", "training", 120 + i, 0.25, 3.1, 7, "merged with 3 others", 0.25)
        for i in range(4)
    ]
    return View(
        title="demo",
        elapsed_s=125.0,
        losses=[5.5 - i / 100 for i in range(300)],
        status=BUSY,
        peers=rows,
        news=[f"event {i}" for i in range(20)],
    )


def test_the_screen_shows_loss_tokens_peers_and_events() -> None:
    text = " ".join(shown(busy_view()))
    merged = "1.23 M of 2 M tokens merged by all"
    for expected in (merged, "42 rounds", "12.3 MB", "0.12%", "learner-3"):
        assert expected in text, expected
    assert "event 19" in text
    assert "event 0" not in text


def test_a_run_that_has_not_begun_is_drawn_too() -> None:
    nobody = row("learner-0", "joining", 0, None, None, None, "", None)
    text = "\n".join(shown(View(title="demo", elapsed_s=0.0, status=a_status(), peers=[nobody])))
    assert "waiting for the first round" in text
    assert "joining" in text


def test_the_curve_takes_two_lines_however_long_it_is() -> None:
    lines = shown(replace(busy_view(), losses=[500.5 - i for i in range(400)]))
    top = next(i for i, line in enumerate(lines) if "training loss" in line)
    assert lines[top + 3].startswith("╰")


def curve(losses: list[float]) -> View:
    return View(title="x", elapsed_s=1.0, status=a_status(), losses=losses)


def test_equal_losses_make_a_flat_curve_and_no_division_by_zero() -> None:
    assert "2.000" in "\n".join(shown(curve([2.0] * 50)))


def test_own_part_and_the_others_fit_80_by_24_with_reasons_and_limits() -> None:
    others = [
        row(
            f"bold-heron-machine-{i}", "not training", None, 12.5, None, 123456,
            "left out 2/123456: nothing was heard of it for 16 s", 0.1, behind=12,
        )
        for i in range(5)
    ]  # fmt: skip
    own = row("you (A1b2C3)", "training", None, 0.25, None, 7, "merged 3/7", 0.25, behind=0)
    more = row("and 11 more", "", None, None, None, None, "", None)
    lines = shown(
        replace(
            busy_view(),
            title="tiny-stories, 17 peers",
            peers=[own, *others, more],
            status=msgspec.structs.replace(
                BUSY,
                steps=123_456,
                tokens=123_456 * 106_250,
                step_time_s=0.25,
                share_of_peak=0.367,
                time_left_s=3725.0,
                next_merge_s=12.0,
                temperature_c=61.2,
                in_flight=("0 exchanging", "3 waiting for peers", "4 catching up"),
                limits=("up 2 MB/s", "12.3 GB of 200 GB a month", "from 22:00 to 7:00"),
            ),
            last_offer="fragment 2 version 7 was merged without it: not in every slice by the "
            "deadline, and a great many more words that nobody needs; kept for the next round",
            news=[f"event {i} with a link: shoal://{'ab' * 32}?seed=/ip4/1" for i in range(20)],
        )
    )
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 80
    assert any("bold-heron-machine-4" in line and "10%" in line and "12" in line for line in lines)
    assert any("left out 2/" in line for line in lines)
    text = " ".join(" ".join(lines).split())
    for expected in (
        "and 11 more",
        "step 123456",
        "speed: 425 k tokens/s, 37% of peak, 1:02:05 left, next merge in 0:12, 61 °C",
        "in progress: 0 exchanging, 3 waiting for peers, 4 catching up",
        "last offer: fragment 2 version 7 was merged without it: not in every slice",
        "limits: up 2 MB/s, 12.3 GB of 200 GB a month, from 22:00 to 7:00",
        "event 19",
    ):
        assert expected in text, expected


def test_a_larger_terminal_shows_more_news() -> None:
    def news(height: int) -> int:
        out = io.StringIO()
        picture = draw(busy_view(), width=100, height=height)
        Console(file=out, width=100, height=height, force_terminal=False).print(picture)
        return out.getvalue().count("event ")

    assert news(24) < news(40) == 12


@pytest.mark.parametrize("height", [8, 10, 12, 16, 20, 24])
def test_a_short_terminal_shows_the_newest_event_and_this_peer(height: int) -> None:
    """The lower part was cut off, with the line that the peer is leaving."""
    view = replace(
        busy_view(),
        status=msgspec.structs.replace(BUSY, rest="paused"),
        news=[*(f"event {i}" for i in range(9)), "leaving the run"],
    )
    out = io.StringIO()
    Console(file=out, width=80, height=height).print(draw(view, width=80, height=height))
    lines = out.getvalue().splitlines()
    assert len(lines) < height, "a line is left for the cursor"
    assert any("leaving the run" in line for line in lines)
    assert height < 12 or any(line.startswith("resting: paused") for line in lines)
    assert height < 16 or any("learner-0" in line for line in lines)


def test_a_long_event_is_shown_in_whole() -> None:
    """Its end could be read nowhere on the screen."""
    address = f"/ip4/203.0.113.7/tcp/7700/p2p/12D3KooW{'x' * 44}"
    event = f"no bootstrap address answered; tried {address}: refused; is its port open?"
    lines = shown(replace(busy_view(), news=["an older event", event]))
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    text = "".join(line.strip("│ ") for line in lines)
    assert event.replace(" ", "") in text.replace(" ", "")


def test_a_warning_that_is_cut_keeps_the_section_that_it_names() -> None:
    event = f"{'trouble ' * 40}(shoal docs disk-full)"
    text = "\n".join(shown(replace(busy_view(), news=[event])))
    assert "... (shoal docs disk-full)" in text
    assert text.count("trouble") < 40


def test_brackets_in_the_text_of_a_peer_are_not_markup() -> None:
    rude = row("[/x]", "[/]", None, None, None, 3, "[link=http://a.example]merged", 0.5)
    out = io.StringIO()
    view = replace(busy_view(), title="[/t]", peers=[rude], news=["[/n] joined"], last_offer="[/o]")
    Console(file=out, width=100, height=24, force_terminal=True).print(draw(view, width=100))
    for expected in ("[/x]", "[link=http://a.example]merged", "[/t]", "[/n] joined", "[/o]"):
        assert expected in out.getvalue(), expected
    assert "\x1b]8" not in out.getvalue(), "it may not make links either"


def test_a_loss_that_is_not_finite_does_not_change_the_curve() -> None:
    text = "\n".join(shown(curve([2.0, 3.0, math.nan, math.inf])))
    assert "3.000" in text
    assert "loss inf" in text


def test_control_characters_are_not_shown() -> None:
    evil = "\x1b]0;mine\x07\x9b2J\u202eevil"
    rude = row(evil, evil, None, None, None, 3, evil, 0.5)
    status = msgspec.structs.replace(BUSY, limits=(evil,))
    view = replace(busy_view(), status=status, peers=[rude], news=[evil], last_offer=evil)
    text = "".join(shown(view))
    assert "evil" in text
    assert text.isprintable()
