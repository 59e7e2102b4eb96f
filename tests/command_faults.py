"""What is wrong with a command that a document shows. None of them is run."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

from peer import cli
from tests.command_line import command_of

ROOT = Path(__file__).parent.parent


def fault_of(line: str) -> str | None:
    program, *words = shlex.split(line)
    if program == "shoal":
        return fault_of_options(words)
    if program == "pytest":
        return fault_of_tests(words)
    name, *words = words[1:] if words[0] == "-m" else words
    return fault_of_module(name.removesuffix(".py").replace("/", "."), *words)


def fault_of_options(words: list[str]) -> str | None:
    command: Any = cli.command()
    while children := getattr(command, "commands", None):
        name, *words = words
        if name not in children:
            return f"no command {name!r}"
        command = children[name]
    return fault_of_arguments(command, words)


def fault_of_arguments(command: Any, words: list[str]) -> str | None:
    if not words:  # named alone, its arguments left out
        return None
    try:
        command.make_context("shoal", words)
    except Exception as error:  # whatever a parameter refuses
        return str(error) or repr(error)
    return None


def fault_of_tests(words: list[str]) -> str | None:
    paths = [ROOT / word for word in words if word.startswith("tests/")]
    for path in paths:
        if path.stem != "test_NAME" and not path.exists():
            return f"{path} is not there"
    if "-k" in words:
        names = set(re.findall(r"\w+", words[words.index("-k") + 1])) - {"and", "or", "not"}
        for name in names:
            if not any(name in path.read_text(encoding="utf-8") for path in paths):
                return f"no test {name!r}"
    return None


def fault_of_module(name: str, *words: str) -> str | None:
    path = ROOT / name.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return f"{path} is not there"
    source = path.read_text(encoding="utf-8")
    if "run_program(main)" in source:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        return fault_of_arguments(command_of(import_module(module).main), [*words])
    unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
    return f"{name} has no {', '.join(unknown)}" if unknown else None
