"""``examples/launch/slurm.sh`` under Slurm itself: a controller and two nodes on this machine.

Debian's packages slurm-wlm and munge have what it takes; without them the test is skipped.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.views.event_log import read_events
from tests.processes import Processes
from tests.swarms.commands import Command, Swarm, run_text, sums_up, tell, until

SCRIPT = Path(__file__).parents[2] / "examples/launch/slurm.sh"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
missing = [name for name in PROGRAMS if shutil.which(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons start jobs as root"),
]

CONFIGURATION = """\
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=90
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdLogFile={folder}/%n.log
NodeName=left NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000
NodeName=right NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


class Slurm:
    """Slurm on this machine, with its files in one folder."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        ports = []
        for _ in range(3):
            with socket.create_server(("127.0.0.1", 0)) as free:
                ports.append(free.getsockname()[1])
        text = CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports)
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
        processes.start(munge)
        until((folder / "munge.socket").exists, "munge answers")
        for daemon in (["slurmctld"], ["slurmd", "-N", "left"], ["slurmd", "-N", "right"]):
            processes.start([*daemon, "-D"], environment=self._environment)
        until(lambda: "2" in self.call("sinfo", "-h", "-t", "idle", "-o", "%D"), "two nodes are up")

    def call(self, *command: str, **environment: str) -> str:
        """What a command of Slurm prints; empty if it fails."""
        settings = {**os.environ, **self._environment, **environment}
        done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""


@pytest.fixture
def slurm(processes: Processes) -> Iterator[Slurm]:
    # The path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="shoal-slurm-") as folder:
        yield Slurm(processes, Path(folder))


def exported(processes: Processes, directory: Path) -> str:
    """The hash of the model in a peer's folder."""
    model = directory.parent / f"{directory.name}.safetensors"
    command = Command(processes, ["export", str(directory), str(model)])
    assert command.wait(timeout_s=120) == 0, command.output
    return hashlib.sha256(model.read_bytes()).hexdigest()


def test_an_array_of_learners_of_which_one_is_requeued_ends_with_one_model_and_loses_nothing(
    processes: Processes, slurm: Slurm, tmp_path: Path
) -> None:
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text(tokens=700_000), pace_s=0.1)
    link = anna.link()
    options = ["--array=0-1", "--gres=none", "--cpus-per-task=1", "--mem=1G", "--parsable"]
    job = slurm.call(
        *("sbatch", *options, f"--output={tmp_path}/log-%a", f"--chdir={tmp_path}", str(SCRIPT)),
        SHOAL_LINK=link,
        SCRATCH=str(tmp_path),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        SHOAL_LISTEN="/ip4/127.0.0.1/tcp/0",
        SHOAL_PACE="0.1",
        SHOAL_THREADS="1",
        SHOAL_PAGE="off",
        XDG_DATA_HOME=str(tmp_path / "data"),
    )
    assert job
    folders = [tmp_path / "shoal" / str(task) for task in range(2)]

    def rounds(folder: Path) -> int:
        """Rounds since the last start that merged its work."""
        count = 0
        if (folder / "events.jsonl").exists():
            for event in read_events(folder / "events.jsonl"):
                if event["event"] == "agent_started":
                    count = 0
                count += event["event"] == "round" and event.get("contributed", False)
        return count

    def starts(folder: Path) -> int:
        return [e["event"] for e in read_events(folder / "events.jsonl")].count("agent_started")

    try:
        took_s = until(lambda: all(map(rounds, folders)), "both merge", timeout_s=180)
        tell(f"both learners of the array merge after {took_s:.0f} s")
        slurm.call("scontrol", "requeue", f"{job}_1")
        again_s = until(lambda: starts(folders[1]) == 2, "it is started again", timeout_s=300)
        took_s = until(lambda: rounds(folders[1]) > 0, "it merges again", timeout_s=180)
        tell(f"requeued, it starts again after {again_s:.0f} s and merges {took_s:.0f} s later")
        done = anna.end(timeout_s=400)
        until(lambda: not slurm.call("squeue", "-h"), "all tasks have ended", timeout_s=200)
    finally:
        slurm.call("scancel", job)
    logs = [(tmp_path / f"log-{task}").read_text(encoding="utf-8") for task in range(2)]
    first, *last = sorted(
        line
        for log in logs
        for line in log.splitlines()
        if line.startswith(("left the run", "the run is over"))
    )
    assert first.startswith("left the run") and " 0 pending" in first, first
    assert len(last) == 2 and all(" 0 discarded" in line for line in (first, *last)), last
    assert sums_up(done["fates"])
    assert len({exported(processes, folder) for folder in (anna.directory, *folders)}) == 1
