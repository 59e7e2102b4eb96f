"""One learner made of several processes: DDP or FSDP2 under torchrun, one peer in the run.

::

    with peer.island.join("my.run.toml", model=model, optimizer=optimizer) as run:   # in every rank
        ...the usual loop...

Rank 0 is the peer: it has the agent, and decides at each safe point what is offered and adopted.
The others do as it says, unit by unit (``averaging.numbers.layout``): of a unit that is wanted,
each rank sends the part that it holds, and of one that has arrived it gets that part. So all take a
version in at the same step, and nothing larger than a unit is ever whole anywhere but in the slots
of rank 0. Between two safe points there is no communication of ours, and a safe point at which
nothing is due costs two small messages. While the machine's owner wants no steps (``shoal pause``,
``shoal limits``), rank 0 stays at its safe point, and the others with it.

What is said goes over a gloo group of its own, whatever the model's collectives use. The ranks
must take their optimizer steps together, as data parallel training does anyway. When a rank is
lost, torchrun ends the others and starts all of them again; rank 0 has the same folder, hence
the same identity, and the run gives the parameters.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from averaging.numbers.layout import Layout, Unit
from averaging.numbers.tensor_shards import Box, Overlap, overlap, owners
from dht.identity import PeerId, RunId
from peer.bridge.shared_memory import Adoption, Order
from peer.data.feed import Feed
from peer.data.sequences import Data
from peer.errors import LeftEarly, PeerError
from peer.run_file.reading import from_canonical
from peer.run_file.schedule import Rates
from peer.run_file.sections import RunFile
from peer.storage.home import default_directory
from peer.storage.inner_saves import InnerSaves
from peer.storage.inner_state import Optimizers, several
from peer.trainer.learner import Piece, is_coarse, model_layout, take_in
from peer.trainer.learner import trained_parameters as trained
from peer.trainer.session import (
    Agreed,
    Fields,
    JoinSettings,
    Run,
    settings_from,
    was_skipped,
)
from peer.trainer.session import join as join_alone

logger = logging.getLogger(__name__)

HEADER = 8
"""Numbers in what rank 0 says before anything else: a kind and its particulars."""


class _Say(enum.IntEnum):
    BEGIN = 1
    """A run: so many bytes follow."""
    OFFER = 2
    """Give me your part of this unit of this fragment."""
    ADOPT = 3
    """Take in your part of this unit, in this way."""
    GO = 4
    """The safe point is over."""
    END = 5
    FAILED = 6
    """So many bytes follow, saying why."""
    WAIT = 7
    """Rank 0 rests. It is still there."""


class IslandBroken(PeerError):
    """The processes of an island do not fit together, or rank 0 could not get into the run."""

    exit_code = 3

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the island cannot take part: {self.reason}"


def join(
    run: str | Path | RunFile,
    *,
    model: torch.nn.Module,
    optimizer: Optimizers,
    auto: bool = True,
    settings: JoinSettings | None = None,
    **own: Any,
) -> Run | Follower:
    """``peer.join`` for every rank of ``torch.distributed``: together they are one peer.

    Rank 0 gets a ``Run``, the others a ``Follower``, which has of it what a training loop needs.
    Without ``torch.distributed``, or with one process, it is ``peer.join``.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return join_alone(
            run, model=model, optimizer=optimizer, auto=auto, settings=settings, **own
        )
    chosen = settings_from(settings, own)
    if any("_flat_param" in name for name, _ in model.named_parameters()):
        raise IslandBroken(
            "FSDP1 keeps flattened parameters; use torch.distributed.fsdp.fully_shard"
        )
    channel = _Channel(chosen.start_timeout_s + 60.0)
    if channel.rank == 0:
        lead = Lead(channel)
        return Run(run, model=model, optimizer=optimizer, auto=auto, settings=chosen, others=lead)
    return Follower(channel, model=model, optimizer=optimizer, auto=auto, settings=chosen)


