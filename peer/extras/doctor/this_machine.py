"""Checks of this machine: disk, memory, torch, and a port to listen on."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from multiaddr import Multiaddr

from dht.bounded_mapping import ALL
from peer.extras.compiled.loading import (
    COMPILE_FROM_VALUES,
    CodecsNotCompiled,
    can_compile,
    try_compiler,
)
from peer.guest.machine import CGROUP, memory
from peer.rules.rented import Container
from peer.storage.address import listen_briefly

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    state: State
    text: str
    remedy: str | None = None
    """Advice on what to do; ``None`` if there is nothing to do."""

    took_s: float | None = None
    """Response time; ``None`` for checks without one."""

    def __str__(self) -> str:
        mark = {"ok": "ok", "warning": "warn", "failed": "FAIL", "skipped": "-"}[self.state]
        line = f"{mark:<5} {self.check:<14} {self.text}"
        return line if self.remedy is None else f"{line}\n{'':<20} -> {self.remedy}"


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing failed; 2: a check of this machine failed; 3: only checks of the network did."""
    failed = {finding.check for finding in findings if finding.state == "failed"}
    seeds = [finding.state for finding in findings if finding.check == "seed"]
    if "seed" in failed and "ok" in seeds:
        failed.discard("seed")  # one that answers is enough to take part
    if not failed:
        return 0
    return 3 if failed <= {"seed", "DHT", "run", "reachability"} else 2


def as_record(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings for ``--json``, and the tables of what others could cause meanwhile. Names are
    stable."""
    return {
        "ok": exit_code(findings) == 0,
        "findings": [asdict(finding) for finding in findings],
        "tables": {name: asdict(used) for name, used in ALL.use().items()},
    }


DISK_FREE_WISHED_BYTES = 5 << 30
DISK_FREE_MIN_BYTES = 512 << 20
MEMORY_WISHED_BYTES = 4 << 30
MEMORY_MIN_BYTES = 1 << 30
TORCH_TIMEOUT_S = 120.0

END_WITH_PARENT = """
import ctypes, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
"""
"""Ends the process that asks a driver with its parent. If the driver hangs, so may Python in that
process, and only the kernel can end it."""

ASK_TORCH = """
import json, torch
found = {"version": torch.__version__, "device": "cpu", "name": "", "memory": 0}
if torch.cuda.is_available():
    torch.zeros(1, device="cuda").add_(1).item()
    properties = torch.cuda.get_device_properties(0)
    found |= {"device": "cuda", "name": properties.name, "memory": properties.total_memory}
elif torch.backends.mps.is_available():
    torch.zeros(1, device="mps").add_(1).item()
    found |= {"device": "mps"}
found["threads"] = torch.get_num_threads()
found["built_for_cuda"] = torch.version.cuda or ""
print(json.dumps(found))
"""


def check_disk(path: Path) -> Finding:
    """Free space for checkpoints, and permission to write them."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        return Finding(
            "disk",
            "failed",
            f"this user cannot write to {path}",
            f"`sudo chown {os.getuid()} {place}`, or set XDG_DATA_HOME to another folder",
        )
    free = shutil.disk_usage(place).free
    text = f"{_size(free)} free in {path}"
    if free < DISK_FREE_MIN_BYTES:
        remedy = "free some space, or set XDG_DATA_HOME to a folder with more"
        return Finding("disk", "failed", text, remedy)
    if free < DISK_FREE_WISHED_BYTES:
        remedy = "enough for small models only: a checkpoint takes 12 bytes per parameter"
        return Finding("disk", "warning", text, remedy)
    return Finding("disk", "ok", text)


def check_memory(cgroup: Path = CGROUP) -> Finding:
    seen = memory(cgroup)
    where = ", the limit of this container" if seen.is_of_container else ""
    text = f"{_size(seen.available)} available of {_size(seen.total)}{where}"
    if seen.available < MEMORY_MIN_BYTES:
        return Finding("memory", "failed", text, "close other programs or add memory")
    if seen.available < MEMORY_WISHED_BYTES:
        return Finding("memory", "warning", text, "enough for small models and bootstrap peers")
    return Finding("memory", "ok", text)


async def check_torch(script: str = ASK_TORCH) -> Finding:
    """The device torch would train on, asked in a process that a broken driver may crash."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "skipped", "not installed: this machine can host, and not train")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c"),  # nothing of the current folder is imported
        END_WITH_PARENT + script,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TORCH_TIMEOUT_S):
            output, complaint = await process.communicate()
    except TimeoutError:
        return Finding(
            "torch",
            "failed",
            f"no answer from the device within {TORCH_TIMEOUT_S:g} s",
            "the driver hangs: check `nvidia-smi`, then restart the machine",
        )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = complaint.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"its process ended with code {process.returncode}"
        remedy = "reinstall torch for this machine, see https://pytorch.org/get-started/locally"
        return Finding("torch", "failed", f"torch cannot be used: {reason}", remedy)
    return _judge_torch(json.loads(output.decode().strip().splitlines()[-1]))


def _judge_torch(found: dict[str, object]) -> Finding:
    version = f"torch {found['version']}"
    if found["device"] == "cuda":
        memory = _size(int(str(found["memory"])))
        return Finding("torch", "ok", f"{version} on {found['name']} with {memory}")
    if found["device"] == "mps":
        return Finding("torch", "ok", f"{version} on Apple's GPU (mps)")
    text = f"{version} on the CPU, {found['threads']} threads"
    if shutil.which("nvidia-smi"):
        remedy = (
            "the GPU is not used: update its driver (`nvidia-smi` shows it)"
            if found["built_for_cuda"]
            else "the GPU is not used: install a torch that was built with CUDA"
        )
        return Finding("torch", "warning", text, remedy)
    return Finding("torch", "ok", text)


async def check_codecs() -> Finding:
    """Say whether a peer on this machine would compile its codecs. They are not compiled here."""
    if not can_compile():
        return Finding("codecs", "ok", "of numpy; `pip install 'shoal[fast]'` has faster ones")
    try:
        await try_compiler()
    except CodecsNotCompiled as error:
        return Finding("codecs", "warning", str(error), "`pip install --upgrade numba numpy`")
    models = f"models of {COMPILE_FROM_VALUES // 10**6} million parameters or more"
    return Finding("codecs", "ok", f"compiled as a peer joins a run, for {models}")


def check_container(container: Container) -> Finding:
    """Check that a rented container has public ports for a peer. Dialling back is tried later."""
    ports = ", ".join(map(container.shown, container.usable))
    text = f"{container.provider} leads {ports or 'no port above 1023'}"
    if len(container.usable) < 2:
        remedy = (
            "rent it with two public TCP ports, such as 7701 and 7702: one by which others find "
            "the peer, one for bulk data"
        )
        return Finding("container", "warning", text, remedy)
    return Finding("container", "ok", f"{text}; a peer listens at the first two that are free")


def check_port(port: int) -> Finding:
    """Check that this user may listen on the port, or on any port."""
    try:
        got = listen_briefly(Multiaddr(f"/ip4/0.0.0.0/tcp/{port}"))
    except OSError as error:
        remedy = (
            f"`ss -ltnp 'sport = :{port}'` names the program that has it; choose another --port"
            if port
            else "allow this user or container to listen on TCP ports"
        )
        reason = error.strerror or str(error)
        return Finding("listening port", "failed", f"TCP port {port}: {reason}", remedy)
    text = f"TCP port {port} is free" if port else f"TCP ports can be opened (got {got})"
    return Finding("listening port", "ok", text)


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
