"""The tasks of lm-eval, on a folder that ``shoal export --to hf`` has written.

lm-eval downloads the data of its tasks from the hub.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer.errors import ExtraMissing, Unusable


def check_installed() -> None:
    """Raise ``ExtraMissing`` without the package."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ExtraMissing("--tasks", "lm-eval", "eval")


def measured(folder: Path, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of each task, by their names in lm-eval.

    Raises ``ExtraMissing`` or ``Unusable``.
    """
    check_installed()
    import lm_eval
    import torch

    model = {
        "pretrained": str(folder),
        "tokenizer": tokenizer_with_end(folder),
        "trust_remote_code": False,
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"  # its own default is "cuda", anywhere
    try:
        found = lm_eval.simple_evaluate(
            model="hf", model_args=model, tasks=list(tasks), device=device
        )
    except (KeyError, OSError) as error:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        reason = " ".join(text.split())[:300]
        raise Unusable(
            f"lm-eval cannot measure {', '.join(tasks)}: {reason}",
            section="tasks-failed",
        ) from error
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def tokenizer_with_end(folder: Path) -> Any:
    """The tokenizer in a folder, with a token that ends a document.

    lm-eval begins texts with it and ends them there. A tokenizer of bytes names none, as each would
    be a text that loses bytes; the byte is in the model's configuration.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    if tokenizer.eos_token_id is None:
        end = json.loads((folder / "config.json").read_bytes()).get("eos_token_id")
        end = end[0] if isinstance(end, list) and end else end
        if isinstance(end, int):
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return tokenizer
