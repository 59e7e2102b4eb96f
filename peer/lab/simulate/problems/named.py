"""Problems by the name that an experiment gives them."""

from __future__ import annotations

from peer.lab.simulate.problems.problem import Problem
from peer.lab.simulate.problems.quadratic import Quadratic

NAMES = ("quadratic", "text_mlp", "text_gpt")


def problem_named(name: str) -> Problem:
    """A problem at its defaults. Raises ``ValueError`` for a name that is not known."""
    if name == "quadratic":
        return Quadratic()
    if name == "text_mlp":
        from peer.lab.simulate.problems.text_mlp import TextMlp  # torch takes seconds to import

        return TextMlp()
    if name == "text_gpt":
        from peer.lab.simulate.problems.text_gpt import TextGpt

        return TextGpt()
    raise ValueError(f"problem is {name!r}; there are {', '.join(NAMES)}")
