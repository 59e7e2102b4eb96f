"""A rank of an island other than rank 0: it follows rank 0's commands at every safe point."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dht.identity import PeerId
from peer.bridge.shared_memory import Adoption, AdoptionOrder
from peer.data.feed import Feed
from peer.run_file.reading import from_canonical
from peer.run_file.schedule import Rates
from peer.storage.home import default_directory
from peer.storage.inner_saves import InnerSaves
from peer.trainer.channel import Agreed, Channel, Command, IslandBroken
from peer.trainer.loop_checks import restart_broken_moments
from peer.trainer.parameters import exchanged_tensors, model_layout
from peer.trainer.rank import Plan, Rank, RankParts, check_finished, entered
from peer.trainer.units import SharedUnit, agree_on_units

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts(RankParts):
    """Everything that a follower needs to train in a run."""

    units: list[list[SharedUnit]]


class Follower(Rank):
    """A process of an island other than rank 0, with the part of ``Run`` that a loop needs.

    Events, and all that a peer knows beyond ``Agreed``, are available at rank 0 only.
    """

    link: str | None = None

    def __init__(self, channel: Channel, plan: Plan) -> None:
        super().__init__(plan)
        self._channel = channel
        self._opened: _Parts | None = None
        self._steps = 0
        self._ended = False

    def __repr__(self) -> str:
        return f"Follower(rank={self._channel.rank}, steps={self._steps})"

    @property
    def _parts(self) -> _Parts:
        return entered(self._opened)

    def _enter(self) -> None:
        assert self._opened is None, "a run is entered once"
        self._opened = self._begin(self._plan)
        self._follow()
        self._begin_steps()

    def _begin(self, plan: Plan) -> _Parts:
        kind, _ = self._channel.receive_command()
        beginning = self._channel.hear()
        if kind is Command.FAILED:
            raise IslandBroken(f"rank 0 said: {beginning}")
        run = from_canonical(beginning["run"], beginning["run_id"])
        parameters = exchanged_tensors(plan.model, run.outer.buffers)
        layout = model_layout(plan.model, run.outer.fragments, buffers=run.outer.buffers)
        units = agree_on_units(
            self._channel, layout, parameters, fits=layout.hash.hex() == beginning["layout"]
        )
        rank, settings = self._channel.rank, plan.settings
        directory = settings.directory or default_directory(run.run_id)
        return _Parts(
            run_file=run,
            peer_id=beginning["peer_id"],
            directory=directory,
            units=units,
            feed=Feed(
                run,
                PeerId(f"{beginning['peer_id']}/{rank}"),
                data_dir=settings.data_directory or Path(beginning["data_dir"]),
                over=lambda: self.over,
            ),
            rates=Rates(run),
            inner=InnerSaves(
                directory / f"inner-rank-{rank}",
                plan.model,
                plan.optimizers,
                run_id=run.run_id,
                every_s=settings.save_every_s,
                tell=lambda event, fields: logger.info("%s %s", event, dict(fields)),
            ),
        )

    def _leave(self, kind: type[BaseException] | None) -> None:
        self._open.close()
        inner = self._parts.inner
        if kind is not None:
            inner.close()
            return
        inner.save(step=self._steps, position=self._parts.feed.state())
        while not self._ended:
            self._follow()
        inner.finish()

    @torch.no_grad()
    def _follow(self) -> None:
        """Carry out rank 0's commands until this safe point, or the run, is over."""
        while True:
            kind, arguments = self._channel.receive_command()
            if kind is Command.GO:
                over, finished, tokens, rate, peers, measure = arguments[:6]
                self._agreed = Agreed(
                    bool(over), bool(finished), int(tokens), rate, int(peers), bool(measure)
                )
                return
            if kind is Command.WAIT:
                continue
            if kind is Command.END:
                self._ended = True
                self._channel.close()
                return
            if kind is Command.FAILED:
                raise IslandBroken(f"rank 0 said: {self._channel.hear()}")
            unit = self._parts.units[int(arguments[0])][int(arguments[1])]
            if kind is Command.OFFER:
                unit.send_own()
            else:
                assert kind is Command.ADOPT, kind
                order = AdoptionOrder(Adoption(int(arguments[2])), 0, b"", None, 0)
                unit.adopt_own(order, coarse=bool(arguments[3]))

    def _safe_point(self) -> None:
        tokens, self._step_tokens = self._step_tokens, 0
        self._channel.total(tokens)
        self._steps += 1
        self._follow()
        self.set_rates()
        if self._checks is not None:
            # Whether anything is exchanged, and whether there are tokens at all, rank 0 knows.
            self._checks.stepped(tokens=1, exchanged=True, alone=False)
        if self._agreed.measure:
            if self._measure is None:
                raise IslandBroken(
                    "rank 0 measures the held-out loss and this rank does not know how; "
                    "call run.measure_with(...) in every rank"
                )
            self._measure()
        self._parts.inner.maybe_save(step=self._steps, position=self._parts.feed.state)

    def restore(self) -> None:
        self._follow()
        restart_broken_moments(self._plan.model, self._plan.optimizers)

    def adopt_final(self) -> None:
        check_finished(self.finished)
        self._follow()

    def state_dict(self) -> dict[str, Any]:
        """This rank's place in the data."""
        return {"run_id": self.run_id, "steps": self._steps, "data": self._parts.feed.state()}
