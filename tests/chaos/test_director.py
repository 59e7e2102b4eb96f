"""The acts of liars: those that were played are told, the last one as far as it came."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

from tests.chaos.director import Director
from tests.chaos.judging.lies import ACTS, acts


def test_an_act_that_goes_on_when_the_swarm_ends_is_among_those_that_were_played(
    tmp_path: Path,
) -> None:
    """The act awaits a learner on a busy machine. Earlier its lies were counted, and its versions
    were not."""
    now = 0.0
    learner = SimpleNamespace(whole=True, peer_id="anna")
    orders = SimpleNamespace(orders_path=tmp_path / "liar.orders")
    swarm = SimpleNamespace(
        now=lambda: now, learners=[learner], liars=[orders], launch_late=lambda: None
    )
    planned = acts(10.0, 110.0)
    director = Director(swarm, planned, began_s=0.0, tell=lambda text: None)  # type: ignore[arg-type]

    while now < 95.0:
        director.turn()
        now += 1.0
    played = director.until(95.0)
    assert len(played) == len(ACTS) == len(director.done) + 1
    assert played[-1].ends_s == 95.0 and played[-1].lies == ACTS[-1]
    assert json.loads(orders.orders_path.read_text())["lie"] == ACTS[-1][0]

    while now < 130.0:
        director.turn()
        now += 1.0
    assert director.over and director.until(130.0) == director.done
    assert json.loads(orders.orders_path.read_text())["lie"] is None


def test_in_a_control_nobody_is_said_to_lie() -> None:
    hours = itertools.count(3600.0, 3600.0)
    late: list[str] = []
    said: list[str] = []
    swarm = SimpleNamespace(
        now=lambda: next(hours),
        learners=[SimpleNamespace(whole=True, peer_id="anna")],
        liars=[],
        launch_late=lambda: late.append("launched"),
    )
    director = Director(swarm, acts(10.0, 110.0), began_s=0.0, tell=said.append)  # type: ignore[arg-type]

    for _ in ACTS:
        director.turn()
    assert late and not said
