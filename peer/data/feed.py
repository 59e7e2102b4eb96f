"""What a learner trains on, batch after batch, until the run is over."""

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
"""While it waits for data, it looks so often whether it is over."""


class Feed:
    """Batches of one learner's own shard, of the run's data recipe or of the caller's dataset.

    ``reader`` is who reads: readers of different names walk the same data in different orders.
    """

    def __init__(
        self, run: RunFile, reader: PeerId, *, data_dir: Path, over: Callable[[], bool]
    ) -> None:
        self._run = run
        self._run_id = run.run_id
        self._reader = reader
        self._data_dir = data_dir
        self._over = over
        self._from_afar = isinstance(run.data, HfData)
        self._recipe: Data | None = None
        self._position = 0
        self._recipe_at: Mapping[str, int] = {}

    def batches(self, dataset: Iterable[Batch] | None, batch_size: int | None) -> Iterator[Any]:
        """See ``Run.data``."""
        if dataset is None:
            return self._of_recipe(batch_size or self._run.inner.batch_size)
        return self._of(dataset)

    def _of_recipe(self, batch_size: int) -> Iterator[torch.Tensor]:
        if (recipe := self.recipe) is None:
            return
        read = partial(recipe.train.next, batch_size)
        while not self._over():
            batch = self._unless_over(read) if self._from_afar else read()
            if batch is not None:
                yield torch.from_numpy(batch)

    def _of(self, dataset: Iterable[Batch]) -> Iterator[Batch]:
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
                raise ValueError("the dataset yields nothing; there is nothing to train on")

    @property
    def recipe(self) -> Data | None:
        """What the run's data recipe gives this reader: its stream and the held-out part.

        ``None`` where it was over before they could be read.
        """
        if self._recipe is None:
            cache = data_home(os.environ) / "data"
            self._recipe = self._unless_over(
                lambda: open_data(
                    self._run, peer_id=self._reader, cache_dir=cache, data_dir=self._data_dir
                )
            )
            if self._recipe is not None and self._recipe_at:
                self._recipe.train.restore(self._recipe_at)
        return self._recipe

    def _unless_over(self, read: Callable[[], T]) -> T | None:
        """What ``read`` returns, which may take minutes: large files, a hub that does not answer.

        ``None`` once it is over. Who reads is then left behind in its thread; nothing more is read.
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
        """Where it stands, to be saved."""
        recipe = self._recipe_at if self._recipe is None else self._recipe.train.state()
        return {**recipe, "dataset": self._position}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the caller's. Raises ``RunRefused`` for another run's."""
        if state["run_id"] != self._run_id:
            raise RunRefused("the run of the checkpoint", str(state["run_id"]), self._run_id)
        self.restore(state["data"])

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from there. Raises ``ValueError`` for what no feed can have said."""
        position = state.get("dataset", 0)
        if position < 0:
            raise ValueError(f"dataset is {position}; it must be at least 0")
        self._position = position
        self._recipe_at = {name: at for name, at in state.items() if name != "dataset"}
        if self._recipe is not None and self._recipe_at:
            self._recipe.train.restore(self._recipe_at)
