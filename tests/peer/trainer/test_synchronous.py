"""The rounds that the trainer of a synchronous run waits for."""

from __future__ import annotations

from types import SimpleNamespace

from peer.run_file.reading import parse
from peer.trainer.synchronous import SynchronousRounds


class Rounds:
    """A trainer of two fragments with a cycle of ten steps, and the rounds that it waited for."""

    def __init__(self, *, has_company: bool = True) -> None:
        self.steps, self.merged = 0, [0, 0]
        self.waited: list[tuple[int, int]] = []
        self.fails = False
        self._waits = SynchronousRounds(
            parse("[outer]\nsteps_per_cycle = 10\noverlap_steps = 0"),
            2,
            learner=self,  # type: ignore[arg-type]
            agent=SimpleNamespace(ring=lambda: None),  # type: ignore[arg-type]
            news=SimpleNamespace(facts=SimpleNamespace(synchronous=has_company)),  # type: ignore[arg-type]
            leaving=lambda: False,
        )

    def merged_steps(self, fragment: int) -> int:
        return self.merged[fragment]

    def wait_for_round(self, fragment: int, **_: object) -> None:
        self.waited.append((fragment, self.steps))
        if not self.fails:
            self.merged[fragment] = self.steps

    def train(self, until: int) -> list[tuple[int, int]]:
        """Train up to a step. Returns the fragments that it waited for meanwhile, and where."""
        self.waited.clear()
        while self.steps < until:
            self.steps += 1
            self._waits.wait()
        return list(self.waited)


def test_each_fragment_is_waited_for_once_in_a_cycle() -> None:
    rounds = Rounds()
    assert rounds.train(20) == [(1, 5), (0, 10), (1, 15), (0, 20)]


def test_a_round_to_which_another_peer_called_begins_a_cycle() -> None:
    """Two synchronous peers out of step made two rounds in each cycle, of eight steps and two."""
    rounds = Rounds()
    rounds.train(8)
    rounds.merged[0] = 8
    assert [at for fragment, at in rounds.train(40) if fragment == 0] == [18, 28, 38]


def test_a_round_that_comes_to_nothing_is_waited_for_again_after_a_cycle() -> None:
    rounds = Rounds()
    rounds.fails = True
    assert rounds.train(20) == [(1, 5), (0, 10), (1, 15), (0, 20)]


def test_nothing_is_waited_for_alone() -> None:
    assert Rounds(has_company=False).train(40) == []
