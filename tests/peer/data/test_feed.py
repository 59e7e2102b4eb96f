from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from dht.identity import PeerId
from peer.data import feed as reading
from peer.data.batches.sequences import Data, Sequences, TokenStream
from peer.data.feed import Feed
from peer.data.sources import open_data
from peer.data.text.downloads import TellOf
from peer.errors import DataUnavailable, RunRefused
from peer.run_file.places import Place
from peer.run_file.sections import FileSource, GptModel, PythonStdlibData, RunFile, TextData
from tests.peer.data.file_corpus import run_of, texts, write

RUN = RunFile(model=GptModel(context=16), data=PythonStdlibData(sequence_length=16))
ITEMS = list(range(50))


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # One for all tests here: the corpus is built once.
    home = tmp_path_factory.getbasetemp() / "feed-home"
    monkeypatch.setenv("XDG_DATA_HOME", str(home))


def feed(reader: str = "anna", *, over: Callable[[], bool] = lambda: False) -> Feed:
    return Feed(RUN, PeerId(reader), data_dir=Path(), over=over)


def test_reading_continues_at_the_position_of_a_checkpoint() -> None:
    first = feed()
    seen = list(islice(first.batches(ITEMS, None), 20))
    state = {"run_id": RUN.run_id, "data": first.state()}
    again = feed()
    again.resume(state)
    assert sorted(seen + list(islice(again.batches(ITEMS, None), 30))) == ITEMS


def order_of(
    reader: str, *, seed: int = 0, distributed: tuple[int, int] | None = None
) -> list[int]:
    torch.manual_seed(seed)
    items: Any = ITEMS
    sampler: DistributedSampler[int] | None = None
    if distributed is not None:
        sampler = DistributedSampler(items, rank=distributed[0], num_replicas=distributed[1])
    loader = DataLoader(items, batch_size=1, sampler=sampler, shuffle=sampler is None)
    return [int(item) for item in islice(feed(reader).batches(loader, None), len(loader))]


def test_loaders_of_peers_with_equal_seeds_shuffle_differently() -> None:
    """All peers trained on the same batches in the same order, where programs set a seed."""
    assert sorted(order_of("anna")) == sorted(order_of("boris")) == ITEMS
    assert order_of("anna") == order_of("anna")
    assert order_of("anna") != order_of("boris")
    assert order_of("anna") != order_of("anna/1")
    assert order_of("anna") != order_of("anna", seed=1), "it was restarted"


def test_processes_of_one_peer_share_a_distributed_order_that_no_other_peer_has() -> None:
    halves = [order_of("anna", distributed=(0, 2)), order_of("anna/1", distributed=(1, 2))]
    assert sorted(halves[0] + halves[1]) == ITEMS
    assert order_of("boris", distributed=(0, 2)) != halves[0]


def test_the_batches_end_with_an_iterator_which_has_no_second_time() -> None:
    """It was an error, with which the block was left in a hurry and pending work was lost."""
    assert list(feed().batches(iter(ITEMS), None)) == ITEMS
    assert list(feed().batches((each for each in ITEMS), None)) == ITEMS
    with pytest.raises(ValueError, match="yields nothing"):
        next(feed().batches(set(), None))


def test_a_batch_size_is_not_passed_over_for_a_dataset_whose_items_are_the_batches() -> None:
    with pytest.raises(ValueError, match="batch_size is 4; it is for the run's own data"):
        feed().batches(ITEMS, 4)


