"""``make launchers``: the programs that read the files for launchers read them.

They are large, so they are installed in an environment of their own, without Shoal. Nothing is
started, and no cloud is asked.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples/launch"


def skypilot() -> None:
    from sky import Task  # type: ignore[import-not-found]

    link = [("SHOAL_LINK", "shoal://0")]
    (is_spot,) = {
        each.use_spot
        for each in Task.from_yaml_config(
            _yaml(LAUNCH / "skypilot.yaml"), secrets_overrides=link
        ).resources
    }
    assert is_spot


def dstack() -> None:
    from dstack._internal.core.models.configurations import (  # type: ignore[import-not-found]
        parse_apply_configuration,
    )

    assert parse_apply_configuration(_yaml(LAUNCH / "learner.dstack.yml")).type == "task"


def modal() -> None:
    from modal import App, Function  # type: ignore[import-not-found]

    made = runpy.run_path(str(LAUNCH / "modal_app.py"))
    assert isinstance(made["app"], App) and isinstance(made["learn"], Function)


def compose() -> None:
    for path in (LAUNCH / "compose.yaml", ROOT / "examples/bootstrap_host/compose.yaml"):
        _check("compose-spec.json", path)


def github() -> None:
    _check("github-workflows.json", ROOT / ".github/workflows/release.yml")


def _check(schema: str, path: Path) -> None:
    """By a schema of the package check-jsonschema, which itself wants another click than sky."""
    import jsonschema  # type: ignore[import-untyped]

    package = importlib.util.find_spec("check_jsonschema")
    assert package is not None and package.origin is not None
    text = Path(package.origin).with_name("builtin_schemas") / "vendor" / schema
    jsonschema.validate(_yaml(path), json.loads(text.read_text(encoding="utf-8")))


def _yaml(path: Path) -> object:
    from ruamel.yaml import YAML  # type: ignore[import-not-found]

    return YAML(typ="safe").load(path)  # of YAML 1.2, in which `on` is a word


READERS: tuple[Callable[[], None], ...] = (skypilot, dstack, modal, compose, github)


def main() -> int:
    wrong = 0
    for read in READERS:
        try:
            read()
        except Exception as error:  # whatever these programs raise
            wrong += 1
            why = str(error).strip().partition("\n")[0]
            sys.stdout.write(f"{read.__name__}: REFUSED: {type(error).__name__}: {why}\n")
        else:
            sys.stdout.write(f"{read.__name__}: reads it\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