class _Channel:
    """Tensors on the CPU between rank 0 and the others."""

    def __init__(self, timeout_s: float) -> None:
        try:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            # torchrun keeps its store over a restart, and with it the addresses of dead ranks.
            raise IslandBroken(
                f"its processes do not find each other: {error}; if torchrun has restarted them, "
                "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where it is started"
            ) from error
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def close(self) -> None:
        """In every rank. Its threads would be in the way of the end of the process."""
        dist.destroy_process_group(self._group)

    def say(self, kind: _Say, *particulars: float) -> None:
        header = torch.zeros(HEADER, dtype=torch.float64)
        header[: 1 + len(particulars)] = torch.tensor([kind, *particulars], dtype=torch.float64)
        dist.broadcast(header, 0, self._group)

    def hear(self) -> tuple[_Say, list[float]]:
        header = torch.zeros(HEADER, dtype=torch.float64)
        dist.broadcast(header, 0, self._group)
        kind, *particulars = header.tolist()
        return _Say(int(kind)), particulars

    def say_text(self, kind: _Say, text: bytes) -> None:
        self.say(kind, len(text))
        dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0, self._group)

    def hear_text(self, size: float) -> bytes:
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, 0, self._group)
        return text.numpy().tobytes()

    def broadcast(self, values: torch.Tensor) -> None:
        dist.broadcast(values, 0, self._group)

    def send(self, values: torch.Tensor, rank: int) -> None:
        dist.send(values, rank, self._group)

    def receive(self, size: int, rank: int) -> torch.Tensor:
        values = torch.empty(size, dtype=torch.float32)
        dist.recv(values, rank, self._group)
        return values

    def total(self, number: int) -> int:
        """At rank 0 the sum of all."""
        numbers = torch.tensor([number], dtype=torch.int64)
        dist.reduce(numbers, 0, dist.ReduceOp.SUM, self._group)
        return int(numbers.item())

    def all_agree(self, yes: bool) -> bool:
        votes = torch.tensor([int(yes)], dtype=torch.int64)
        dist.all_reduce(votes, dist.ReduceOp.MIN, self._group)
        return bool(votes.item())

    def boxes(self, own: Sequence[Box]) -> list[list[Box]]:
        """What each rank holds of each tensor."""
        dimensions = [len(box.full) for box in own]
        flat = [n for box in own for n in (*box.offset, *box.shape)]
        mine = torch.tensor(flat, dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, self._group)
        ranks = []
        for numbers in (each.tolist() for each in gathered):
            boxes, at = [], 0
            for box, count in zip(own, dimensions, strict=True):
                offset, shape = numbers[at : at + count], numbers[at + count : at + 2 * count]
                boxes.append(Box(box.full, tuple(offset), tuple(shape)))
                at += 2 * count
            ranks.append(boxes)
        return ranks


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The values that this process holds, flat. Writing to them changes the parameter."""
    held = parameter.detach()
    if hasattr(held, "to_local"):
        held = held.to_local()
    return held.view(-1)


def _box(parameter: Any) -> Box:
    full = tuple(parameter.shape)
    if not hasattr(parameter, "device_mesh"):
        return Box(full, (0,) * len(full), full)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        full, parameter.device_mesh, parameter.placements
    )
    return Box(full, tuple(offset), tuple(shape))


@dataclass(frozen=True, slots=True)
class _Shared:
    """One unit, and which part of it is where."""

    channel: _Channel
    fragment: int
    index: int
    unit: Unit
    parameter: torch.Tensor
    holders: Mapping[int, Overlap]
    """All ranks that have some of it."""
    owners: tuple[int, ...]
    """Ranks, of the holders, that have all of it once."""
    whole: bool
    """Every rank has all of it."""

    @property
    def where(self) -> slice:
        return self.unit.values

    # Rank 0, with the unit's part of the slot in its hands.

    def gather(self, part: torch.Tensor, own: torch.Tensor | None) -> None:
        """Put together what the owners send."""
        for rank in self.owners:
            held = self.holders[rank]
            if rank:
                part[held.in_unit] = self.channel.receive(held.size, rank)
            elif own is not None:
                part[held.in_unit] = own.to(part.device, torch.float32)

    def give(self, part: torch.Tensor) -> None:
        """Send every other holder its part."""
        if self.whole:
            self.channel.broadcast(part)
            return
        for rank, held in self.holders.items():
            if rank:
                self.channel.send(part[held.in_unit].contiguous(), rank)

    # The others.

    def send_own(self, values: torch.Tensor) -> None:
        if self.channel.rank in self.owners:
            self.channel.send(values.to("cpu", torch.float32).contiguous(), 0)

    def take(self) -> torch.Tensor | None:
        if self.whole:
            values = torch.empty(self.unit.size, dtype=torch.float32)
            self.channel.broadcast(values)
            return values
        held = self.holders.get(self.channel.rank)
        return None if held is None else self.channel.receive(held.size, 0)

    # All.

    def own(self) -> torch.Tensor | None:
        """A copy, or a view, of the values that are here."""
        held = self.holders.get(self.channel.rank)
        return None if held is None else _local(self.parameter)[held.in_box]

    def take_in(self, given: torch.Tensor, order: Order, *, coarse: bool) -> torch.Tensor | None:
        """Change what is here.

        For coarse parameters returns what ``peer.trainer.learner.take_in`` does.
        """
        held = self.holders[self.channel.rank]
        local = _local(self.parameter)
        values = local[held.in_box]
        answer = take_in(values, given.to(values.device), order, coarse=coarse)
        if not isinstance(held.in_box, slice):
            local[held.in_box] = values
        return answer


class Lead:
    """Rank 0's way to the others: what ``peer.trainer.session.Run`` needs of them."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._open = True

    def begin(
        self,
        run: RunFile,
        peer_id: PeerId,
        layout: Layout,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        data_dir: Path,
    ) -> Sequence[Sequence[Piece]]:
        told = {
            "run_id": run.run_id,
            "run": run.canonical().decode(),
            "peer_id": peer_id,
            "layout": layout.hash.hex(),
            "data_dir": str(data_dir.resolve()),
        }
        text = json.dumps(told)
        self._channel.say_text(_Say.BEGIN, text.encode())
        try:
            units = _agree_on_units(self._channel, layout, parameters, fits=True)
        except IslandBroken:
            self._open = False  # the others know, and listen no more
            raise
        coarse = is_coarse(parameters)
        return [
            [_LeadPiece(self, unit, coarse=coarse) for unit in units[n]] for n in range(len(units))
        ]

    @property
    def is_open(self) -> bool:
        return self._open

    def say(self, kind: _Say, *particulars: float) -> None:
        self._channel.say(kind, *particulars)

    def total(self, tokens: int) -> int:
        return self._channel.total(tokens)

    def wait(self) -> None:
        self._channel.say(_Say.WAIT)

    def go(self, agreed: Agreed) -> None:
        self._channel.say(
            *(_Say.GO, agreed.over, agreed.finished, agreed.global_tokens, agreed.peers),
            agreed.measure,
        )

    def end(self, failure: str | None) -> None:
        if not self._open:
            return
        self._open = False
        if failure is None:
            self._channel.say(_Say.END)
        else:
            self._channel.say_text(_Say.FAILED, failure.encode())
        self._channel.close()

    def abandon(self) -> None:
        self._open = False


