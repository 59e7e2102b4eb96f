"""Experiments with a whole swarm in virtual time, reproducible from a seed: the public names.

    from peer.simulate import Merging, Peers, Swarm, run

    result = run(Swarm(peers=Peers(count=16), outer=Merging(merge="my_rules:Trimmed")), seed=1)
    print(result.final.loss, result.goodput, result.fate)

- ``Swarm`` has all settings, as the file of ``shoal simulate FILE`` does: ``Peers``, ``Peer`` (some
  that differ), ``Training``, ``Merging``, ``Rounds``, ``Weather``, ``Event``, ``End``, ``Measure``.
- ``run(swarm, seed)`` simulates it: a ``Result`` with measured points, rounds, the fate of tokens.
- ``MergeRule``, ``Codec``, ``Outer`` and ``Problem`` are what a part of your own has
  to have. A setting names it ``module:name``; ``examples/own_*.py`` has one of each. They are for
  simulations only: peers of a run merge with the rules that its run file can name.

Behind them:

- ``settings``: the file. ``names`` finds parts of your own. ``problems``: what learners train.
- ``simulation``: start here. ``run`` simulates one swarm; ``SimulatedSwarm`` measures it.
- ``slots``: one place per peer, over all its lives. ``lifecycle``: the peers, which are live
  averagers in virtual time (``averaging.virtual``). ``incidents``: events, churn, end by a date.
- ``learner``: its parameters, fragment by fragment, and its steps at a peer's pace. ``roles``: what
  a liar uploads or merges instead, who judges uploads, the directives of the run's owner.
- ``outcome``: the results, and which tokens were merged.
- ``report``: sweeps, tables and plots of ``shoal simulate``; ``results``: tables, plots and pages.

Nothing here reads a real clock or opens a socket; the network is ``dht.memory.network``.
"""

from averaging.numbers import outer
from averaging.numbers.arrays import Bytes as Bytes
from averaging.numbers.arrays import Float32s as Float32s
from averaging.numbers.codec import Codec as Codec
from averaging.numbers.codec import Scratch as Scratch
from averaging.numbers.codecs import WholeNumberCodec as WholeNumberCodec
from averaging.numbers.layout import Kind as Kind
from averaging.numbers.layout import TensorSpec as TensorSpec
from averaging.numbers.merge import Contributions as Contributions
from averaging.numbers.merge import MergeRule as MergeRule
from dht.identity import PeerId as PeerId
from peer.simulate import outcome, settings
from peer.simulate.problems.problem import LocalTraining as LocalTraining
from peer.simulate.problems.problem import Problem as Problem
from peer.simulate.settings import BadExperiment as BadExperiment
from peer.simulate.settings import End as End
from peer.simulate.settings import Event as Event
from peer.simulate.settings import Measure as Measure
from peer.simulate.settings import Peer as Peer
from peer.simulate.settings import Peers as Peers
from peer.simulate.settings import Rounds as Rounds
from peer.simulate.settings import Swarm as Swarm
from peer.simulate.settings import Weather as Weather
from peer.simulate.settings import parse as parse
from peer.simulate.simulation import run as run

Outer = outer.OuterStep
Result = outcome.SwarmResult
Merging = settings.Outer
Training = settings.ProblemChoice
