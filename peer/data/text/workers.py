"""Processes that tokenize pieces of text into the cache.

They are processes, and of a lower priority, so that training is not disturbed: a thread would hold
the lock of Python while it makes arrays of what the tokenizer returns. They have limits
(``peer.processes``), as text and tokenizer may be a stranger's. ``python -m
peer.data.text.workers`` reads jobs as lines of JSON and answers each with a line. It ends when its
input is closed, hence with its parent, and after a minute without a job.
"""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import msgspec

from dht.public_ip import is_public
from peer.data.text.downloads import Host
from peer.data.text.formats import (
    DataFile,
    Unreached,
    piece_count,
    text_of_piece,
    unreadable,
)
from peer.data.text.token_cache import TokenCache
from peer.data.text.tokenizing import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    TokenizerFacts,
    sequences_of,
    tokens_of,
)
from peer.errors import DataUnavailable, PeerError, one_line
from peer.processes import (
    child_environment,
    ended_by_limit,
    limit_memory,
    limit_processor,
    refuse_network,
)

MEMORY_MAX_BYTES = 4 << 30
"""A document of 16 MB takes half of it in a tokenizer of the hub."""

PROCESSOR_MAX_S = 300
"""Time for one job: a slow machine tokenizes a piece of the largest size in some minutes."""

_REACHES_NOBODY, _REACHES_PUBLIC_HOSTS, _REACHES_ANY_HOST = "nobody", "public-hosts", "any-host"
_ALLOWED: dict[str, Callable[[str], bool] | None] = {
    _REACHES_NOBODY: None,
    _REACHES_PUBLIC_HOSTS: is_public,
    _REACHES_ANY_HOST: lambda address: True,
}
"""The addresses that a process may connect to; ``None``: none, and no name is looked up."""

IDLE_S = 60.0
NICENESS = 10
WORKERS_MAX = 8


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of text to tokenize: one piece of a file, several small files, or none."""

    files: tuple[DataFile, ...] = ()
    piece: int = 0
    """Number of the piece of a single file; several files are read whole."""
    tokenizer: str | None = None
    """Path of a tokenizer.json; ``None``: bytes."""
    end_token: str = ""
    held_out: float = 0.0
    sequence_length: int = 0
    """Length of sequences that hold whole examples."""
    cache: str = ""
    key: str | None = None
    """Name of the entry in the cache; ``None``: the text is read and nothing is made of it."""
    counts: bool = False
    """Only the pieces of the first file are counted."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    problem: str | None = None
    unreached: bool = False
    """The problem is one of the way to the hub."""
    tokenizer: TokenizerFacts | None = None
    pieces: int = 0


def carry_out(job: Job) -> TokenizerFacts:
    """Tokenize a piece into the cache. Raises ``PeerError``."""
    try:
        tokenizer = _tokenizer_of(job)
        text = text_of_piece(job.files, job.piece)
        if job.key is None:
            for _ in text:
                pass
            return tokenizer.facts
        form = job.files[0].form
        if form is None:
            tokens = tokens_of(text, tokenizer, held_out=job.held_out)
        else:
            tokens = sequences_of(
                text, tokenizer, form, held_out=job.held_out, size=job.sequence_length + 1
            )
    except OSError as error:
        raise unreadable(error) from error
    _cache(job.cache).write(job.key, tokens.train, tokens.held_out)
    return tokenizer.facts


def _tokenizer_of(job: Job) -> Tokenizer:
    changed = None if job.tokenizer is None else Path(job.tokenizer).stat().st_mtime_ns
    return _tokenizer(job.tokenizer, job.end_token, changed)


@lru_cache(maxsize=4)
def _tokenizer(path: str | None, end_token: str, changed: int | None) -> Tokenizer:
    return ByteTokenizer() if path is None else FileTokenizer(Path(path), end_token)


@lru_cache(maxsize=4)
def _cache(folder: str) -> TokenCache:
    return TokenCache(Path(folder))


def _reach_of(hub: Host) -> str:
    """A user's own hub, and a proxy, may have any address; a hub leads to public ones only."""
    own = hub.is_chosen or bool(urllib.request.getproxies())
    return _REACHES_ANY_HOST if own else _REACHES_PUBLIC_HOSTS


