"""The time that training waits for data: files of text, a real tokenizer, a given appetite.

The tokenizer is trained on the sources of the standard library, the corpus is made of pieces of
them. The first pass tokenizes, every further one reads what was kept.
"""

from __future__ import annotations

import hashlib
import json
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dht.identity import PeerId
from peer.data.batches.prefetch import Prefetched
from peer.data.batches.sequences import TokenStream
from peer.data.files import open_files
from peer.data.finding import stdlib_files
from peer.data.text.workers import Workers
from peer.run_file.places import pinned
from peer.run_file.sections import FilesData, FileSource, GptModel, RunFile

LENGTH, BATCH = 1024, 32
VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class DataSpeed:
    workers: int
    corpus_bytes: int
    tokens: int
    """Tokens of the corpus."""
    first_tokens_per_s: float
    """Sequences as fast as they come, while they are tokenized."""
    worker_tokens_per_cpu_s: float
    """Tokens per second of the workers' processor time, which other programs disturb little."""
    kept_tokens_per_s: float
    """Sequences as fast as they come, out of the cache."""
    appetite_per_s: float
    waited_share: float
    """Share of the time in which training at that appetite waits, out of the cache."""
    longest_wait_s: float
    first_waited_share: float
    """The same in a first pass, while the text is tokenized."""

    def __str__(self) -> str:
        return (
            f"{self.corpus_bytes / 1e6:.0f} MB of text, {self.tokens / 1e6:.1f} M tokens; "
            f"{self.workers} workers: first pass {self.first_tokens_per_s / 1e6:.2f} M tokens/s, "
            f"{self.worker_tokens_per_cpu_s / 1e6:.2f} M per second of a worker's processor time, "
            f"further ones {self.kept_tokens_per_s / 1e6:.1f} M tokens/s; at "
            f"{self.appetite_per_s / 1e6:.1f} M tokens/s training waits {self.waited_share:.3%} of "
            f"the time, at most {self.longest_wait_s * 1e3:.1f} ms at once, and in a first pass "
            f"{self.first_waited_share:.2%}"
        )


def measure(
    folder: Path, *, megabytes: int, appetite_per_s: float, seconds: float, workers: int
) -> DataSpeed:
    pool, another = Workers(workers), Workers(workers)
    try:
        run, recipe, corpus_bytes = _prepared(folder, megabytes)

        def opened(cache: str = "cache", pool: Workers = pool) -> Prefetched:
            stream: TokenStream = open_files(
                run,
                recipe,
                PeerId("anna"),
                cache_dir=folder / cache,
                data_dir=folder,
                workers=pool,
            ).train
            return Prefetched(stream)

        before = _children_s()
        tokens = _fill(opened())
        first = tokens[0] / tokens[1]
        pool.close()  # the time of children is known when they have ended
        work_s = _children_s() - before
        kept = _fill(opened())
        waited, longest = _feed(opened(), appetite_per_s, seconds)
        first_waited, _ = _feed(opened("another", another), appetite_per_s, seconds)
    finally:
        pool.close()
        another.close()
    return DataSpeed(
        workers=workers,
        corpus_bytes=corpus_bytes,
        tokens=tokens[0],
        first_tokens_per_s=first,
        worker_tokens_per_cpu_s=tokens[0] / work_s,
        kept_tokens_per_s=kept[0] / kept[1],
        appetite_per_s=appetite_per_s,
        waited_share=waited,
        longest_wait_s=longest,
        first_waited_share=first_waited,
    )


def _children_s() -> float:
    """Processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _prepared(folder: Path, megabytes: int) -> tuple[RunFile, FilesData, int]:
    import tokenizers

    sources = [path.read_text(errors="replace") for _, path in stdlib_files()]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(sources[:: max(1, 40 // max(1, megabytes))], trainer)
    made.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    size = 0
    with (folder / "corpus.jsonl").open("w") as corpus:
        while size < megabytes << 20:
            text = sources[int(rng.integers(len(sources)))]
            start = int(rng.integers(max(1, len(text) - 4000)))
            size += corpus.write(json.dumps({"text": text[start : start + 4000]}) + "\n")
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    recipe = FilesData(
        sources=[FileSource(files=["corpus.jsonl"])],
        tokenizer=pinned("tokenizer.json", digest),
        end_token="<|endoftext|>",
        sequence_length=LENGTH,
    )
    run = RunFile(model=GptModel(context=LENGTH, vocabulary=VOCABULARY), data=recipe)
    return run, recipe, size


def _fill(stream: Prefetched) -> tuple[int, float]:
    """Tokens of one pass over the corpus, and the seconds that it took."""
    began, tokens = time.perf_counter(), 0
    while stream.state()["0/visit"] < 1:
        tokens += stream.next(BATCH)[:, 1:].size
    return tokens, time.perf_counter() - began


def _feed(stream: Prefetched, appetite_per_s: float, seconds: float) -> tuple[float, float]:
    """Share of the time that is waited, and the longest wait, after the first batch."""
    stream.next(BATCH)
    step_s = BATCH * LENGTH / appetite_per_s
    waited, longest = 0.0, 0.0
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        stream.next(BATCH)
        taken = time.perf_counter()
        waited, longest = waited + taken - now, max(longest, taken - now)
        time.sleep(max(0.0, now + step_s - taken))
    return waited / (time.perf_counter() - began), longest


@pytest.mark.bench
def test_training_waits_for_data_less_than_a_hundredth_of_the_time(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    speed = measure(tmp_path, megabytes=64, appetite_per_s=1e6, seconds=10.0, workers=2)
    print(f"\n{speed}")
    assert speed.waited_share < 0.01
