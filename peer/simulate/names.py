"""The names in an experiment: those of our own rules and problems, and ``module:name``.

``module:name`` is a class without arguments, or an object, in a Python module that can be imported:
``shoal simulate`` finds modules beside the experiment file and in the current folder. Its code runs
with all rights of this process; the name comes from the user's own file, never from a peer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from averaging.numbers import codecs, merge, outer
from peer.simulate.problems.problem import Problem, Quadratic
from peer.simulate.settings import NESTEROV, BadExperiment, Swarm

PROBLEMS = ("quadratic", "text_gpt")
OF_TEXT_GPT = ("optimizer", "momentum", "layers", "length", "batch", "text", "device", "precision")
NAME_MAX = 32
"""A commit names merge rule and codec, and has so much room."""


def is_own(name: str) -> bool:
    return ":" in name


def own(name: str) -> Any:
    """The object that ``module:name`` names; a class is called. Raises ``ValueError``."""
    module, _, attribute = name.partition(":")
    try:
        part = getattr(importlib.import_module(module), attribute)
        return part() if isinstance(part, type) else part
    except (ImportError, SyntaxError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error}") from error


def problem_named(name: str) -> Problem:
    """A problem at its defaults. Raises ``ValueError`` for a name that is not known."""
    if is_own(name):
        problem: Problem = own(name)
        return problem
    if name == "quadratic":
        return Quadratic()
    if name == "text_gpt":
        from peer.simulate.problems.text_gpt import TextGpt  # torch takes seconds to import

        return TextGpt()
    raise ValueError(f"{name!r} is no problem; there are {', '.join(PROBLEMS)}")


def problem_of(swarm: Swarm) -> Problem:
    """The problem that a swarm trains, with what its settings change of it."""
    choice = swarm.problem
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
        if value is not None:
            changes[setting] = value
    for setting, value in changes.items():
        if not hasattr(problem, setting):
            raise BadExperiment(
                f"problem.{setting} is {value!r}; {choice.name} has no choice of it, text_gpt has"
            )
    if not changes:
        return problem
    try:
        changed: Problem = replace(problem, **changes)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise BadExperiment(f"problem: {error}") from error
    return changed


def check_names(swarm: Swarm) -> None:
    """Find every rule and codec; those of the user are registered. Raises ``BadExperiment``."""
    settings, mixing = swarm.outer, swarm.mixing
    rules = merge.rule_named, merge.rule_names, merge.register
    encodings = codecs.codec_named, codecs.codec_names, codecs.register
    for setting, name, (find, names, register) in (
        ("outer.merge", settings.merge, rules),
        ("outer.codec", settings.codec, encodings),
        ("outer.codec_up", settings.codecs[0], encodings),
        ("outer.codec_down", settings.codecs[1], encodings),
        ("mixing.theta", mixing.theta, encodings),
        ("mixing.momentum", mixing.momentum, encodings),
    ):
        try:
            if is_own(name) and name not in names():
                _register(name, register)
            find(name)
        except ValueError as error:
            raise BadExperiment(f"{setting}: {error}") from error


def _register(name: str, register: Callable[[Any], None]) -> None:
    """Register what ``module:name`` names under that name."""
    if len(name) > NAME_MAX:
        raise ValueError(f"{name!r} has {len(name)} letters; at most {NAME_MAX} fit")
    part = own(name)
    part.name = name
    register(part)


def codecs_of(swarm: Swarm) -> tuple[str, ...]:
    """Our codecs and the swarm's own: not those that another swarm of this process has brought."""
    return tuple(
        name for name in codecs.codec_names() if not is_own(name) or name in swarm.outer.codecs
    )


def optimizer_of(swarm: Swarm) -> AbstractContextManager[None]:
    """The context in which all outer steps are taken as the swarm says, while it runs."""
    name = swarm.outer.optimizer
    if name == NESTEROV:
        return nullcontext()
    if not is_own(name):
        raise BadExperiment(f"outer.optimizer is {name!r}; it is {NESTEROV}, or module:name")
    try:
        return outer.stepping(own(name))
    except ValueError as error:
        raise BadExperiment(f"outer.optimizer: {error}") from error
