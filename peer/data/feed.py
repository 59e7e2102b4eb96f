"""Batches for a learner until the run is over, on the device on which they are used.

For a CUDA device a batch is copied from page-locked memory on a stream of its own, while the device
computes; the stream that uses the batch waits for the copy, the host never does. Frameworks draw
the order of a dataset from a seed that is the same at every peer, so that all peers would train on
the same batches: ``order_for_peer`` gives their sampler a seed of this peer's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from blake3 import blake3
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from averaging.history.readings import Reading
from dht.identity import PeerId
from peer.data.batches.prefetch import Prefetched, in_background
from peer.data.batches.sequences import Data, Order, Sequences
from peer.data.sources import open_data
from peer.errors import RunRefused
from peer.run_file.places import Place
from peer.run_file.sections import RunFile
from peer.storage.home import data_cache

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

LOOK_EVERY_S = 0.25
"""Seconds between two checks whether the run is over, while waiting for data."""


class Arriving:
    """The download that is under way.

    Streams hold it and not their feed: the thread of a stream ends when its feed is gone.
    """

    def __init__(self) -> None:
        self.now: tuple[str, float] | None = None
        """Name of the file, and the share of it that is there."""

    def heard(self, place: Place, done: int, whole: int) -> None:
        """Note progress, in the thread that downloads."""
        self.now = None if done >= whole else (place.name, done / whole)


class Feed:
    """One learner's batches, from the run's data recipe or from the dataset of the program.

    Readers with different ``reader`` ids read the same data in different orders. ``over()`` says
    whether the run is over.
    """

    def __init__(
        self,
        run: RunFile,
        reader: PeerId,
        *,
        data_dir: Path,
        over: Callable[[], bool],
        fetching: Callable[[str, float], None] = lambda name, share: None,
    ) -> None:
        """``fetching`` is called now and then while a batch is waited for: with the name of a file
        that is being downloaded, and the share of it that is there."""
        self._run = run
        self._fetching = fetching
        self._arriving = Arriving()
        self._run_id = run.run_id
        self._reader = reader
        self._data_dir = data_dir
        self._over = over
        self._recipe: Data | None = None
        self._opening: Future[Data] | None = None
        self._train: Prefetched | None = None
        self._placing: dict[torch.device, Placing] = {}
        self._draws_order = False
        self._position = 0
        self._recipe_at: Mapping[str, int] = {}

    def batches(
        self,
        dataset: Iterable[Batch] | None,
        batch_size: int | None,
        device: torch.device | None = None,
    ) -> Iterator[Any]:
        """The batches that ``Run.data`` returns. ``device``: where those of the recipe are put.

        Raises ``RuntimeError`` in a worker process of a ``DataLoader``, and ``ValueError`` for a
        ``batch_size`` of a dataset, whose items are the batches.
        """
        if dataset is not None and batch_size is not None:
            raise ValueError(
                f"batch_size is {batch_size}; it is for the run's own data. The items of a dataset "
                "are the batches: pass a DataLoader, or a dataset of batches"
            )
        if torch.utils.data.get_worker_info() is not None:
            # Each worker would read all batches, from a position that is never saved.
            raise RuntimeError(
                "the batches of a run are read in the process that trains, and ahead already: use "
                "num_workers=0 for this DataLoader (dataloader_num_workers=0 of transformers)"
            )
        shuffles = isinstance(dataset, DataLoader)
        self._draws_order = dataset is None or shuffles or _has_items(dataset)
        if dataset is None:
            size = batch_size or self._run.inner.batch_size
            return self._recipe_batches(size, device or torch.device("cpu"))
        return self._dataset_batches(dataset)

    @property
    def draws_order(self) -> bool:
        """Say whether the order of the batches is this peer's own, whatever seed is set."""
        return self._draws_order or self._recipe is not None

    def _recipe_batches(self, size: int, device: torch.device) -> Iterator[torch.Tensor]:
        if self.recipe is None:
            return
        assert self._train is not None
        if device not in self._placing:
            self._placing[device] = Placing(device)
        placer = self._placing[device]
        while not self._over():
            placed = self._train.take(size, placer.start, timeout_s=LOOK_EVERY_S)
            if placed is not None:
                yield placer.finish(placed)
            else:
                self._tell_waiting()

    def _tell_waiting(self) -> None:
        if (arriving := self._arriving.now) is not None:
            self._fetching(*arriving)

    def _dataset_batches(self, dataset: Iterable[Batch]) -> Iterator[Batch]:
        if _has_items(dataset):
            items: Any = dataset
            order = Order(len(items), run_id=self._run_id, peer_id=self._reader)
            while not self._over():
                item = int(order.at(self._position, 1)[0])
                self._position += 1
                yield items[item]
            return
        if isinstance(dataset, Iterator):  # such as a generator: there is no second time
            yield from takewhile(lambda _: not self._over(), dataset)
            return
        if isinstance(dataset, DataLoader):
            self._draw_own_order(dataset)
        while not self._over():
            empty = True
            for batch in takewhile(lambda _: not self._over(), dataset):
                empty = False
                yield batch
            if empty:
                raise ValueError("the dataset yields nothing; it must yield at least one batch")

    def _draw_own_order(self, loader: DataLoader[Any]) -> None:
        """Let the loader shuffle differently here than at peers whose programs set equal seeds."""
        if isinstance(loader.sampler, RandomSampler):
            # Drawn, for another order after a restart: the place in a loader is not saved.
            seed, reader = int(torch.randint(2**62, ())), str(self._reader)
        else:  # several processes of one peer may share what it draws
            seed, reader = 0, self._reader.partition("/")[0]
        order_for_peer(loader, run_id=self._run_id, peer_id=reader, seed=seed)

    @property
    def reading(self) -> Reading | None:
        """The last batch of the run's recipe; ``None`` before the first, or if nobody checks it."""
        return None if self._train is None else self._train.reading

    @property
    def recipe(self) -> Data | None:
        """The run's data recipe, opened for this reader.

        ``None`` if the run ended before the recipe was open.
        """
        if self._recipe is None:
            opening = self.begin_to_open()
            # Opening may take minutes. If the run ends first, the thread is abandoned.
            while not wait((opening,), timeout=LOOK_EVERY_S).done:
                if self._over():
                    return None
                self._tell_waiting()
            opened = opening.result()
            if self._recipe_at:
                opened.train.restore_position(self._recipe_at)
            self._train = Prefetched(opened.train, digests=self._run.policy.spot_checks > 0)
            self._recipe = replace(opened, train=self._train)
        return self._recipe

    def begin_to_open(self) -> Future[Data]:
        """Open the run's data recipe in the background, once. Errors are raised by ``recipe``."""
        if self._opening is None:
            cache, heard = data_cache(), self._arriving.heard
            self._opening = in_background(
                lambda: open_data(
                    self._run,
                    peer_id=self._reader,
                    cache_dir=cache,
                    data_dir=self._data_dir,
                    tell=heard,
                ),
                name="open-data",
            )
        return self._opening

    def read_as(self, reader: PeerId, reading: Reading) -> Sequences:
        """The batch that another reader has read. Raises ``DataUnavailable`` or ``ValueError``.

        It may take long: for another thread than the training loop's.
        """
        opened = open_data(
            self._run,
            peer_id=reader,
            cache_dir=data_cache(),
            data_dir=self._data_dir,
        )
        opened.train.restore_position(reading.position)
        return opened.train.next(reading.sequences)

    def state(self) -> dict[str, int]:
        """The position, to be saved."""
        recipe = self._recipe_at if self._recipe is None else self._recipe.train.state()
        return {**recipe, "dataset": self._position}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint of the program. Raises ``RunRefused`` for another run's."""
        if state["run_id"] != self._run_id:
            raise RunRefused("the run of the checkpoint", str(state["run_id"]), self._run_id)
        self.restore_position(state["data"])

    def restore_position(self, state: Mapping[str, int]) -> None:
        """Continue from a ``state``. Raises ``ValueError`` if it is invalid."""
        position = state.get("dataset", 0)
        if position < 0:
            raise ValueError(f"dataset is {position}; it must be at least 0")
        self._position = position
        self._recipe_at = {name: at for name, at in state.items() if name != "dataset"}
        if self._recipe is not None and self._recipe_at:
            self._recipe.train.restore_position(self._recipe_at)