class _LeadPiece:
    """A unit as the learner of rank 0 sees it."""

    def __init__(self, lead: Lead, unit: _Shared, *, coarse: bool) -> None:
        self._lead = lead
        self._unit = unit
        self._coarse = coarse

    @property
    def where(self) -> slice:
        return self._unit.where

    def offer(self, part: torch.Tensor) -> None:
        self._lead.say(_Say.OFFER, self._unit.fragment, self._unit.index)
        self._unit.gather(part, self._unit.own())

    def adopt(self, part: torch.Tensor, order: Order, *, coarse: bool) -> None:
        if not self._lead.is_open:
            return  # without the others it would tear the model apart
        unit = self._unit
        self._lead.say(_Say.ADOPT, unit.fragment, unit.index, order.operation, order.alpha, coarse)
        unit.give(part)
        answer = None
        if (held := unit.holders.get(0)) is not None:
            answer = unit.take_in(part[held.in_unit], order, coarse=coarse)
        if coarse:
            unit.gather(part, answer)


def _agree_on_units(
    channel: _Channel,
    layout: Layout,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    fits: bool,
) -> list[list[_Shared]]:
    """In every rank at once: who has what. Raises ``IslandBroken`` if the models differ."""
    if not channel.all_agree(fits):
        raise IslandBroken("the ranks have models with other parameters; build the same in all")
    names = [spec.name for spec in layout.specs]
    boxes = channel.boxes([_box(parameters[name]) for name in names])
    by_name = {name: [rank[n] for rank in boxes] for n, name in enumerate(names)}
    owners_of = {name: owners(held) for name, held in by_name.items()}
    units = []
    for fragment in layout.fragments:
        shared = []
        for index, unit in enumerate(fragment.units):
            held = by_name[unit.tensor]
            found = {rank: overlap(box, unit.start, unit.end) for rank, box in enumerate(held)}
            holders = {rank: part for rank, part in found.items() if part is not None}
            shared.append(
                _Shared(
                    channel,
                    fragment.index,
                    index,
                    unit,
                    parameters[unit.tensor],
                    holders,
                    tuple(rank for rank in owners_of[unit.tensor] if rank in holders),
                    all(box.is_whole for box in held),
                )
            )
        units.append(shared)
    return units


