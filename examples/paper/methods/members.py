"""Members of small swarms without their peers: trained side by side, for statistics of methods.

``train(trials, problem)`` makes all steps of all trials in lockstep, the members of all of them in
the same products of matrices, so that hundreds of trainings take minutes. Merging is that of live
peers: codecs, weights, the mean, outer steps and adoption are the functions of ``averaging``. Left
out is all that needs peers: messages, votes, lines, crashes. A contribution that is late is drawn
(``Trial.misses``). ``tests/examples/paper/test_members.py`` holds it to the losses of
``peer.simulate.run``.

What a method changes is a value of a ``Trial``, or one of its functions: the outer optimizer by
version, what is uploaded of late work, and the weights of a merge.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from averaging.history.adoption import OwnWork
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32Rows, Float32s
from averaging.numbers.codec import Addends, Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Layout
from averaging.numbers.merge import Units, merge_encoded, rule_named
from averaging.numbers.outer import Nesterov as Nesterov
from averaging.numbers.outer import Step, step_encoded
from averaging.rules.weights import Contribution as Contribution
from averaging.rules.weights import shares_of, uploaded_share
from peer.data.batches.sequences import TokenStream
from peer.model.muon import ADAMW_RMS, orthogonalised
from peer.model.recipes import build_model, loss_of_logits
from peer.model.recipes.chunked_loss import inputs_and_targets
from peer.run_file.sections import AdamwInner, MuonInner
from peer.simulate.problems.problem import Places, layout_of
from peer.simulate.problems.text_gpt import TextGpt
from peer.simulate.settings import ProblemChoice
from peer.trainer.computing.engine import autocast

AT_ONCE = 8
"""Gradients that one call computes: the values of more members leave the processor's cache. The
compiled function has this shape alone; the members that are left over are computed without it."""


@dataclass(frozen=True, slots=True)
class Late:
    """Work that missed its rounds, at the moment when it is offered again."""

    moved: Float32s
    """Its displacement: the base less the parameters."""
    age: int
    """Versions since its base; 0: it is not late."""
    meanwhile: Float32s
    """The displacement of theta by these versions."""


def mean_of_its_cycles(late: Late) -> Float32s:
    """``outer.late_work = "per_cycle"``, as in new runs."""
    share = uploaded_share("per_cycle", staleness=late.age)
    return late.moved if share == 1.0 else late.moved * np.float32(share)


Newcomers = Literal["bounded", "plain", "silent"]

Weights = Callable[[Sequence[Contribution], Sequence[int]], Sequence[float]]
"""Weights in a merge of these contributions; the indices are those of newcomers."""


def as_live_peers(claims: Sequence[Contribution], new: Sequence[int]) -> Sequence[float]:
    return shares_of(claims, on_probation=new)


SLOW = 10
"""A slow member makes one step while the others make so many."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training. Trials of equal seed are paired: first weights, and each member's data."""

    seed: int = 0
    members: int = 8
    central: bool = False
    """Data parallel: one model, and the mean gradient of all members' batches. With one member: one
    learner alone."""
    steps: int = 360
    """Steps of each member."""
    rate: float = 1.2e-2
    """Peak learning rate."""
    schedule: ProblemChoice = field(
        default_factory=lambda: ProblemChoice(warmup_share=0.05, decay="cosine")
    )
    cycle: int = 30
    fragments: int = 4
    overlap: int = 2
    """Steps from an offer to the adoption of the merge."""
    codec: str = "int4"
    outer: Callable[[float, int], Nesterov] = lambda part, version: Nesterov(1.0, 0.5)
    """The outer optimizer, by the part of the run that is over and the version that it steps."""
    misses: float = 0.0
    """Share of contributions that miss their round; the work stays pending."""
    late: Callable[[Late], Float32s] = mean_of_its_cycles
    """The part of late work that is uploaded."""
    slow: int = 0
    """The last so many members take ``SLOW`` times as long for a step."""
    weights: Weights = as_live_peers
    toward: float = 0.0
    """Length of the last merge's displacement in what Muon makes orthogonal, as a share of the
    length of the rest: members then turn to where all went."""
    orthogonal: float = 0.0
    """Share of a merged displacement that Muon's orthogonalisation replaces, as long as it."""
    shares_momentum: bool = False
    """Members adopt the mean of their inner momenta with each merge: as many bytes again."""
    half_replaced_at: int | None = None
    """Step at which the second half of the members is replaced by newcomers."""
    newcomers: Newcomers = "bounded"
    """Newcomers during their first cycle: ``bounded``, a quarter of each merge together, as in a
    run; ``plain``, like all others; ``silent``, no share, and what they learn is dropped while
    their optimizers warm up."""
    measured_cycles: int | None = None
    """Cycles between two measurements of the merged model; unset: at the end alone."""
    averaged: bool = False
    """Measure averages over the last versions at the end, too."""


