"""Compiled codecs, taken into use beside the event loop.

They need numba, an optional package. Until they are there, and where they cannot be had, numpy's
codecs do the work: both have the same bits, and a round may use either.

A process of its own compiles, and compares the result with numpy. Compiling takes 13 s of
processor time and 70 MB, during which it would keep the interpreter's lock; and a processor that
cannot run the code ends that process, not the peer. The code then lies in numba's cache, from where
this process loads it in a second.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable

from peer.errors import PeerError

COMPILE_FROM_VALUES = 10_000_000
"""Smallest model for which it pays. Compiled codecs save 1.5 ns for each value and round, and cost
two seconds of processor time (13 more the first time), which 130 rounds of all fragments make up
for at this size, and up to 220 MB in the agent.
"""

COMPILE_WITHIN_S = 3600.0
"""Time limit of compiling. It takes many minutes beside a trainer that uses all processors, and
nobody waits for it."""

NICENESS = 10
"""The compiling process starved at nice level 19 beside programs that kept all processors busy."""

END_WITH_PARENT = """
import os, threading
def wait():
    os.read(0, 1)  # ends with the process that holds the other end
    os._exit(1)
threading.Thread(target=wait, daemon=True).start()
"""

IMPORT = "import numba"

COMPILE = """
os.nice({niceness})
from peer.extras.compiled import codecs
codecs.check()
"""


class CodecsNotCompiled(PeerError):
    """Codecs could not be compiled, so numpy's are used: the same bits in more time."""

    reason: str
    message = "codecs are not compiled: {reason}"


async def compile_codecs(values: int, event: Callable[..., None]) -> None:
    """Take compiled codecs into use if the compiler is installed and the model is large.

    ``values``: those of the model. ``event`` hears whether the codecs could be compiled.
    """
    if values < COMPILE_FROM_VALUES or not can_compile():
        return
    began = asyncio.get_running_loop().time()
    try:
        await use_compiled_codecs()
    except CodecsNotCompiled as error:
        event("codecs_not_compiled", reason=error.reason)
    else:
        event("codecs_compiled", took_s=asyncio.get_running_loop().time() - began)


def can_compile() -> bool:
    """Return whether the compiler is installed. It is not imported."""
    return importlib.util.find_spec("numba") is not None


async def try_compiler() -> None:
    """Import the compiler in another process. Raises ``CodecsNotCompiled`` if that fails."""
    await _run(IMPORT, timeout_s=COMPILE_WITHIN_S)


async def use_compiled_codecs(
    *, niceness: int = NICENESS, timeout_s: float = COMPILE_WITHIN_S
) -> None:
    """Compile the codecs, or load them, and put them into the table of codecs.

    ``niceness`` is added to this process's for the one that compiles. Raises
    ``CodecsNotCompiled`` and changes nothing if that fails, whatever the reason is.
    """
    await _run(COMPILE.format(niceness=niceness), timeout_s=timeout_s)
    try:
        await asyncio.to_thread(_load)
    except Exception as error:  # numba's errors have no base in common
        raise CodecsNotCompiled(f"{type(error).__name__}: {error}") from error


async def _run(script: str, *, timeout_s: float) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c"),  # nothing of the current folder is imported
        END_WITH_PARENT + script,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(timeout_s):
            complaint = await process.stderr.read()
            await process.wait()
    except TimeoutError:
        raise CodecsNotCompiled(f"it took longer than {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = complaint.decode(errors="replace").strip().splitlines()
        end = f"its process ended with code {process.returncode}"
        raise CodecsNotCompiled(lines[-1] if lines else end)


def _load() -> None:
    from peer.extras.compiled import codecs

    codecs.check()
    codecs.take()
