"""Resolves the names in an experiment: its problem, and its registered codecs and rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from averaging.numbers.codecs import codec_named
from averaging.numbers.merge import rule_named
from averaging.rules.grouping import grouping_named
from peer.simulate.problems.problem import Problem
from peer.simulate.problems.quadratic import Quadratic
from peer.simulate.swarm.experiment import BadExperiment, Experiment

NAMES = ("quadratic", "text_mlp", "text_gpt")
OF_TEXT_GPT = ("optimizer", "momentum", "layers", "length", "batch", "text", "device", "precision")


def problem_named(name: str) -> Problem:
    """A problem at its defaults. Raises ``ValueError`` for a name that is not known."""
    if name == "quadratic":
        return Quadratic()
    if name == "text_mlp":
        from peer.simulate.problems.text_mlp import TextMlp  # torch takes seconds to import

        return TextMlp()
    if name == "text_gpt":
        from peer.simulate.problems.text_gpt import TextGpt

        return TextGpt()
    raise ValueError(f"{name!r} is no problem; there are {', '.join(NAMES)}")


def problem_of(experiment: Experiment) -> Problem:
    """The problem that an experiment names, with what it sets of it."""
    choice = experiment.problem
    try:
        problem = problem_named(choice.name)
    except ValueError as error:
        raise BadExperiment(f"problem.name: {error}") from error
    changes: dict[str, Any] = {}
    if choice.size is not None:
        changes["tensors" if isinstance(problem, Quadratic) else "width"] = choice.size
    if choice.learning_rate is not None:
        changes["learning_rate"] = choice.learning_rate
    for setting in OF_TEXT_GPT:
        value = getattr(choice, setting)
        if value is None:
            continue
        if not hasattr(problem, setting):
            raise BadExperiment(
                f"problem.{setting} is {value!r}; {choice.name} has no choice of it, text_gpt has"
            )
        changes[setting] = value
    try:
        changed: Problem = replace(problem, **changes)  # type: ignore[type-var]
    except ValueError as error:
        raise BadExperiment(f"problem: {error}") from error
    return changed


def check_names(experiment: Experiment) -> None:
    """Check that every rule and codec is registered. Raises ``BadExperiment``."""
    outer, mixing = experiment.outer, experiment.mixing
    checks: tuple[tuple[str, Callable[[str], object], str], ...] = (
        ("outer.merge", rule_named, outer.merge),
        ("outer.codec", codec_named, outer.codec),
        ("outer.codec_up", codec_named, outer.codec_up or outer.codec),
        ("outer.codec_down", codec_named, outer.codec_down or outer.codec),
        ("mixing.theta", codec_named, mixing.theta),
        ("mixing.momentum", codec_named, mixing.momentum),
        ("rounds.grouping", grouping_named, experiment.rounds.grouping),
    )
    for setting, check, name in checks:
        try:
            check(name)
        except ValueError as error:
            raise BadExperiment(f"{setting}: {error}") from error
