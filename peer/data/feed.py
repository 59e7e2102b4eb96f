"""Batches for a learner until the run is over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, wait
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch

from dht.identity import PeerId
from peer.data.order import Order
from peer.data.sequences import Data
from peer.data.sources import open_data
from peer.errors import RunRefused
from peer.run_file.sections import HfData, RunFile
from peer.storage.home import data_home

Batch = TypeVar("Batch")
T = TypeVar("T")

LOOK_EVERY_S = 0.25
"""Seconds between two checks whether the run is over, while waiting for data."""


class Feed:
    """One learner's batches, from the run's data recipe or from the dataset of the program.

    Readers with different ``reader`` ids read the same data in different orders. ``over()`` says
    whether the run is over.
    """

    def __init__(
        self, run: RunFile, reader: PeerId, *, data_dir: Path, over: Callable[[], bool]
    ) -> None:
        self._run = run
        self._run_id = run.run_id
        self._reader = reader
        self._data_dir = data_dir
        self._over = over
        self._is_remote = isinstance(run.data, HfData)
        self._recipe: Data | None = None
        self._position = 0
        self._recipe_at: Mapping[str, int] = {}

    def batches(self, dataset: Iterable[Batch] | None, batch_size: int | None) -> Iterator[Any]:
        """The batches that ``Run.data`` returns."""
        if dataset is None:
            return self._recipe_batches(batch_size or self._run.inner.batch_size)
        return self._dataset_batches(dataset)

    def _recipe_batches(self, batch_size: int) -> Iterator[torch.Tensor]:
        if (recipe := self.recipe) is None:
            return
        read = partial(recipe.train.next, batch_size)
        while not self._over():
            batch = self._read_unless_over(read) if self._is_remote else read()
            if batch is not None:
                yield torch.from_numpy(batch)

    def _dataset_batches(self, dataset: Iterable[Batch]) -> Iterator[Batch]:
        if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
            items: Any = dataset
            order = Order(len(dataset), run_id=self._run_id, peer_id=self._reader)
            while not self._over():
                item = int(order.at(self._position, 1)[0])
                self._position += 1
                yield items[item]
            return
        while not self._over():
            empty = True
            for batch in takewhile(lambda _: not self._over(), dataset):
                empty = False
                yield batch
            if empty:
                raise ValueError("the dataset yields nothing; it must yield at least one batch")

    @property
    def recipe(self) -> Data | None:
        """The run's data recipe, opened for this reader.

        ``None`` if the run ended before the recipe was open.
        """
        if self._recipe is None:
            cache = data_home(os.environ) / "data"
            self._recipe = self._read_unless_over(
                lambda: open_data(
                    self._run, peer_id=self._reader, cache_dir=cache, data_dir=self._data_dir
                )
            )
            if self._recipe is not None and self._recipe_at:
                self._recipe.train.restore(self._recipe_at)
        return self._recipe

    def _read_unless_over(self, read: Callable[[], T]) -> T | None:
        """The result of ``read``, or ``None`` as soon as the run is over.

        Reading may take minutes: large files, a hub that does not answer. If the run ends first,
        the reader thread is abandoned; it ends with the process.
        """
        reading: Future[T] = Future()

        def work() -> None:
            try:
                reading.set_result(read())
            except BaseException as error:
                reading.set_exception(error)

        Thread(target=work, name="read", daemon=True).start()
        while not wait((reading,), timeout=LOOK_EVERY_S).done:
            if self._over():
                return None
        return reading.result()

    def state(self) -> dict[str, int]:
        """The position, to be saved."""
        recipe = self._recipe_at if self._recipe is None else self._recipe.train.state()
        return {**recipe, "dataset": self._position}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint of the program. Raises ``RunRefused`` for another run's."""
        if state["run_id"] != self._run_id:
            raise RunRefused("the run of the checkpoint", str(state["run_id"]), self._run_id)
        self.restore(state["data"])

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a ``state``. Raises ``ValueError`` if it is invalid."""
        position = state.get("dataset", 0)
        if position < 0:
            raise ValueError(f"dataset is {position}; it must be at least 0")
        self._position = position
        self._recipe_at = {name: at for name, at in state.items() if name != "dataset"}
        if self._recipe is not None and self._recipe_at:
            self._recipe.train.restore(self._recipe_at)
