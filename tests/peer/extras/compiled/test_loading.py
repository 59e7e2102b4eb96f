"""Compiled codecs are taken into use, or not, and peers with and without them agree."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.processes import Child, still_running

pytest.importorskip("numba", reason="compiled codecs need the extra 'fast'")

from averaging.history import replay
from averaging.numbers import arithmetic
from averaging.numbers.codec import Codec
from averaging.numbers.codecs import codec_named
from averaging.rules.policy import RoundPolicy
from dht.errors import PeerUnreachable
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from peer.agent import life
from peer.agent.peer import Peer
from peer.agent.services import Role
from peer.extras.compiled import codecs, kernels, loading
from peer.extras.compiled.codecs import PAIRS
from peer.extras.compiled.loading import (
    CodecsNotCompiled,
    can_compile,
    compile_codecs,
    try_compiler,
    use_compiled_codecs,
)
from tests.averaging.live.quadratic import POLICY, swarm
from tests.peer.agent.example_peers import peer_in

COMPILED = {codec.name: codec for _, codec in PAIRS}


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """The table of codecs is as before when a test ends."""
    yield
    codecs.give_back()


def are_compiled() -> set[bool]:
    return {codec_named(name) is COMPILED[name] for name in COMPILED}


def test_codecs_are_compiled_and_taken_into_use() -> None:
    assert can_compile()
    asyncio.run(use_compiled_codecs(niceness=0))
    assert are_compiled() == {True}


@pytest.mark.parametrize(
    ("script", "timeout_s", "reason"),
    [
        ("raise RuntimeError('no locator available')", 60.0, "RuntimeError: no locator available"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", 60.0, "ended with code -4"),
        ("import time; time.sleep(60)", 0.2, "it took longer than 0.2 s"),
    ],
)
def test_a_compiler_that_fails_leaves_the_codecs_of_numpy(
    monkeypatch: pytest.MonkeyPatch, script: str, timeout_s: float, reason: str
) -> None:
    monkeypatch.setattr(loading, "COMPILE", script)
    with pytest.raises(CodecsNotCompiled, match=reason):
        asyncio.run(use_compiled_codecs(timeout_s=timeout_s))
    assert are_compiled() == {False}
    monkeypatch.setattr(loading, "IMPORT", script)
    monkeypatch.setattr(loading, "COMPILE_WITHIN_S", timeout_s)
    with pytest.raises(CodecsNotCompiled, match=reason):
        asyncio.run(try_compiler())


def test_the_process_that_compiles_ends_with_the_peer(tmp_path: Path) -> None:
    """A peer that is killed says nothing to it."""
    at = tmp_path / "pid"
    compiles = f"open({str(at)!r}, 'w').write(str(os.getpid())); import time; time.sleep(60)"
    killed = f"""
import asyncio
from peer.extras.compiled import loading
loading.COMPILE = {compiles!r}
asyncio.run(loading.use_compiled_codecs())
"""
    deadline = time.monotonic() + 60.0
    with Child("-c", killed) as peer:
        while not (at.exists() and at.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        compiler = psutil.Process(int(at.read_text()))
        peer.kill()
    assert still_running([compiler], timeout_s=60.0) == []


def test_files_of_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numba.py").write_text("raise SystemExit('a file of somebody else was run')")
    monkeypatch.chdir(tmp_path)
    asyncio.run(try_compiler())


def test_codecs_that_differ_from_numpy_in_this_process_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "COMPILE", "")
    kernel = kernels.encode
    monkeypatch.setattr(
        kernels,
        "encode",
        lambda codec, tiles, base, values, out, rest: kernel(
            codec, tiles, base, np.nextafter(values, np.float32(9)), out, rest
        ),
    )
    with pytest.raises(CodecsNotCompiled, match="other bits than numpy's"):
        asyncio.run(use_compiled_codecs())
    assert are_compiled() == {False}


def test_without_the_package_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not can_compile()


@pytest.mark.parametrize("error", [None, CodecsNotCompiled("no room for the cache")])
def test_a_peer_of_a_large_model_compiles_codecs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, error: CodecsNotCompiled | None
) -> None:
    tries, told = [], []

    async def use() -> None:
        tries.append(1)
        if error is not None:
            raise error

    def event(name: str, **fields: object) -> None:
        told.append((name, fields))

    monkeypatch.setattr(loading, "use_compiled_codecs", use)
    monkeypatch.setattr(loading, "can_compile", lambda: True)
    run(compile_codecs(loading.COMPILE_FROM_VALUES - 1, event))
    assert not tries, "a small model gains nothing"
    run(compile_codecs(loading.COMPILE_FROM_VALUES, event))
    ((name, fields),) = told
    assert name == ("codecs_compiled" if error is None else "codecs_not_compiled")
    assert len(tries) == 1
    assert error is None or fields["reason"] == "no room for the cache"
    monkeypatch.setattr(loading, "can_compile", lambda: False)
    run(compile_codecs(loading.COMPILE_FROM_VALUES, event))
    assert len(tries) == 1


def test_a_peer_compiles_codecs_from_its_first_moment_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    async def compile_codecs(values: int, event: Callable[..., None]) -> None:
        asked.append((values, event))

    async def go_online(peer: Peer, stack: AsyncExitStack) -> None:
        await asyncio.sleep(1.0)
        raise PeerUnreachable("anna", "nobody is there")

    async def main() -> None:
        peer = peer_in(tmp_path, Role())
        with pytest.raises(PeerUnreachable):
            await life.live(peer)
        assert asked == [(16, peer.event)]

    monkeypatch.setattr(loading, "compile_codecs", compile_codecs)
    monkeypatch.setattr(life, "go_online", go_online)
    run(main())


MOSTLY = replace(POLICY, audit_rate=1.0)


@pytest.mark.parametrize(
    "policy",
    [
        replace(MOSTLY, codec="int2", codec_down="int4", feedback=frozenset({"int2"})),
        replace(MOSTLY, codec="f16", codec_down="int4", merge="centered_clip"),
    ],
    ids=["mean", "centered clip"],
)
def test_peers_with_and_without_compiled_codecs_agree_and_convict_nobody(
    monkeypatch: pytest.MonkeyPatch, policy: RoundPolicy
) -> None:
    """Each peer, audit and replay has either kind of codec for each way of a round."""
    rng, drawn = np.random.default_rng(1), set()

    def either(name: str) -> Codec:
        pair = [(numpys, compiled) for numpys, compiled in PAIRS if numpys.name == name]
        if not pair:
            return codec_named(name)
        number = int(rng.integers(2))
        drawn.add((name, number))
        return pair[0][number]

    monkeypatch.setattr(arithmetic, "codec_named", either)
    monkeypatch.setattr(replay, "codec_named", either)

    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            peers = [await made.add(name, policy=policy) for name in ("anna", "boris", "clara")]
            await made.live(35.0)
            assert sum(peer.averager.guard.counters["audits"] for peer in peers) > 10
            assert not any(peer.averager.guard.convicted for peer in peers)
            assert not any(peer.told("audit_refused") for peer in peers)
            made.check()

    run(main())
    assert len(drawn) >= 4, "a way of the rounds had one kind of codec only"
