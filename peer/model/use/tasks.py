"""The tasks of lm-eval, on a folder that ``shoal export --to hf`` has written.

lm-eval downloads the data of its tasks from the hub.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer.errors import ExtraMissing


def check_installed() -> None:
    """Raise ``ExtraMissing`` without the package."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ExtraMissing("--tasks", "lm-eval", "eval")


def measured(folder: Path, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of each task, by their names in lm-eval. Raises ``ExtraMissing``."""
    check_installed()
    import lm_eval

    model = {"pretrained": str(folder), "trust_remote_code": False}
    found = lm_eval.simple_evaluate(model="hf", model_args=model, tasks=list(tasks))
    results: dict[str, dict[str, Any]] = found["results"]
    return results