def _has_items(dataset: object) -> bool:
    return isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")


# --- batches on a device ------------------------------------------------------------------------


Placed: TypeAlias = tuple[torch.Tensor, torch.cuda.Event | None]
"""A batch, and the end of its copy to CUDA, which may be under way."""


class Placing:
    """Brings batches to a device: to CUDA from page-locked memory, on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batch: Sequences) -> Placed:
        """Begin to bring a batch to the device. Called by any one thread."""
        tokens = torch.from_numpy(batch)
        if self._stream is None:
            return tokens, None
        # torch reuses page-locked memory only when the copies out of it are complete.
        pinned = tokens.pin_memory()
        with torch.cuda.stream(self._stream):
            return pinned.to(self._device, non_blocking=True), self._stream.record_event()

    def finish(self, placed: Placed) -> torch.Tensor:
        """The batch, for use on the caller's current stream."""
        tokens, arrived = placed
        if arrived is None:
            return tokens.to(self._device)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        # The memory belongs to the side stream: it must outlive what the current one does with it.
        tokens.record_stream(current)
        return tokens


# --- orders of other frameworks ----------------------------------------------------------------


def order_for_peer(loader: Any, *, run_id: str, peer_id: str, seed: int) -> bool:
    """Seed the sampler of a ``DataLoader`` for this peer; the seed is the same after a restart.

    Returns ``False``, with a warning that says what to do, if the loader has no sampler that
    draws an order. All processes of one peer must call it alike.
    """
    key = f"{seed}/{run_id}/{peer_id}".encode()
    own_seed = int.from_bytes(blake3(key).digest(length=7), "little")
    sampler = _sampler_of(loader)
    if hasattr(sampler, "initial_seed"):  # of accelerate, which adds the epoch
        sampler.initial_seed = own_seed
    elif isinstance(sampler, RandomSampler):
        sampler.generator = torch.Generator().manual_seed(own_seed)
    elif isinstance(sampler, DistributedSampler) and sampler.shuffle:
        sampler.seed = own_seed
    else:
        logger.warning(
            "order_not_ours sampler=%s; make sure that every peer trains on different data: "
            "shuffle, or give each peer a part of the dataset",
            type(sampler).__name__,
        )
        return False
    return True


def _sampler_of(loader: Any) -> Any:
    """The innermost sampler: batch samplers wrap it, and sharding samplers wrap those."""
    sampler = getattr(loader, "sampler", None)
    if sampler is None or isinstance(sampler, BatchSampler):
        sampler = getattr(loader, "batch_sampler", sampler)
    outer = getattr(loader, "batch_sampler", None)
    while outer is not None:
        sampler = getattr(outer, "sampler", sampler)
        outer = getattr(outer, "batch_sampler", None)
    return sampler