@dataclass(frozen=True, slots=True)
class Outcome:
    loss: float
    """Held-out loss of the mean of the members' parameters, as after a last merge."""
    merged_loss: float
    """That of the merged model: it lags by up to a cycle."""
    points: tuple[tuple[int, float], ...]
    """Steps and losses of the merged model."""
    averages: dict[str, float]
    """Losses of averages over the last versions, by name."""
    noise_tokens: float | None
    """The gradient noise scale (arXiv 1812.06162, appendix A): tokens of a step that holds as much
    noise as gradient. Of data parallel trials, whose members' gradients are small batches."""
    seconds: float
    """Share of the processor time of all trials."""


def train(
    trials: Sequence[Trial],
    problem: TextGpt,
    *,
    compiled: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Outcome]:
    """Train with Muon or AdamW. The trials must have equal numbers of steps."""
    (steps,) = {trial.steps for trial in trials}
    began = time.process_time()
    members = _Members(trials, problem, compiled=compiled)
    swarms = [_Swarm(trial, members, index) for index, trial in enumerate(trials)]
    for step in range(1, steps + 1):
        members.step(step)
        for swarm in swarms:
            swarm.after(step)
        progress(step / steps)
    spent = time.process_time() - began
    of_all = sum(trial.members for trial in trials)
    return [swarm.outcome(spent * swarm.trial.members / of_all) for swarm in swarms]