class Follower:
    """A process of an island other than rank 0. It has of a ``Run`` what a training loop needs.

    Events are told at rank 0 alone, and so is what a peer knows beyond ``Agreed``.
    """

    link: str | None = None

    def __init__(
        self,
        channel: _Channel,
        *,
        model: torch.nn.Module,
        optimizer: Optimizers,
        auto: bool,
        settings: JoinSettings,
    ) -> None:
        self._channel = channel
        self._model = model
        self._optimizers = several(optimizer)
        self._auto = auto
        self._settings = settings
        self._agreed = Agreed()
        self._measure: Callable[[], tuple[float, int]] | None = None
        self._tokens = 0
        self._steps = 0
        self._ended = False
        self._entered = False
        # Set by __enter__.
        self.run_file: RunFile
        self.run_id: RunId
        self.peer_id: PeerId
        self.directory: Path
        self._units: list[list[_Shared]]
        self._feed: Feed
        self._rates: Rates
        self._inner: InnerSaves

    def __repr__(self) -> str:
        return f"Follower(rank={self._channel.rank}, steps={self._steps})"

    def __enter__(self) -> Self:
        assert not self._entered, "a run is entered once"
        self._entered = True
        self._begin()
        self._obey()
        if (restored := self._inner.restore()) is not None:
            self._feed.restore(restored.data)
        if self._auto:
            self._hook = self._optimizers[-1].register_step_post_hook(self._after_step)
        return self

    def _begin(self) -> None:
        kind, particulars = self._channel.hear()
        text = self._channel.hear_text(particulars[0])
        if kind is _Say.FAILED:
            raise IslandBroken(f"rank 0 said: {text.decode(errors='replace')}")
        told = json.loads(text)
        run = from_canonical(told["run"].encode(), told["run_id"])
        parameters = trained(self._model)
        layout = model_layout(self._model, run.outer.fragments)
        self._units = _agree_on_units(
            self._channel, layout, parameters, fits=layout.hash.hex() == told["layout"]
        )
        self.run_file, self.run_id, self.peer_id = run, run.run_id, told["peer_id"]
        self.directory = self._settings.directory or default_directory(self.run_id)
        data_dir = self._settings.data_directory or Path(told["data_dir"])
        reader = PeerId(f"{self.peer_id}/{self._channel.rank}")
        self._feed = Feed(run, reader, data_dir=data_dir, over=lambda: self.over)
        self._rates = Rates(run)
        self._inner = InnerSaves(
            self.directory / f"inner-rank-{self._channel.rank}",
            self._model,
            self._optimizers,
            run_id=self.run_id,
            every_s=self._settings.save_every_s,
            tell=lambda event, fields: logger.info("%s %s", event, dict(fields)),
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._auto:
            self._hook.remove()
        if kind is not None:
            self._inner.close()
            return
        self._inner.save(step=self._steps, position=self._feed.state())
        while not self._ended:
            self._obey()
        self._inner.finish()

    @torch.no_grad()
    def _obey(self) -> None:
        """Do what rank 0 says, until it says that this safe point is over, or everything."""
        while True:
            kind, said = self._channel.hear()
            if kind is _Say.GO:
                over, finished, tokens, peers, measure = said[:5]
                self._agreed = Agreed(
                    over=bool(over),
                    finished=bool(finished),
                    global_tokens=int(tokens),
                    peers=int(peers),
                    measure=bool(measure),
                )
                return
            if kind is _Say.WAIT:
                continue
            if kind is _Say.END:
                self._ended = True
                self._channel.close()
                return
            if kind is _Say.FAILED:
                reason = self._channel.hear_text(said[0]).decode(errors="replace")
                raise IslandBroken(f"rank 0 said: {reason}")
            unit = self._units[int(said[0])][int(said[1])]
            if kind is _Say.OFFER:
                self._offer(unit)
            else:
                assert kind is _Say.ADOPT, kind
                order = Order(Adoption(int(said[2])), said[3], 0, b"", None, 0)
                self._adopt(unit, order, coarse=bool(said[4]))

    def _offer(self, unit: _Shared) -> None:
        own = unit.own()
        if own is not None:
            unit.send_own(own)

    def _adopt(self, unit: _Shared, order: Order, *, coarse: bool) -> None:
        given = unit.take()
        if given is None:
            return
        if unit.whole:
            given = given[unit.holders[self._channel.rank].in_unit]
        answer = unit.take_in(given, order, coarse=coarse)
        if answer is not None:
            unit.send_own(answer)

    # --- the loop, as Run has it ------------------------------------------------------------------

    def log(self, *, loss: torch.Tensor | float | None = None, tokens: int | None = None) -> None:
        """Tell of a batch before the step that it is for. Losses are rank 0's to tell."""
        if tokens is not None:
            if tokens < 0:
                raise ValueError(f"tokens is {tokens}; a batch has none or some")
            self._tokens += tokens

    def step(self, *, tokens: int | None = None) -> None:
        """The safe point, for ``auto=False``: call it after each optimizer step."""
        self.log(tokens=tokens)
        self._safe_point()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        if was_skipped(optimizer):
            self._tokens = 0
        else:
            self._safe_point()

    def _safe_point(self) -> None:
        self._channel.total(self._tokens)
        self._tokens = 0
        self._steps += 1
        self._obey()
        self.set_rates()
        if self._agreed.measure:
            if self._measure is None:
                raise IslandBroken(
                    "rank 0 measures the held-out loss and this rank does not know how; "
                    "call run.measure_with(...) in every rank"
                )
            self._measure()
        self._inner.maybe_save(step=self._steps, position=self._feed.state)

    def data(self, dataset: Iterable[Any] | None = None, *, batch_size: int | None = None) -> Any:
        """Batches of this rank's own, until the run is over."""
        return self._feed.batches(dataset, batch_size)

    @property
    def recipe_data(self) -> Data:
        recipe = self._feed.recipe
        if recipe is None:
            raise LeftEarly(self.run_file.name, "it was reading the data", 0)
        return recipe

    def state_dict(self) -> dict[str, Any]:
        """This rank's place in the data."""
        return {"run_id": self.run_id, "steps": self._steps, "data": self._feed.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the data where ``state`` was taken."""
        self._feed.resume(state)

    def on(self, event: str, handler: Callable[[Fields], None]) -> None:
        """Events are told at rank 0; here nothing is ever heard."""

    def measure_with(self, measure: Callable[[], tuple[float, int]]) -> None:
        """What rank 0 is told, for this rank to do the same: both may compute together."""
        self._measure = measure

    def schedule(self, optimizer: torch.optim.Optimizer, *, peak: float | None = None) -> None:
        """Let the run's schedule set the learning rate, from the run's global tokens."""
        self._rates.follow(optimizer, peak=peak)
        self.set_rates()

    def set_rates(self) -> None:
        """Set the scheduled rates again, after something else has changed them."""
        self._rates.set(self.global_tokens)

    @property
    def over(self) -> bool:
        return self._agreed.over

    @property
    def finished(self) -> bool:
        return self._agreed.finished

    @property
    def global_tokens(self) -> int:
        return self._agreed.global_tokens

    @property
    def peers(self) -> int:
        return self._agreed.peers
