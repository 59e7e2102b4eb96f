"""A run file in words for its page. Pure."""

from __future__ import annotations

from typing import Any

from peer.data.files import hosts_of
from peer.run_file.sections import FilesData, HfData, RunFile

_TEXT_MAX = 500
_SHORT_MAX = 100


def model_words(run: RunFile, parameters: str) -> str:
    """The recipe and its size: ``gpt, 124 M parameters``."""
    recipe = str(run.model.__struct_config__.tag)
    return f"{recipe}, {parameters} parameters" if parameters else recipe


def data_words(run: RunFile) -> str:
    """The recipe, and what it reads as far as that has a name everywhere."""
    data = run.data
    if isinstance(data, HfData):
        return f"{data.dataset} at {data.revision}"[:_TEXT_MAX]
    if isinstance(data, FilesData) and (hosts := hosts_of(data)):
        return f"files from {', '.join(hosts)}"[:_TEXT_MAX]
    return str(data.__struct_config__.tag)


def described(run: RunFile, *, parameters: str = "") -> dict[str, Any]:
    """Fields of ``RunPage`` that the run file says."""
    goal = run.end.tokens
    return {
        "name": run.name[:_SHORT_MAX],
        "description": run.description[:4000],
        "licence": run.licence[:_SHORT_MAX],
        "homepage": run.homepage[:_TEXT_MAX],
        "contact": run.contact[:_TEXT_MAX],
        "discussion": run.discussion[:_TEXT_MAX],
        "model": model_words(run, parameters)[:_TEXT_MAX],
        "data": data_words(run),
        "tokens_goal": goal if isinstance(goal, int) else None,
    }