class _Members:
    """The parameters and inner optimizers of all members of all trials: a row for each.

    A data-parallel trial has one row, and a reader of batches for each member.
    """

    def __init__(self, trials: Sequence[Trial], problem: TextGpt, *, compiled: bool) -> None:
        self.problem = problem
        self._trials = trials
        run = problem.run(0)
        assert isinstance(run.inner, MuonInner | AdamwInner)
        self._inner = run.inner
        self.fades = run.inner.momentum if isinstance(run.inner, MuonInner) else run.inner.beta1
        """What is left of a momentum after a step."""
        self.layouts = {trial.fragments: layout_of(problem, trial.fragments) for trial in trials}
        self._streams: list[TokenStream] = []
        values: list[Float32s] = []
        row_of_reader: list[int] = []
        self.rows: list[slice] = []
        self.readers: list[slice] = []
        for trial in trials:
            first, reader = len(values), len(row_of_reader)
            count = 1 if trial.central else trial.members
            values += [problem.first_values(trial.seed)] * count
            row_of_reader += [first + member % count for member in range(trial.members)]
            self._streams += [problem.stream(member, trial.seed) for member in range(trial.members)]
            self.rows.append(slice(first, first + count))
            self.readers.append(slice(reader, reader + trial.members))
        self._row_of_reader = torch.tensor(row_of_reader)
        self._paces = [
            (SLOW, member % SLOW + 1) if member >= trial.members - trial.slow else (1, 1)
            for trial in trials
            for member in range(trial.members)
        ]
        """Of each reader: it makes a step at the second of so many steps, and so on."""
        self._toward = torch.tensor(
            [
                trial.toward
                for trial, rows in zip(trials, self.rows, strict=True)
                for _ in range(rows.start, rows.stop)
            ]
        )
        self.values: Float32s = np.stack(values)
        self._values = torch.from_numpy(self.values)
        self._readers_of_row = torch.bincount(self._row_of_reader).float().unsqueeze(1)
        self.momentum: Float32s = np.zeros_like(self.values)
        self._momentum = torch.from_numpy(self.momentum)
        self._squares = torch.zeros_like(self._values)
        self._steps = torch.zeros(len(values), 1)
        self.moved: Float32s = np.zeros_like(self.values)
        """The displacements of the last merges of each row."""
        self.noise: dict[int, list[tuple[float, float]]] = {}
        """The squared norms of a member's gradient and of the mean, in data-parallel trials."""

        ends = np.cumsum([spec.size for spec in problem.specs]).tolist()
        self._places = {
            spec.name: slice(end - spec.size, end)
            for spec, end in zip(problem.specs, ends, strict=True)
        }
        self._shapes = {spec.name: spec.shape for spec in problem.specs}
        in_blocks = {
            name
            for name, shape in self._shapes.items()
            if isinstance(run.inner, MuonInner) and len(shape) == 2 and "blocks" in name
        }
        self._by_shape: dict[tuple[int, ...], list[slice]] = {}
        self._others = torch.ones(ends[-1], dtype=torch.bool)
        self._decays = torch.zeros(ends[-1])
        for name, place in self._places.items():
            if name in in_blocks:
                self._by_shape.setdefault(self._shapes[name], []).append(place)
                self._others[place] = False
            if len(self._shapes[name]) == 2:
                self._decays[place] = self._inner.weight_decay
        self._compiled = compiled

    def own_step(self, reader: int, step: int) -> int:
        """The number of steps that a reader has made."""
        pace, first = self._paces[reader]
        return (step - first) // pace + 1

    def step(self, step: int) -> None:
        """Make one step of every member whose turn it is."""
        everyone = range(len(self._paces))
        active = [r for r in everyone if self.own_step(r, step) > self.own_step(r, step - 1)]
        gradients = torch.zeros(len(everyone), self._values.shape[1])
        gradients[active] = self._gradients(active)
        for index, (trial, readers) in enumerate(zip(self._trials, self.readers, strict=True)):
            if trial.central and trial.members > 1:
                small = float(gradients[readers].square().sum(1).mean())
                large = float(gradients[readers].mean(0).square().sum())
                self.noise.setdefault(index, []).append((small, large))
        mean = torch.zeros_like(self._values)
        mean.index_add_(0, self._row_of_reader, gradients).div_(self._readers_of_row)
        if self._inner.clip_norm != "off":
            mean *= (self._inner.clip_norm / (mean.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        rows = sorted(set(self._row_of_reader[active].tolist()))
        memories = self._values, self._momentum, self._squares, self._steps
        given = mean, self._rates(step), torch.from_numpy(self.moved), self._toward
        if len(rows) == len(self._values):
            self._update(*memories, *given)
            return
        of_rows = [memory[rows] for memory in memories]
        self._update(*of_rows, *(one[rows] for one in given))
        for memory, changed in zip(memories, of_rows, strict=True):
            memory[rows] = changed

    def _rates(self, step: int) -> Tensor:
        rates = torch.empty(len(self._values), 1)
        for trial, rows in zip(self._trials, self.rows, strict=True):
            rates[rows] = trial.rate * trial.schedule.rate_at(step / trial.steps)
        return rates

    def _gradients(self, readers: Sequence[int]) -> Tensor:
        """One row for each of these readers."""
        batch = self.problem.batch
        streams = [self._streams[reader] for reader in readers]
        batches = torch.from_numpy(np.stack([stream.next(batch) for stream in streams]))
        found = []
        for start in range(0, len(batches), AT_ONCE):
            chosen = slice(start, start + AT_ONCE)
            values = self._values[self._row_of_reader[list(readers[chosen])]]
            parameters = {
                name: values[:, place].view(-1, *self._shapes[name])
                for name, place in self._places.items()
            }
            compiled = self._compiled and len(values) == AT_ONCE
            gradients = gradients_of(self.problem, compiled)(parameters, batches[chosen])
            found.append(torch.cat([gradients[name].flatten(1) for name in self._places], dim=1))
        return torch.cat(found)

    @torch.no_grad()
    def _update(
        self,
        values: Tensor,
        momentum: Tensor,
        squares: Tensor,
        steps: Tensor,
        gradient: Tensor,
        rates: Tensor,
        moved: Tensor,
        toward: Tensor,
    ) -> None:
        """The update of AdamW or ``peer.model.muon``, for all rows at once, in place."""
        inner, others = self._inner, self._others
        steps += 1
        kept = torch.where(others, inner.beta1, self.fades)
        momentum.lerp_(gradient, 1 - kept)
        squares.mul_(inner.beta2).addcmul_(gradient, gradient, value=1 - inner.beta2)
        first = momentum / (1 - inner.beta1**steps)
        second = (squares / (1 - inner.beta2**steps)).sqrt_()
        update = first / (second + inner.epsilon)
        ahead = gradient.lerp(momentum, self.fades) if self._by_shape else gradient
        for shape, places in self._by_shape.items():
            matrices = torch.stack([ahead[:, place].view(-1, *shape) for place in places])
            if toward.any():
                aims = torch.stack([moved[:, place].view(-1, *shape) for place in places])
                lengths = toward.view(1, -1, 1, 1) * _length(matrices) / (_length(aims) + 1e-30)
                matrices += lengths * aims
            turned = orthogonalised(matrices.flatten(0, 1)).to(torch.float32).view_as(matrices)
            for place, of_rows in zip(places, turned, strict=True):
                update[:, place] = of_rows.flatten(1) * (ADAMW_RMS * max(shape) ** 0.5)
        values.mul_(1 - rates * self._decays).sub_(rates * update)

    def orthogonalise(self, values: Float32s, share: float) -> None:
        """Replace this share of the matrices of blocks in a displacement, in place."""
        for shape, places in self._by_shape.items():
            for place in places:
                matrix = torch.from_numpy(values[place]).view(shape)
                turned = orthogonalised(matrix.unsqueeze(0)).to(torch.float32)[0]
                turned *= share * matrix.norm() / (turned.norm() + 1e-30)
                matrix.mul_(1 - share).add_(turned)

    def renew(self, row: int) -> None:
        """Give a row the optimizer of a newcomer."""
        for memory in (self._momentum, self._squares, self._steps):
            memory[row] = 0


def _length(matrices: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.matrix_norm(matrices, keepdim=True)
    return lengths


Gradients = Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]


@lru_cache(maxsize=8)  # to compile takes a minute
def gradients_of(problem: TextGpt, compiled: bool) -> Gradients:
    """A function of the parameters and batches of several members: a gradient for each."""
    model = build_model(problem.run(0))

    def loss(parameters: dict[str, Tensor], batch: Tensor) -> Tensor:
        inputs, targets = inputs_and_targets(batch)
        return loss_of_logits(functional_call(model, parameters, (inputs,)), targets)

    of_members: Gradients = vmap(grad(loss))
    if compiled:
        of_members = torch.compile(of_members, dynamic=False)

    def computed(parameters: dict[str, Tensor], batches: Tensor) -> dict[str, Tensor]:
        precision = autocast(torch.device("cpu"), problem.precision or "fp32")
        with precision, sdpa_kernel(SDPBackend.MATH):  # the others have no rule for members
            return of_members(parameters, batches)

    return computed


AVERAGES = (2, 4, 8)
"""Last versions that are averaged equally."""
KEPT_SHARES = (0.5, 0.75)
"""Shares that exponential averages keep of themselves at each version."""
NEWEST_WEIGHS = 16
"""Divided by the number of its version, the weight of the newest one in the average that grows with
the run: it is the newest version until so many have been made."""
CHECKPOINTS: Mapping[str, Sequence[float]] = {
    "saved 0, 1/4, 1/2 ago": (0, 0.25, 0.5),
    "saved 0, 1, 2 ago": (0, 1, 2),
    "saved 0, 2, 4 ago": (0, 2, 4),
    "saved 0, 4, 8 ago": (0, 4, 8),
    "saved 0, 1/4, 2 1/4 ago": (0, 0.25, 2.25),
    "saved 0, 1, 3 ago": (0, 1, 3),
    "saved 0, 1/4, 4 1/4 ago": (0, 0.25, 4.25),
    "saved 0, 2, 6 ago": (0, 2, 6),
}
"""Three checkpoints that are averaged equally, by the cycles that went by since."""
SAVES_IN_CYCLE = 4
SAVES_MAX = 1 + int(SAVES_IN_CYCLE * max(max(ago) for ago in CHECKPOINTS.values()))


class _Swarm:
    """The merging of one trial's members."""

    def __init__(self, trial: Trial, members: _Members, index: int) -> None:
        self.trial = trial
        self._members = members
        self._rows = members.rows[index]
        self._first_reader = members.readers[index].start
        self._noise = members.noise.setdefault(index, [])
        self._layout: Layout = members.layouts[trial.fragments]
        self._places = Places(self._layout, members.problem.specs)
        self._codec = codec_named(trial.codec)
        self._rng = np.random.default_rng(trial.seed)
        self._scratch = Scratch()
        first = members.values[self._rows.start]
        self._states = [
            FragmentState.founded(self._layout.hash, i, self._read(i, 0), fragment.size)
            for i, fragment in enumerate(self._layout.fragments)
        ]
        self._works = [
            [OwnWork(state, step=0) for state in self._states] for _ in range(len(self._values))
        ]
        self._begun = [list(self._states) for _ in self._works]
        """The version in which a member's work was merged last: its pending work began there."""
        self._coming: dict[
            int, list[tuple[int, FragmentState, frozenset[int], Float32Rows | None]]
        ] = {}
        """Merges under way, by the step of their adoption, with those whose work is in them, and
        what the members' inner momenta lack to their mean, if they share it."""
        self._joined = [0] * len(self._values)
        self._points: list[tuple[int, float]] = []
        self._versions: list[Float32s] = [first.copy()]
        self._exponential = {share: first.astype(np.float64) for share in KEPT_SHARES}
        self._growing = first.astype(np.float64)
        self._saved: deque[Float32s] = deque(maxlen=SAVES_MAX)

    @property
    def _values(self) -> Float32s:
        values: Float32s = self._members.values[self._rows]
        return values

    def _read(self, fragment: int, member: int) -> Float32s:
        return self._places.read(fragment, self._values[member])

    @property
    def _merged(self) -> Float32s:
        if self.trial.central:
            alone: Float32s = self._values[0].copy()
            return alone
        return self._places.join([state.theta for state in self._states])

    def after(self, step: int) -> None:
        """Begin and end the rounds of this moment."""
        trial = self.trial
        if not trial.central:
            for fragment in range(trial.fragments):
                if (step + fragment * trial.cycle // trial.fragments) % trial.cycle == 0:
                    self._merge(fragment, step)
            for fragment, state, contained, lacks in self._coming.pop(step, []):
                for member in range(len(self._values)):
                    self._adopt(fragment, state, member, step, is_in=member in contained)
                    if lacks is not None:
                        self._turn(fragment, member, lacks[member])
        if step == trial.half_replaced_at:
            for member in range(trial.members // 2, trial.members):
                self._replace(member, step)
        if trial.averaged and step * SAVES_IN_CYCLE % trial.cycle < SAVES_IN_CYCLE:
            self._saved.append(self._merged)
        if step % trial.cycle == 0:
            self._remember(step)

    def _is_new(self, member: int, step: int) -> bool:
        joined = self._joined[member]
        return joined > 0 and step - joined <= self.trial.cycle

    def _merge(self, fragment: int, step: int) -> None:
        trial, state = self.trial, self._states[fragment]
        step_tokens = self._members.problem.step_tokens
        sizes = self._layout.fragments[fragment].unit_sizes
        payloads: list[bytearray] = []
        claims: list[Contribution] = []
        contained: list[int] = []
        for member in range(len(self._values)):
            silent = trial.newcomers == "silent" and self._is_new(member, step)
            if silent or self._rng.random() < trial.misses:
                continue
            work, values = self._works[member][fragment], self._read(fragment, member)
            mark = self._mark(member, step)
            if mark == work.merged_step:
                continue
            work.offer(values, step=mark)
            begun = self._begun[member][fragment]
            age, meanwhile = state.version - begun.version, begun.theta - state.theta
            late = Late(work.base - values, age, meanwhile)
            payload = bytearray(self._codec.encoded_size(sizes))
            self._codec.encode(trial.late(late), sizes, payload, self._scratch)
            payloads.append(payload)
            steps = mark - work.merged_step
            claims.append(Contribution(steps * step_tokens, steps, staleness=late.age))
            contained.append(member)
        if not contained:
            return
        bounded = trial.newcomers == "bounded"
        new = [i for i, member in enumerate(contained) if bounded and self._is_new(member, step)]
        merged = bytearray(self._codec.encoded_size(sizes))
        units = Units(sizes, self._layout.fragments[fragment].kinds)
        addends = Addends(payloads, tuple(trial.weights(claims, new)))
        merge_encoded(rule_named("mean"), self._codec, addends, units, merged, self._scratch)
        if trial.orthogonal:
            self._orthogonalise(fragment, merged)
        made = Step(state.theta, np.empty_like(state.theta), state.momentum.copy())
        optimizer = trial.outer(step / trial.steps, state.version)
        step_encoded(made, self._codec, merged, sizes, optimizer, self._scratch)
        after = replace(state, version=state.version + 1, theta=made.theta, momentum=made.momentum)
        self._states[fragment] = after
        lacks = self._lacks(fragment) if trial.shares_momentum else None
        coming = self._coming.setdefault(step + trial.overlap, [])
        coming.append((fragment, after, frozenset(contained), lacks))

    def _orthogonalise(self, fragment: int, merged: bytearray) -> None:
        sizes = self._layout.fragments[fragment].unit_sizes
        displacement = np.empty(sum(sizes), np.float32)
        self._codec.decode(merged, sizes, displacement, self._scratch)
        values = np.zeros_like(self._members.values[0])
        self._places.write(fragment, values, displacement)
        self._members.orthogonalise(values, self.trial.orthogonal)
        turned = self._places.read(fragment, values)
        self._codec.encode(turned, sizes, merged, self._scratch)

    def _lacks(self, fragment: int) -> Float32Rows:
        momenta = self._members.momentum[self._rows]
        own = np.stack([self._places.read(fragment, row) for row in momenta])
        return _mean(own) - own

    def _turn(self, fragment: int, member: int, lacks: Float32s) -> None:
        """Add to a member's momentum what it lacked at its offer, as far as that has not faded."""
        momentum = self._members.momentum[self._rows.start + member]
        faded = np.float32(self._members.fades**self.trial.overlap)
        self._places.add(fragment, momentum, faded * lacks)

    def _mark(self, member: int, step: int) -> int:
        return self._members.own_step(self._first_reader + member, step)

    def _adopt(
        self, fragment: int, state: FragmentState, member: int, step: int, *, is_in: bool
    ) -> None:
        work, values = self._works[member][fragment], self._read(fragment, member)
        moved = self._members.moved[self._rows.start + member]
        self._places.write(fragment, moved, work.base - state.theta)
        mark = self._mark(member, step)
        if self.trial.newcomers == "silent" and self._is_new(member, step):
            adopted = work.discard(state, step=mark)
            is_in = True
        else:
            contained = work.snapshot_step if is_in and work.snapshot is not None else None
            adopted = work.adopt(state, contained, step=mark)
        if is_in:
            self._begun[member][fragment] = state
        adopted.apply(values)
        self._places.write(fragment, self._values[member], values)

    def _replace(self, member: int, step: int) -> None:
        """A newcomer takes the place of a member, with the merged model and no memory."""
        self._joined[member] = step
        self._members.renew(self._rows.start + member)
        for fragment, state in enumerate(self._states):
            self._works[member][fragment] = OwnWork(state, step=self._mark(member, step))
            self._begun[member][fragment] = state
            self._places.write(fragment, self._values[member], state.theta)

    def _remember(self, step: int) -> None:
        trial = self.trial
        if trial.averaged:
            merged = self._merged
            self._versions = [*self._versions, merged][-max(AVERAGES) :]
            for share, average in self._exponential.items():
                average += (1 - share) * (merged - average)
            weight = min(1.0, NEWEST_WEIGHS / (step // trial.cycle))
            self._growing += weight * (merged - self._growing)
        every = trial.measured_cycles
        if every is not None and step // trial.cycle % every == 0:
            self._points.append((step, self._members.problem.evaluate(self._merged)))

    def outcome(self, seconds: float) -> Outcome:
        evaluate = self._members.problem.evaluate
        averages: dict[str, float] = {}
        if self.trial.averaged:
            for count in AVERAGES:
                averages[f"last {count}"] = evaluate(_mean(np.stack(self._versions[-count:])))
            for share, average in self._exponential.items():
                averages[f"exponential {share:g}"] = evaluate(average.astype(np.float32))
            averages["growing"] = evaluate(self._growing.astype(np.float32))
            for name, ago in CHECKPOINTS.items():
                places = [-1 - int(SAVES_IN_CYCLE * cycles) for cycles in ago]
                saved = [self._saved[max(-len(self._saved), place)] for place in places]
                averages[name] = evaluate(_mean(np.stack(saved)))
        return Outcome(
            loss=evaluate(_mean(self._values)),
            merged_loss=evaluate(self._merged),
            points=tuple(self._points),
            averages=averages,
            noise_tokens=noise_scale(
                self._noise, self.trial.members, self._members.problem.step_tokens
            ),
            seconds=seconds,
        )


def _mean(rows: Float32s) -> Float32s:
    return np.asarray(rows.mean(axis=0, dtype=np.float64), np.float32)


def noise_scale(
    norms: Sequence[tuple[float, float]], batches: int, batch_tokens: int
) -> float | None:
    """The gradient noise scale in tokens, from squared norms of the gradients of small batches, and
    of their mean. ``None``: it cannot be told, as where there is one batch."""
    if batches < 2 or not norms:
        return None
    small, large = np.mean(norms, axis=0)
    gradient = (batches * large - small) / (batches - 1)
    noise = (small - large) * batch_tokens / (1 - 1 / batches)
    return float(noise / gradient) if gradient > 0 else None
