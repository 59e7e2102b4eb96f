"""The import arrows of CONTRIBUTING.md, read from the source: nothing is imported to check them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("dht", "averaging", "peer")
MAY_IMPORT = {
    "dht": {"dht"},
    "averaging": {"averaging", "dht"},
    "peer": {"peer", "averaging", "dht"},
    "examples": {"examples", "peer"},
}

FORBIDDEN_IN_PURE = {
    "asyncio",
    "hivemind",
    "multiprocessing",
    "random",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uvloop",
}
PURE = {
    "dht": "addresses call_budget clock_offset contacts errors hello holders identity "
    "known_runs membership own_record reachability records seal seeds tickets",
    "averaging": "answering auditing catching codec deadlines doubting due effects errors finale "
    "gathering grouping joining layout leading line_speed lineage manifest merge "
    "messages mixing neighbourhood outer participation phase policy quorum reducing "
    "replay rewind round sealing sites slices standing state terms turns usual weights",
    "peer": "board ending errors explain fate held_out limits model_config policies progress "
    "run_file schedule setting_rules shards toml_lines chaos/evidence chaos/oracle "
    "chaos/scenarios chaos/schedule",
}
"""Modules that only decide."""

NEVER = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
"""Whatever can turn received bytes into running code."""

STARTS_A_LOOP = {
    "peer/agent/agent.py",
    "peer/lab/bench/comparison.py",
    "peer/lab/bench/shoal_averager.py",
    "peer/hosting/bootstrap.py",
    "peer/joining/fetch.py",
    "peer/event_loop.py",
}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """(dotted name, line, whether only for type checkers) of every import in a module."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import hides its package"
            assert node.module is not None
            yield node.module, node.lineno, id(node) in typing_only


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports_of(path: Path) -> list[tuple[str, int, bool]]:
    """Read once: most checks look at every module."""
    return list(imported(parsed(path)))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", [*PACKAGES, "examples"])
def test_imports_point_from_peer_to_averaging_to_dht(folder: str) -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in sources(folder)
        for name, line, _ in imports_of(path)
        if name.split(".")[0] in {*PACKAGES, "examples", "tests"} - MAY_IMPORT[folder]
    ]
    assert not wrong, "\n".join(wrong)


def test_hivemind_is_imported_in_files_named_after_it_and_nowhere_else() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in sources(*PACKAGES, "examples")
        if not path.name.startswith("hivemind_")
        for name, line, _ in imports_of(path)
        if name.split(".")[0] == "hivemind"
    ]
    assert not wrong, "\n".join(wrong)


def test_in_dht_hivemind_comes_through_the_one_module_that_patches_it() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in sources("dht")
        if path.name != "hivemind_patches.py"
        for name, line, _ in imports_of(path)
        if name.split(".")[0] == "hivemind"
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_stays_in_peer() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in sources("dht", "averaging")
        for name, line, _ in imports_of(path)
        if name.split(".")[0] in {"torch", "transformers", "lightning"}
    ]
    assert not wrong, "\n".join(wrong)


def test_uvloop_is_imported_only_where_a_loop_is_started() -> None:
    wrong = [
        f"{name_of(path)}:{line}"
        for path in sources(*PACKAGES)
        if name_of(path) not in STARTS_A_LOOP
        for name, line, _ in imports_of(path)
        if name.split(".")[0] == "uvloop"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", PACKAGES)
def test_modules_that_decide_touch_neither_clock_nor_socket_nor_chance(folder: str) -> None:
    wrong = []
    for module in PURE[folder].split():
        path = ROOT / folder / f"{module}.py"
        tree = parsed(path)
        wrong += [
            f"{name_of(path)}:{line} imports {name}"
            for name, line, typing_only in imports_of(path)
            if name.split(".")[0] in FORBIDDEN_IN_PURE and not typing_only
        ]
        wrong += [
            f"{name_of(path)}:{node.lineno} is a coroutine"
            for node in ast.walk(tree)
            if isinstance(node, ast.AsyncFunctionDef)
        ]
    assert not wrong, "\n".join(wrong)


def test_nothing_that_is_received_can_become_code() -> None:
    wrong = []
    for path in sources(*PACKAGES, "examples"):
        tree = parsed(path)
        wrong += [
            f"{name_of(path)}:{line} imports {name}"
            for name, line, _ in imports_of(path)
            if name.split(".")[0] in NEVER
        ]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in {"eval", "exec", "compile", "__import__", "torch.load"}:
                wrong.append(f"{name_of(path)}:{node.lineno} calls {called}")
            for word in node.keywords:
                if word.arg == "allow_pickle" and ast.unparse(word.value) != "False":
                    wrong.append(f"{name_of(path)}:{node.lineno} allows pickle")
    assert not wrong, "\n".join(wrong)


def test_no_module_is_named_after_having_no_subject() -> None:
    wrong = [
        name_of(path)
        for path in sources(*PACKAGES)
        if path.stem in {"utils", "util", "common", "helpers", "misc"}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_tests_is_a_package() -> None:
    """Or ``tests/dht`` would hide ``dht``."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    wrong = [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn", ["torch.nn"]),
        ("def f():\n    from random import choice", ["random"]),
        ("if True:\n    import time as t, socket", ["time", "socket"]),
    ],
)
def test_the_check_itself_sees_imports_wherever_they_are(source: str, found: list[str]) -> None:
    assert [name for name, _, _ in imported(ast.parse(source))] == found


def test_the_check_itself_knows_imports_for_type_checkers() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import time\nimport random"
    assert list(imported(ast.parse(source))) == [
        ("typing", 1, False),
        ("random", 4, False),
        ("time", 3, True),
    ]
