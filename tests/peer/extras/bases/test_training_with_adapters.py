"""The built-in loop with adapters on a published model, beside an agent without a network."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from peer.extras.bases.base_models import base_folder
from peer.run_file.merging import Outer
from peer.run_file.sections import AdamwInner, FilesData, FileSource, Lora, RunFile, Schedule
from peer.trainer.loop import Outcome, Stop, TrainerSettings, train
from peer.trainer.preflight import examine
from peer.trainer.settings import JoinSettings
from tests.peer.agent.lone_agents import AGENT
from tests.peer.extras.bases.adapted_run import adapted_run
from tests.peer.extras.bases.published_model import publish

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="the extra 'hf' is not installed")
"""Not by an import, which takes two seconds in every worker that collects tests."""

LORA = Lora(rank=8, alpha=64.0, targets=["q_proj", "lm_head"], base_dtype="fp32")
"""The base has random weights, so that little is learnt below its output head."""


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a base and examples."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    publish(tmp_path / "data" / "tiny")
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(300)]
    (tmp_path / "data" / "sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path / "data"


def sums(data_dir: Path) -> RunFile:
    return msgspec.structs.replace(
        adapted_run(data_dir / "tiny", LORA),
        data=FilesData(
            sources=[FileSource(files=["sums.jsonl"])],
            form="completion",
            sequence_length=32,
            held_out=0.1,
        ),
        inner=AdamwInner(learning_rate=0.02, batch_size=4),
        schedule=Schedule(shape="constant", warmup_tokens=100),
        outer=Outer(fragments=2),
    )


def settings_for(run: RunFile, data_dir: Path, tmp_path: Path, *, steps: int) -> TrainerSettings:
    base = base_folder(run, cache_dir=tmp_path / "cache", data_dir=data_dir)
    return TrainerSettings(device="cpu", threads=1, steps_max=steps, base=base)


def trained(run: RunFile, data_dir: Path, tmp_path: Path, *, steps: int) -> Outcome:
    own = JoinSettings(
        directory=tmp_path / "peer",
        data_directory=data_dir,
        agent_command=AGENT,
        drain_s=5.0,
    )
    settings = settings_for(run, data_dir, tmp_path, steps=steps)
    return train(run, own=own, settings=settings, stop=Stop())


@pytest.mark.slow  # tests/peer/extras/bases/test_lora.py trains them without an agent
def test_a_peer_trains_adapters_on_answers(data_dir: Path, tmp_path: Path) -> None:
    outcome = trained(sums(data_dir), data_dir, tmp_path, steps=40)
    assert outcome.status.steps == 40
    assert outcome.status.loss is not None and outcome.status.loss < 4.0  # 5.57 before


@pytest.mark.slow  # test_lora.py counts what a run needs
def test_the_checks_before_joining_count_the_base(data_dir: Path, tmp_path: Path) -> None:
    run = sums(data_dir)
    found = examine(
        run,
        settings_for(run, data_dir, tmp_path, steps=1),
        pace_s=0.0,
        directory=tmp_path / "not" / "there",
    )
    assert found.engine is not None
    parameters = sum(p.numel() for p in found.engine.model.parameters() if not p.requires_grad)
    assert found.frozen_bytes == 4 * parameters
    assert found.memory_needed > found.frozen_bytes
    assert "parameters of adapters on tiny; data: files" in "\n".join(found.lines)