class Recipe(IterableDataset[torch.Tensor]):
    """The batches of a run as a dataset of torch."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from feed().batches(None, 2)


def test_worker_processes_are_refused_which_would_all_read_the_same() -> None:
    alone = next(iter(DataLoader(Recipe(), batch_size=None)))
    assert alone.shape == (2, 17)
    with pytest.raises(RuntimeError, match="use num_workers=0"):
        next(iter(DataLoader(Recipe(), batch_size=None, num_workers=1)))


def test_the_positions_in_a_dataset_and_in_the_recipe_are_both_saved() -> None:
    first = feed()
    list(islice(first.batches(ITEMS, None), 20))
    list(islice(first.batches(None, 2), 3))
    before = first.state()
    expected = next(iter(first.batches(None, 2))).tolist()
    again = feed()
    again.restore_position(before)
    assert (before["dataset"], before["sequence"], first.state()["sequence"]) == (20, 6, 8)
    assert next(iter(again.batches(None, 2))).tolist() == expected
    assert again.state() == first.state()


def test_files_continue_at_the_position_of_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", texts(300))
    write(tmp_path, "b.bin", texts(300, seed=1))
    run = run_of(FileSource(files=["a.jsonl"], weight=2.0), FileSource(files=["b.bin"]))

    def files() -> Feed:
        return Feed(run, PeerId("anna"), data_dir=tmp_path, over=lambda: False)

    whole = [batch.tolist() for batch in islice(files().batches(None, 3), 12)]
    first = files()
    list(islice(first.batches(None, 3), 7))
    state = first.state()
    assert all(type(at) is int for at in state.values())
    again = files()
    again.restore_position(state)
    assert [batch.tolist() for batch in islice(again.batches(None, 3), 5)] == whole[7:]


def test_the_threads_of_a_feed_end_with_it(tmp_path: Path) -> None:
    """The data of files tells of downloads: it held the feed that its thread waits to see go."""
    write(tmp_path, "a.jsonl", texts(300))
    run = run_of(FileSource(files=["a.jsonl"]))
    before = set(threading.enumerate())
    going = Feed(run, PeerId("anna"), data_dir=tmp_path, over=lambda: False)
    list(islice(going.batches(None, 4), 2))
    mine = {each for each in threading.enumerate() if each.name == "prefetch"} - before
    assert mine
    del going
    gc.collect()
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)


def test_a_restored_position_is_saved_again_without_reading() -> None:
    again = feed()
    again.restore_position({"dataset": 3, "position": 6})
    assert again.state() == {"dataset": 3, "position": 6}


def test_a_recipe_is_opened_once_though_it_was_begun_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = []

    def counted(*args: Any, **keywords: Any) -> Data:
        opened.append(args)
        return open_data(*args, **keywords)

    monkeypatch.setattr(reading, "open_data", counted)
    ahead = feed()
    ahead.begin_to_open().result()
    assert ahead.recipe is not None
    assert len(opened) == 1


def test_a_checkpoint_of_another_run_is_refused() -> None:
    with pytest.raises(RunRefused, match="the run of the checkpoint"):
        feed().resume({"run_id": "another", "data": {}})


def test_readers_of_one_peer_read_in_different_orders() -> None:
    one, other = (list(islice(feed(name).batches(ITEMS, None), 50)) for name in ("a", "a/1"))
    assert one != other


def test_a_feed_ends_with_the_run() -> None:
    over = False
    ending = Feed(RUN, PeerId("anna"), data_dir=Path(), over=lambda: over)
    seen = []
    for item in ending.batches(ITEMS, None):
        seen.append(item)
        over = len(seen) == 3
    assert len(seen) == 3


def test_waiting_for_data_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Event()
    monkeypatch.setattr(reading, "open_data", lambda *args, **named: never.wait())
    waiting = feed(over=lambda: True)
    assert waiting.recipe is None
    assert list(waiting.batches(None, 2)) == []
    never.set()


def test_an_error_of_the_data_is_raised(tmp_path: Path) -> None:
    text = RunFile(model=GptModel(context=16), data=TextData(sequence_length=16, files=["no"]))
    with pytest.raises(DataUnavailable, match="no file in"):
        _ = Feed(text, PeerId("anna"), data_dir=tmp_path, over=lambda: False).recipe


@pytest.mark.parametrize("waits_for", ["the recipe", "a batch"])
def test_a_download_is_told_while_training_waits_for_it(
    waits_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = Event()
    told: list[tuple[str, float]] = []

    def download(tell: TellOf) -> None:
        place = Place("https://example.org/a.bin")
        tell(place, 25, 100)
        assert arrived.wait(60.0)
        tell(place, 100, 100)

    class Remote:
        """A stream whose batches have to be downloaded."""

        def __init__(self, stream: TokenStream, tell: TellOf) -> None:
            self._stream, self._tell = stream, tell
            self.state, self.restore_position = stream.state, stream.restore_position

        def next(self, sequences: int) -> Sequences:
            download(self._tell)
            return self._stream.next(sequences)

    def open_slowly(run: RunFile, *, tell: TellOf, **own: Any) -> Data:
        opened = open_data(run, **own)
        if waits_for == "a batch":
            return replace(opened, train=Remote(opened.train, tell))
        download(tell)
        return opened

    def fetching(name: str, share: float) -> None:
        told.append((name, share))
        arrived.set()

    monkeypatch.setattr(reading, "open_data", open_slowly)
    slow = Feed(RUN, PeerId("anna"), data_dir=Path(), over=lambda: False, fetching=fetching)
    assert next(iter(slow.batches(None, 2))).shape == (2, 17)
    assert set(told) == {("https://example.org/a.bin", 0.25)}