def _usual_count() -> int:
    """Half of the cores for workers, shared by the processes that are one learner."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")  # of torchrun
    sharing = max(1, int(ranks)) if ranks.isdigit() else 1
    return max(1, min(WORKERS_MAX, (cores or 2) // 2 // sharing))


class Workers:
    """A number of worker processes, each started when it is needed. For use by threads.

    ``hub``: they read files of the hub, which they reach as the user of this machine does.
    """

    def __init__(self, count: int | None = None, *, hub: Host | None = None) -> None:
        self.count = count or _usual_count()
        self._idle: queue.Queue[_Worker] = queue.LifoQueue()  # so that few run when few suffice
        for _ in range(self.count):
            self._idle.put(_Worker(_REACHES_NOBODY if hub is None else _reach_of(hub)))

    def do(self, job: Job) -> TokenizerFacts:
        """Carry a job out as soon as a worker is free. Raises ``DataUnavailable``."""
        facts = self._ask(job).tokenizer
        assert facts is not None  # of an answer without a problem
        return facts

    def pieces_of(self, file: DataFile) -> int:
        """Number of pieces of a file. Raises ``DataUnavailable``.

        A file that says itself what is in it, or that is elsewhere, is opened by a process alone.
        """
        if file.suffix == ".parquet" or file.is_on_hub:
            return self._ask(Job(files=(file,), counts=True)).pieces
        return counted(file)

    def _ask(self, job: Job) -> Answer:
        worker = self._idle.get()
        try:
            answer = worker.ask(job)
        finally:
            self._idle.put(worker)
        if answer.problem is not None:
            kind = Unreached if answer.unreached else DataUnavailable
            raise kind("files", answer.problem)
        return answer

    def close(self) -> None:
        """End the processes that are idle. A later job starts one again."""
        idle = []
        with suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for worker in idle:
            worker.end()
            self._idle.put(worker)

    def __del__(self) -> None:
        self.close()


class _Worker:
    def __init__(self, reaches: str) -> None:
        self._reaches = reaches
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Job) -> Answer:
        line = msgspec.json.encode(job) + b"\n"
        for _ in range(2):  # it may have ended for want of jobs, or been killed
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                if answer := process.stdout.readline():
                    return msgspec.json.decode(answer, type=Answer)
            except BrokenPipeError:
                pass
            code = self.end()
            if ended_by_limit(code):
                break
        names = ", ".join(file.name for file in job.files) or str(job.tokenizer)
        if ended_by_limit(code):
            reason = (
                f"took too much memory or too long at {names[:200]}; divide documents of more than "
                "16 MB, or ask the run's author about this file and the tokenizer"
            )
        else:
            reason = (
                f"ended with the code {code} at {names[:200]}; if the machine ran out of memory, "
                "close other programs"
            )
        raise DataUnavailable("files", f"the process that tokenizes {reason}")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "peer.data.text.workers", self._reaches],
                env={
                    **child_environment(os.environ),
                    # Of several processes, these are the parallel part.
                    "TOKENIZERS_PARALLELISM": "false",
                    # Others reserve memory ahead of its use, which counts for the limit.
                    "ARROW_DEFAULT_MEMORY_POOL": "system",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the trainer, which closes the input
            )
        return self._process

    def end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        return process.wait()


def counted(file: DataFile) -> int:
    """Number of pieces of a file. Raises ``DataUnavailable``."""
    try:
        return piece_count(file)
    except OSError as error:
        raise unreadable(error) from error


def _done(job: Job) -> Answer:
    if job.counts:
        return Answer(pieces=counted(job.files[0]))
    return Answer(tokenizer=carry_out(job))


def _answer(line: bytes) -> Answer:
    try:
        job = msgspec.json.decode(line, type=Job)
        return _done(job)
    except DataUnavailable as error:
        return Answer(problem=error.reason, unreached=isinstance(error, Unreached))
    except PeerError as error:
        return Answer(problem=str(error))
    except BaseException as error:  # a panic of Rust is no Exception
        return Answer(problem=f"a file or its tokenizer cannot be read: {one_line(error)}")


def main() -> int:
    os.nice(NICENESS)
    refuse_network(_ALLOWED[sys.argv[1]])
    limit_memory(MEMORY_MAX_BYTES)
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    # One line at a time is under way, so that none waits in the buffer when ``select`` looks.
    while select.select([jobs], [], [], IDLE_S)[0] and (line := jobs.readline()):
        limit_processor(PROCESSOR_MAX_S)
        try:
            answers.write(msgspec.json.encode(_answer(line)) + b"\n")
            answers.flush()
        except BrokenPipeError:
            break
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
