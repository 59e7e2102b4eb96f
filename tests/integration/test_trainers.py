"""Trainers of transformers and Lightning, and islands, as real processes with real agents.

Slow: each test starts the examples as their READMEs do.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import Processes, still_running
from tests.swarms.commands import (
    ANY_LOOPBACK_PORT,
    Command,
    Record,
    load,
    sums_up,
    tell,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

EXAMPLES = Path(__file__).parents[2] / "examples"
HF = EXAMPLES / "hf_trainer" / "train.py"
ISLAND = EXAMPLES / "island" / "train.py"
LIGHTNING = EXAMPLES / "lightning" / "train.py"


class Learner(Command):
    """An example as a process, or as two under torchrun, and its output."""

    def __init__(
        self,
        processes: Processes,
        directory: Path,
        script: Path,
        *options: str,
        ranks: int = 1,
        pace_s: float = 0.15,
    ) -> None:
        self.directory = directory
        torchrun = [
            *("-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"),
            *("--nproc-per-node", str(ranks)),
        ]
        self.usual = [
            *("--directory", str(directory), "--pace", str(pace_s)),
            *("--listen", ANY_LOOPBACK_PORT),
        ]
        super().__init__(
            processes,
            [*self.usual, *options],
            program=[*(torchrun if ranks > 1 else []), str(script)],
            environment={
                "XDG_DATA_HOME": str(directory.parent / "home"),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )

    def link(self) -> str:
        return str(self.wait_for(lambda r: r.get("event") == "link", "its link")["link"])

    def own_rounds(self) -> int:
        """Rounds that merged its work."""
        assert self.process.poll() in (None, 0), self.output[-3000:]
        return sum(bool(record["contributed"]) for record in self.records("round"))

    def end(self) -> Record:
        assert self.wait(timeout_s=240.0) == 0, self.output[-3000:]
        return self.records("done")[-1]


def losses(learner: Learner) -> list[float]:
    """Losses that the Trainer logged."""
    return [float(found) for found in re.findall(r"'loss': '?([0-9.]+)", learner.output)]


def test_trainers_of_several_kinds_train_one_model(processes: Processes, tmp_path: Path) -> None:
    """One in fp32, one in bf16, one with accumulation, until the token budget is used up."""
    anna = Learner(processes, tmp_path / "anna", HF)
    run = (anna.link(),)
    boris = Learner(processes, tmp_path / "boris", HF, *run, "--bf16")
    clara = Learner(processes, tmp_path / "clara", HF, *run, "--accumulate", "2", pace_s=0.3)
    everybody = (anna, boris, clara)
    ended = [learner.end() for learner in everybody]
    for learner, done in zip(everybody, ended, strict=True):
        assert learner.records("over")[-1]["finished"]
        assert learner.own_rounds() >= 3
        assert sums_up(done["fates"]), done
        tell(f"{learner.directory.name}: {done} losses {losses(learner)} ({load()})")
    assert losses(boris)[-1] < 0.7 * losses(anna)[0]
    # All peers export the same bits.
    exports = {
        (learner.directory / "peer" / "model.safetensors").read_bytes() for learner in everybody
    }
    assert len(exports) == 1
    check = (
        "import sys; from transformers import AutoModelForCausalLM as Model;"
        "print(Model.from_pretrained(sys.argv[1]).num_parameters())"
    )
    for learner in everybody:
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", check, str(learner.directory / "model")],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert int(found.stdout) == anna.records("model")[0]["parameters"]


def test_only_an_adapter_is_exchanged_and_a_killed_trainer_resumes(
    processes: Processes, tmp_path: Path
) -> None:
    anna = Learner(processes, tmp_path / "anna", HF, "--lora")
    run = ("--lora", anna.link())
    boris = Learner(processes, tmp_path / "boris", HF, *run)
    until(lambda: boris.own_rounds() >= 6, "boris is merged", timeout_s=150)
    written = boris.directory / "checkpoints" / "checkpoint-100" / "trainer_state.json"
    until(written.is_file, "a whole checkpoint", timeout_s=150)
    identity = (boris.directory / "peer" / "identity.key").read_bytes()
    orphans = processes.kill_hard(boris.process)
    assert not still_running(orphans, timeout_s=30), "the agent outlived its trainer"
    boris.again(*boris.usual, *run, "--resume", "--steps", "300")
    until(lambda: boris.own_rounds() >= 2, "boris is merged again", timeout_s=150)
    assert (boris.directory / "peer" / "identity.key").read_bytes() == identity
    done = boris.end()
    assert (boris.directory / "model" / "adapter_model.safetensors").is_file()
    model = boris.records("model")[-1]
    assert model["exchanged"] < 0.1 * model["parameters"]
    tell(f"{model} {done} ({load()})")
    anna.process.send_signal(signal.SIGINT)
    anna.process.wait(timeout=60)


def test_an_island_under_torchrun_and_a_single_process_train_one_model(
    processes: Processes, tmp_path: Path
) -> None:
    """FSDP2 in two processes under torchrun; one is killed, and the island returns."""
    longer = tmp_path / "run.toml"  # a restart is slow on a loaded machine
    text = (ISLAND.parent / "run.toml").read_text(encoding="utf-8")
    longer.write_text(text.replace("tokens = 300_000", "tokens = 900_000"), encoding="utf-8")
    anna = Learner(processes, tmp_path / "anna", ISLAND, str(longer))
    options = (anna.link(), "--spread", "fsdp2")
    island = Learner(processes, tmp_path / "island", ISLAND, *options, ranks=2)
    until(lambda: island.own_rounds() >= 4, "the island is merged", timeout_s=150)
    processes.note()
    ranks = [
        child
        for child in psutil.Process(island.process.pid).children()
        if str(ISLAND) in " ".join(child.cmdline())
    ]
    victim = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
    before = anna.records("progress")[-1]["step"]
    victim.kill()
    until(lambda: len(island.records("link")) == 2, "torchrun started it again", timeout_s=120)
    first, second = (record["peer"] for record in island.records("link"))
    assert first == second, "it is another peer"
    merged = island.own_rounds()
    until(lambda: island.own_rounds() >= merged + 2, "it is merged again", timeout_s=150)
    assert anna.records("progress")[-1]["step"] > before
    done, alone = island.end(), anna.end()
    assert done["finished"] and alone["finished"]
    assert sums_up(done["fates"]) and sums_up(alone["fates"])
    assert done["fates"].get("discarded.crash", 0) > 0
    one, other = (d.directory / "model.safetensors" for d in (anna, island))
    assert one.read_bytes() == other.read_bytes()
    tell(f"island {done}\nalone {alone} ({load()})")


def test_the_processes_of_a_trainer_are_one_peer(processes: Processes, tmp_path: Path) -> None:
    island = Learner(processes, tmp_path / "island", HF, "--steps", "30", ranks=2, pace_s=0.0)
    done = island.end()
    assert len(island.records("done")) == 1, "both processes took themselves for the peer"
    assert done["steps"] == 30
    assert done["tokens"] == 30 * 2 * 8 * 64


def test_two_lightning_trainers_train_one_model(processes: Processes, tmp_path: Path) -> None:
    """The second trainer has two processes, which Lightning starts."""
    anna = Learner(processes, tmp_path / "anna", LIGHTNING, "--steps", "1500", pace_s=0.03)
    options = (anna.link(), "--devices", "2", "--steps", "800")
    boris = Learner(processes, tmp_path / "boris", LIGHTNING, *options, pace_s=0.03)
    for learner in (boris, anna):
        done = learner.end()
        tell(f"{learner.directory.name}: {done} ({load()})")
        assert learner.own_rounds() >= 3
        assert sums_up(done["fates"])
        assert done["loss_last"] < 0.5
