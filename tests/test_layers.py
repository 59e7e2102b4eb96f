"""The imports that each room may have, read from the source: nothing is imported to check it.

A room is a folder of modules. The rules name rooms and not modules, so a module is held to them by
the place where it stands. Each rule is a function from modules to the breaches it finds; it is
called on the repository and, to show that it can fail, on a planted breach.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("dht", "averaging", "peer")

ORDER = (
    "dht",
    "dht.membership",
    "dht.libp2p.framing",
    "dht.libp2p.lane",
    "dht.libp2p",
    "dht.memory",
    "dht.presence",
    "averaging",
    "averaging.numbers",
    "averaging.history",
    "averaging.rules",
    "averaging.round.interface",
    "averaging.round.opinions",
    "averaging.round.sealing",
    "averaging.round.gathering",
    "averaging.round",
    "averaging.live.streams",
    "averaging.live.states",
    "averaging.live.slices",
    "averaging.live",
    "averaging.guard.rules",
    "averaging.guard",
    "averaging.virtual",
    "peer",
    "peer.run_file",
    "peer.rules",
    "peer.events",
    "peer.bridge",
    "peer.model",
    "peer.model.recipes",
    "peer.joining",
    "peer.storage",
    "peer.data.batches",
    "peer.data.text",
    "peer.data",
    "peer.guest",
    "peer.trainer.computing",
    "peer.trainer",
    "peer.views",
    "peer.island",
    "peer.agent",
    "peer.simulate.problems",
    "peer.simulate",
    "peer.demo",
    "peer.cli",
    "peer.extras",
    "peer.extras.compiled",
    "peer.extras.export",
    "peer.extras.bases",
    "peer.extras.credit.accounting",
    "peer.extras.credit",
    "peer.extras.site",
    "peer.extras.orders",
    "peer.extras.hosting",
    "peer.extras.shards",
    "peer.extras.doctor",
    "peer.extras.use",
)
"""Every room. A room may import itself and the rooms before it in this list: so the core, which is
all that stands before ``peer.extras``, imports none of the extras."""

ENTRANCES = ("peer", "peer.hf", "peer.lightning", "peer.simulate")
"""Modules at the top of a package that stand above its rooms: what user programs import."""

TESTS_ON_HOOKS = ("tests/averaging/virtual",)
"""Tests whose liars stand on ``averaging.live.slices.watch``."""
PLANTED_BUGS = "tests.averaging.virtual.breakages"
"""Some of its bugs are in the middle of a decision, where no hook is."""

RESEARCH = "examples.paper."
"""Examples that look into the averaging. All others show what a user's program imports."""

FOR_ROUNDS = {"averaging", "averaging.numbers", "averaging.history", "averaging.rules", "dht"}
PARTS_OF_ROUNDS = {
    "averaging.round.interface",
    "averaging.round.opinions",
    "averaging.round.sealing",
    "averaging.round.gathering",
}

PURE = {
    "dht.membership": {"dht"},
    "averaging.numbers": {"averaging"},
    "averaging.history": {"averaging", "averaging.numbers", "dht"},
    "averaging.rules": {"averaging", "averaging.numbers", "averaging.history", "dht"},
    "averaging.guard.rules": {
        "averaging",
        "averaging.numbers",
        "averaging.history",
        "averaging.rules",
        "dht",
    },
    "averaging.round.interface": FOR_ROUNDS,
    "averaging.round.opinions": {*FOR_ROUNDS, "averaging.round.interface"},
    "averaging.round.sealing": {
        *FOR_ROUNDS,
        "averaging.round.interface",
        "averaging.round.opinions",
    },
    "averaging.round.gathering": {
        *FOR_ROUNDS,
        "averaging.round.interface",
        "averaging.round.opinions",
        "averaging.round.sealing",
    },
    "averaging.round": {*FOR_ROUNDS, *PARTS_OF_ROUNDS},
    "peer.run_file": {"peer", "dht"},
    "peer.rules": {"peer", "peer.run_file", "dht", "dht.membership"},
    "peer.extras.credit.accounting": {"peer", "averaging", "averaging.history", "dht"},
    "peer.events": {"peer"},
}
"""Rooms that only decide, and the other rooms that each may import."""

EFFECTS = {
    "asyncio",
    "hivemind",
    "multiprocessing",
    "random",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uvloop",
}
"""Libraries that a pure room may not import."""

SERIALIZERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
"""Libraries that can turn received bytes into running code."""

STARTS_A_LOOP = {
    "peer.agent.agent",
    "peer.signals",
    "peer.extras.hosting.bootstrap",
    "peer.joining.fetch",
}


@dataclass(frozen=True)
class Import:
    module: str
    """Dotted name after ``import`` or ``from``."""
    name: str | None
    """Name after ``from ... import``; ``None`` for a plain import."""
    line: int


@dataclass(frozen=True)
class Module:
    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, filename=self.name)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def room(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """All imports, those in functions and under ``TYPE_CHECKING`` included."""
        return tuple(_imports(self.nodes))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import hides its package"
            assert node.module is not None
            for alias in node.names:
                yield Import(node.module, alias.name, node.lineno)


Modules = Mapping[str, Module]
Rule = Callable[[Modules], list[str]]


@cache
def repository() -> Modules:
    found = {}
    for package in (*PACKAGES, "examples", *TESTS_ON_HOOKS):
        for path in sorted((ROOT / package).rglob("*.py")):
            is_package = path.name == "__init__.py"
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if is_package else parts)
            found[name] = Module(name, path.read_text(encoding="utf-8"), is_package)
    return found


def planted(**sources: str) -> Modules:
    """A few modules beside the real packages' names; ``__`` in a keyword stands for a dot."""
    names = {name.replace("__", "."): source for name, source in sources.items()}
    return {name: Module(name, source) for name, source in names.items()}


def ours(modules: Modules) -> Iterable[Module]:
    return (module for module in modules.values() if module.package in PACKAGES)


def targets(module: Module, modules: Modules) -> Iterator[tuple[str, int]]:
    """The modules of the repository that a module imports, each with its line."""
    for each in module.imports:
        inner = f"{each.module}.{each.name}"
        if inner in modules:
            yield inner, each.line
        elif each.module in modules:
            yield each.module, each.line


def library(each: Import) -> str:
    return each.module.partition(".")[0]


def imports_against_the_order(modules: Modules) -> list[str]:
    place = {room: index for index, room in enumerate(ORDER)}
    wrong = []
    for module in ours(modules):
        if module.name in ENTRANCES:
            continue
        if module.room not in place:
            wrong.append(f"{module.name}: {module.room} is not in ORDER")
            continue
        for name, line in targets(module, modules):
            room = modules[name].room
            if name in ENTRANCES or place.get(room, len(ORDER)) > place[module.room]:
                wrong.append(f"{module.name}:{line} imports {name}")
    return wrong


def imports_of_examples(modules: Modules) -> list[str]:
    return [
        f"{module.name}:{each.line} imports {each.module}"
        for module in modules.values()
        for each in module.imports
        if module.package != "tests"
        and library(each)
        in (
            ({"tests"} if module.name.startswith(RESEARCH) else {"dht", "averaging", "tests"})
            if module.package == "examples"
            else {"examples", "tests"}
        )
    ]


def impurities(modules: Modules) -> list[str]:
    wrong = []
    for module in ours(modules):
        if module.room not in PURE:
            continue
        wrong += [
            f"{module.name}:{each.line} imports {each.module}"
            for each in module.imports
            if library(each) in EFFECTS
        ]
        wrong += [
            f"{module.name}:{line} imports {name}"
            for name, line in targets(module, modules)
            if modules[name].room not in {module.room, *PURE[module.room]}
        ]
        wrong += [
            f"{module.name}:{node.lineno} is a coroutine"
            for node in module.nodes
            if isinstance(node, ast.AsyncFunctionDef)
        ]
    return wrong


DOOR = "averaging.guard.door"
MAKES_GUARDS = re.compile(r"peer\b|averaging\.virtual\b")
"""The rooms that make peers: a guard is plugged in there."""


def ways_round_the_door(modules: Modules) -> list[str]:
    """Imports of what the guard is made of; the rest of ``averaging`` knows that there may be one
    by ``averaging.live.guard`` and ``averaging.rules.electors``."""
    return [
        f"{module.name}:{line} imports {name}"
        for module in ours(modules)
        if not module.name.startswith("averaging.guard")
        for name, line in targets(module, modules)
        if name.startswith("averaging.guard")
        and not (name == DOOR and MAKES_GUARDS.match(module.name))
    ]


def import_circles(modules: Modules) -> list[str]:
    """Groups of modules, and of rooms, that import one another."""
    between_modules = {
        module.name: {name for name, _ in targets(module, modules) if name != module.name}
        for module in ours(modules)
    }
    between_rooms: dict[str, set[str]] = {}
    for module in ours(modules):
        if module.name in ENTRANCES:
            continue
        rooms = {modules[name].room for name, _ in targets(module, modules)}
        between_rooms.setdefault(module.room, set()).update(rooms - {module.room})
    return [
        "circle: " + ", ".join(circle)
        for graph in (between_modules, between_rooms)
        for circle in circles(graph)
    ]


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups in which everything can be reached from everything."""

    def reached_from(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            for name in graph.get(ahead.pop(), set()) - found:
                found.add(name)
                ahead.append(name)
        return found

    reached = {name: reached_from(name) for name in graph}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached.get(other, set())))
        for name in graph
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def private_reaches(modules: Modules) -> list[str]:
    """Private names of one room that a module of another room uses."""
    owners: dict[str, set[str]] = {}
    for module in ours(modules):
        for name in private_names(module.nodes):
            owners.setdefault(name, set()).add(module.room)
    wrong = []
    for module in ours(modules):
        for each in module.imports:
            if each.module in modules and each.name is not None and is_private(each.name):
                wrong.append(f"{module.name}:{each.line} imports {each.module}.{each.name}")
        for node in module.nodes:
            if not isinstance(node, ast.Attribute) or not is_private(node.attr):
                continue
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                continue
            rooms = owners.get(node.attr, set())
            if rooms and module.room not in rooms:
                wrong.append(f"{module.name}:{node.lineno} uses {ast.unparse(node)}")
    return wrong


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Private names that a module defines: functions, classes, variables, attributes."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if is_private(name):
            yield name


def hivemind_elsewhere(modules: Modules) -> list[str]:
    """hivemind enters through one module."""
    allowed = {"dht.libp2p.hivemind_imports"}
    return [
        f"{module.name}:{each.line} imports {each.module}"
        for module in modules.values()
        if module.name not in allowed
        for each in module.imports
        if library(each) == "hivemind"
    ]


def torch_below_peer(modules: Modules) -> list[str]:
    return [
        f"{module.name}:{each.line} imports {each.module}"
        for module in modules.values()
        if module.package in {"dht", "averaging"}
        for each in module.imports
        if library(each) in {"torch", "transformers", "lightning"}
    ]


def agents_with_a_trainer(modules: Modules) -> list[str]:
    """The agent is a process without torch: it knows its trainer by messages alone."""
    return [
        f"{module.name}:{line} imports {target}"
        for module in ours(modules)
        if module.room == "peer.agent"
        for target, line in targets(module, modules)
        if target.startswith("peer.trainer")
    ]


def loops_elsewhere(modules: Modules) -> list[str]:
    return [
        f"{module.name}:{each.line} imports uvloop"
        for module in ours(modules)
        if module.name not in STARTS_A_LOOP
        for each in module.imports
        if library(each) == "uvloop"
    ]


def ways_to_run_received_bytes(modules: Modules) -> list[str]:
    wrong = []
    for module in modules.values():
        wrong += [
            f"{module.name}:{each.line} imports {each.module}"
            for each in module.imports
            if library(each) in SERIALIZERS
        ]
        for node in module.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in {"eval", "exec", "compile", "__import__", "torch.load"}:
                wrong.append(f"{module.name}:{node.lineno} calls {called}")
            wrong += [
                f"{module.name}:{node.lineno} allows pickle"
                for word in node.keywords
                if word.arg == "allow_pickle" and ast.unparse(word.value) != "False"
            ]
    return wrong


def strange_extras(modules: Modules) -> list[str]:
    """Modules of ``peer.extras`` that the core names and that do not exist: they would be skipped
    as if they were left out. It may name them to ``peer.installed`` alone."""
    wrong = []
    for module in ours(modules):
        if module.name.startswith("peer.extras"):
            continue
        for node in module.nodes:
            match node:
                case ast.Call(func=ast.Name(id="extra" | "extras"), args=named):
                    wrong += [
                        f"{module.name}:{node.lineno} names {name!r}"
                        for each in named
                        if isinstance(each, ast.Constant)
                        and f"peer.extras.{(name := str(each.value))}" not in modules
                    ]
                case ast.Call(args=[ast.Constant(value=str(name))]) if "peer.extras" in name:
                    wrong.append(f"{module.name}:{node.lineno} imports {name}")
    return wrong


BEGINNINGS = {"__init__", "__post_init__", "__enter__"}
"""Methods that may add attributes to their object. A context manager is of use once it is entered.
"""


def attributes_set_later(modules: Modules) -> list[str]:
    """Attributes that a method adds to its object: the constructor has to name them all.

    A method that the constructor calls belongs to it. Classes whose bases are of other packages are
    left out: what those declare is not seen here.
    """
    classes = {
        node.name: node
        for module in ours(modules)
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    wrong = []
    for module in ours(modules):
        for node in module.nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            declared = _attributes_of(node, classes)
            wrong += [
                f"{module.name}:{target.lineno} sets self.{target.attr} first"
                for method in _methods(node)
                for target in _set_on_self(method)
                if declared is not None and target.attr not in declared
            ]
    return wrong


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _set_on_self(method: ast.AST) -> Iterator[ast.Attribute]:
    for each in ast.walk(method):
        match each:
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield each


def _attributes_of(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> set[str] | None:
    """Attributes that a class has from the beginning; ``None``: one of its bases is not ours."""
    found: set[str] = set()
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        if name in {"Protocol", "Generic"}:
            continue
        inherited = _attributes_of(classes[name], classes) if name in classes else None
        if inherited is None:
            return None
        found |= inherited
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Assign():
                found |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    methods = {method.name: method for method in _methods(node)}
    for beginning in BEGINNINGS & methods.keys():
        called = {
            each.func.attr
            for each in ast.walk(methods[beginning])
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)
        }
        for name in {beginning} | (called & methods.keys()):
            found |= {target.attr for target in _set_on_self(methods[name])}
    return found


ARGUMENTS_MAX = 8


def long_argument_lists(modules: Modules) -> list[str]:
    """Functions with more arguments than ``ARGUMENTS_MAX``: what belongs together is one value.

    The options of a command are its arguments, and a command has as many as users need.
    """
    wrong = []
    for module in ours(modules):
        for node in module.nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(each.arg not in {"self", "cls"} for each in given)
            is_command = any(".command(" in ast.unparse(each) for each in node.decorator_list)
            if count > ARGUMENTS_MAX and not is_command:
                wrong.append(f"{module.name}:{node.lineno} {node.name} has {count} arguments")
    return wrong


def modules_without_a_subject(modules: Modules) -> list[str]:
    nothing = {"utils", "util", "common", "helpers", "misc"}
    return [name for name in modules if name.rpartition(".")[2] in nothing]


def rooms_without_a_map(modules: Modules) -> list[str]:
    """The docstring of a room's ``__init__`` tells a reader what is in it."""
    return [
        module.name
        for module in ours(modules)
        if module.is_package and not ast.get_docstring(module.tree)
    ]


HEARS = re.compile(
    r"dht|averaging\.(?:round|guard|live|rules|history)"
    r"|peer\.(?:agent|joining|extras\.(?:hosting|site|credit))"
)
"""Rooms that hear from others; what is in memory only is a test's."""

CONTAINERS = {"dict", "set", "list", "Counter", "OrderedDict", "defaultdict", "deque"}

OF_OTHERS = {"PeerId", "RunId", "Lineage", "Link", "Multiaddr", "bytes", "str"}
"""What others choose, by the thousand if they like."""

BOUNDED_OTHERWISE = {
    "names of tables, which stand in the source": """
dht.bounded_mapping.Tables.dropped""",
    "peers connected now, which the daemon limits": """
dht.libp2p.hivemind_directory.HivemindDirectory._connected
dht.libp2p.hivemind_directory.HivemindDirectory._not_nodes
dht.membership.reachability.Proximity.present
dht.presence.dialler.Dialler.connected
dht.presence.door.Door._let_in
dht.presence.door.Door._compared
dht.presence.greeting.Greeting._not_to_greet""",
    "peers that this one says hello to: some at each heartbeat, remembered for four": """
dht.presence.greeting.Greeting._asked""",
    "streams and calls at once, so many of each peer; the peer with the most makes room": """
dht.limits.FairQueue._waiting
averaging.live.streams.fair_shares.ByteBudget._held""",
    "holders of one record: a few": """
dht.membership.replicas.Holders._known""",
    "bytes that wait in one stream or link, at most so many": """
dht.libp2p.framing.frame_stream.FrameStream._queue
averaging.live.streams.links._Link.waiting""",
    "512 links; those of newcomers are closed before those of established peers": """
averaging.live.streams.links.Transport._links""",
    "peers that this one dials; connections are closed with what is forgotten": """
dht.libp2p.lane.lane.Lane._peers""",
    "64 circuits; the peer with the most makes room with the longest unused": """
dht.libp2p.lane.relaying._Circuit.legs
dht.libp2p.lane.relaying.Relay._circuits
dht.libp2p.lane.relaying.Relay._legs""",
    "samples of the last seconds": """
dht.libp2p.lane.pacing.Pace._best""",
    "settings, files and links of this peer, and what it is asked to serve": """
dht.host.Served.calls
dht.host.Served.streams
dht.libp2p.hivemind_calls.UnaryCalls._handlers
dht.libp2p.places.RelayPlaces._at
dht.libp2p.places.RelayPlaces._kept
dht.membership.seeds.SeedPlanner._seeds
dht.presence.greeting.Greeting.bootstrap_peers""",
    "what the end of a run asks for: done before the next look, which asks for a handful": """
peer.agent.services.EndOfRun.todo""",
    "questions that this peer is asking just now": """
dht.presence.dial_back.ReachabilityChecks._requests
dht.presence.door.Door._asking
averaging.guard.auditing.Auditing._fetching
averaging.live.states.fetcher._Fetch.reasons
averaging.live.states.fetcher._Fetch._manifests
averaging.live.states.fetcher._Fetch._identities
averaging.live.states.fetcher._Fetch._talking
averaging.live.states.fetcher._Fetch._working
averaging.live.states.fetcher._Fetch._spare
averaging.live.states.fetcher._Source.asked
peer.joining.visit.Visitor._told""",
    "the owner, and DELEGATES_MAX that it has signed for": """
dht.membership.admission.Admission._directives""",
    "verdicts in `Auditing.convicted`": """
averaging.guard.kept_proofs.KeptProofs._unwritten
dht.membership.admission.Admission.convicted""",
    "8192 members, those that called first, and then by network": """
dht.membership.table.PeerTable._members
dht.membership.table.PeerTable._present_before
dht.membership.table.PeerTable._order
dht.membership.table.PeerTable._news
peer.agent.peer.Peer.view
peer.agent.peer.Peer.absent
peer.agent.network.Network.told""",
    "RUNS_MAX live runs, half of them those that are here for longest, and as many others": """
peer.extras.hosting.run_pages.RunPages._runs""",
    "contributors that were news, MET_MAX of them": """
peer.extras.site.keepers_page.Record.met""",
    "buckets, as deep as the number of members needs, that this peer has read lately": """
dht.membership.table.PeerTable._read_at""",
    "half for the first that came, half a sample by a rank that only this node can compute": """
dht.record_keeper._Shelf.entries
dht.record_keeper.RecordKeeper._shelves
dht.record_keeper.RecordKeeper._in_order
dht.record_keeper.RecordKeeper._sample""",
    "HUBS_MAX peers that everybody meets": """
peer.agent.network.Meetings.met""",
    "256 strangers, for one sentence each; a newcomer meets its seeds before them": """
dht.presence.intake.Intake.misfits""",
    "kinds that the source names": """
dht.libp2p.lane.lane.Lane.counters
dht.libp2p.lane.relaying.Relay.counters
dht.wrapped_host.Gate.sent_for
averaging.live.guard.Guard.counters
averaging.live.settings.AveragerStats.refused
averaging.live.states.fetch_server.FetchServer.counters
averaging.live.states.fetcher.Fetcher.counters
averaging.live.streams.links.Transport.counters
averaging.round.opinions.fragment.Fragment.counters
peer.agent.peer.Peer.jumps""",
    "members of one roster, at most 64": """
averaging.guard.rules.witness._Round.votes
averaging.guard.rules.witness._Round.promises
averaging.guard.rules.witness._Round.claims
averaging.live.slices.evidence.Uploads.shown
averaging.live.slices.parts.Tally.refused
averaging.live.slices.parts.Parts._shown
averaging.round.participation.Participation._finished_by
averaging.round.participation.Participation._void_said_by
averaging.round.sealing.doubt.Doubt.forsworn""",
    "places of one group, half of them for newcomers, and peers that this one has called": """
averaging.round.opinions.fragment.OpenRoster.joins
averaging.round.opinions.fragment.OpenRoster.passed
averaging.round.opinions.fragment.OpenRoster.called
averaging.round.opinions.fragment.OpenRoster.coming""",
    "NAMERS_MAX for each author; leaders that this peer has asked; until a link has enough": """
averaging.guard.rules.spot_checks.SpotChecks._named
averaging.round.opinions.certificates.Certificates._kept""",
    "ROUNDS_MAX rounds at once, of leaders that may lead": """
averaging.round.machine.FragmentRounds.rounds
averaging.live.fragment.FragmentWork.exchanges""",
    "one link that this peer has left": """
averaging.round.opinions.certificates.Certificates._left""",
    "own work, and what memory of its own it takes": """
averaging.history.replay.ReplayLog._entries
averaging.live.states.state_files.StateFiles._returned
averaging.live.streams.buffers.Arena._returned
averaging.round.opinions.fragment.Fragment.own_messages""",
    "bytes of the own rounds, which auditors may ask for: they give way to no other table": """
averaging.guard.auditing.Auditing._kept""",
    "proofs times peers in view": """
averaging.guard.auditing.Auditing._told""",
    "peers with work in the merged maps": """
peer.extras.credit.accounting.tally.Tally.statements""",
}
"""Attributes that others make grow and that are no ``BoundedMapping``, by what bounds them."""


def tables_without_a_bound(modules: Modules) -> list[str]:
    """Attributes that others can make grow, and that are no ``BoundedMapping``.

    What is bounded otherwise stands in ``BOUNDED_OTHERWISE``.
    """
    known = {name for names in BOUNDED_OTHERWISE.values() for name in names.split()}
    return [
        f"{name} ({said}): make it a BoundedMapping, or say in BOUNDED_OTHERWISE what bounds it"
        for name, said in growing(modules)
        if name not in known
    ]


def growing(modules: Modules) -> Iterator[tuple[str, str]]:
    """Attributes that are containers of what others choose, each with how it is declared."""
    for module in ours(modules):
        if not HEARS.match(module.room) or module.room in {"dht.memory"}:
            continue
        for owner in module.nodes:
            if not isinstance(owner, ast.ClassDef):
                continue
            for node in ast.walk(owner):
                match node:
                    case ast.AnnAssign(
                        target=ast.Attribute(value=ast.Name(id="self"), attr=name)
                        | ast.Name(id=name),
                        annotation=said,
                        value=value,
                    ) if not isinstance(node.target, ast.Name) or node in owner.body:
                        pass
                    case ast.Assign(
                        targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)],
                        value=ast.Call(func=said) as value,
                    ):
                        pass
                    case _:
                        continue
                if any(map(_grows, ast.walk(said))) and not _has_maxlen(value):
                    yield f"{module.name}.{owner.name}.{name}", ast.unparse(said)


def _grows(said: ast.AST) -> bool:
    match said:
        case ast.Subscript(value=ast.Name(id="deque")):
            return True
        case ast.Subscript(value=ast.Name(id=kind), slice=of) if kind in CONTAINERS:
            keys = of.elts[0] if isinstance(of, ast.Tuple) else of
            names = {each.id for each in ast.walk(keys) if isinstance(each, ast.Name)}
            return bool(names & ({"PeerId"} if kind == "list" else OF_OTHERS))
    return False


def _has_maxlen(value: ast.expr | None) -> bool:
    return value is not None and "deque(maxlen=" in ast.unparse(value)


def patches_of_private_names(modules: Modules) -> list[str]:
    """Tests on hooks that replace a private method of a package all the same."""
    return [
        f"{module.name}:{node.lineno} replaces {name}"
        for module in modules.values()
        if module.package == "tests" and module.name != PLANTED_BUGS
        for node in module.nodes
        if isinstance(node, ast.Call | ast.Assign)
        and (name := _replaced(node)) is not None
        and is_private(name)
    ]


def _replaced(node: ast.Call | ast.Assign) -> str | None:
    """The name that a statement replaces on an object of somebody else."""
    match node:
        case ast.Call(
            func=ast.Attribute(attr="setattr" | "object"),
            args=[_, ast.Constant(value=str(name)), *_],
        ):
            return name
        case ast.Assign(targets=[ast.Attribute(value=owner, attr=name)]) if not (
            isinstance(owner, ast.Name) and owner.id == "self"
        ):
            return name
    return None


RULES: dict[Rule, Modules] = {
    imports_against_the_order: planted(
        dht__identity="from averaging.messages import Join", averaging__messages=""
    ),
    imports_of_examples: planted(examples__loop="from averaging.messages import Join"),
    impurities: planted(averaging__round__machine="def f():\n    import time"),
    ways_round_the_door: planted(
        averaging__live__fragment="from averaging.guard.door import Defences",
        averaging__guard__door="",
    ),
    import_circles: planted(
        peer__data__order="from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from peer.data.feed import Feed",
        peer__data__feed="from peer.data.order import Order",
    ),
    private_reaches: planted(
        averaging__round__machine="class Machine:\n    def _take(self): ...",
        averaging__live__averager="def run(machine):\n    machine._take()",
    ),
    hivemind_elsewhere: planted(dht__libp2p__hivemind_host="import hivemind.p2p"),
    agents_with_a_trainer: planted(
        peer__agent__agent="from peer.trainer.needs import needs_of",
        peer__trainer__needs="",
    ),
    torch_below_peer: planted(averaging__numbers__codec="from torch import Tensor"),
    loops_elsewhere: planted(peer__agent__station="import uvloop"),
    strange_extras: planted(peer__cli__families="extras('credit.comands')"),
    ways_to_run_received_bytes: planted(peer__storage__checkpoint="torch.load(path)"),
    attributes_set_later: planted(
        peer__agent__station="class Station:\n"
        "    def __init__(self): self.a = self.b()\n"
        "    def b(self): self.c = 1\n"
        "    def run(self): self.a = self.c = self.d = 1"
    ),
    long_argument_lists: planted(
        peer__agent__station="class Station:\n"
        "    def run(self, a, b, c, d, /, e, *, f, g, h, i): ...\n"
    ),
    modules_without_a_subject: planted(peer__data__utils=""),
    tables_without_a_bound: planted(
        averaging__round__machine="class Machine:\n"
        "    def __init__(self): self.seen: dict[PeerId, float] = {}"
    ),
    patches_of_private_names: planted(
        tests__averaging__virtual__liars="def lie(p):\n    p.setattr(Reducing, '_merge', 1)",
        tests__averaging__virtual__usurpers="def lie(node):\n    node._enter = 1",
    ),
    rooms_without_a_map: {"peer.data": Module("peer.data", "import peer", is_package=True)},
}
"""Every rule, with a breach of it."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Rule) -> None:
    wrong = rule(repository())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_finds_a_planted_breach(rule: Rule) -> None:
    assert rule(RULES[rule])


@pytest.mark.parametrize(
    "declared",
    [
        "seen: set[PeerId] = field(default_factory=set)",
        "def __init__(self): self.seen = OrderedDict[bytes, float]()",
        "def __init__(self): self.seen: deque[int] = deque()",
        "def __init__(self): self.seen: dict[int, dict[tuple[int, Lineage], int]] = {}",
    ],
)
def test_a_table_without_a_bound_is_found_however_it_is_declared(declared: str) -> None:
    assert tables_without_a_bound(planted(dht__presence__door=f"class Door:\n    {declared}"))


def test_every_table_that_is_bounded_otherwise_is_there() -> None:
    named = {name for names in BOUNDED_OTHERWISE.values() for name in names.split()}
    assert not named - {name for name, _ in growing(repository())}


def test_peers_come_to_the_guard_by_its_door() -> None:
    by_the_door = "from averaging.guard.door import Defences"
    inside = "from averaging.guard.auditing import Auditing"
    for source, found in ((by_the_door, 0), (inside, 1)):
        modules = planted(
            peer__agent__life=source, averaging__guard__door="", averaging__guard__auditing=""
        )
        assert len(ways_round_the_door(modules)) == found


@pytest.mark.parametrize(
    "breach",
    [
        planted(peer__rules__ending="async def over(): ..."),
        planted(averaging__round__machine="import peer.errors", peer__errors=""),
        planted(
            averaging__rules__quorum="from averaging.live.averager import Averager",
            averaging__live__averager="",
        ),
    ],
    ids=["coroutine", "package above", "room that does"],
)
def test_a_pure_room_is_found_impure_for(breach: Modules) -> None:
    assert impurities(breach)


def test_a_room_that_nobody_put_in_the_order_is_found() -> None:
    assert imports_against_the_order(planted(peer__attic__box="")) == [
        "peer.attic.box: peer.attic is not in ORDER"
    ]


@pytest.mark.parametrize(
    "source", ["extra('gguf')", "import_module('peer.extras.gguf')", "import peer.extras.gguf"]
)
def test_an_extra_is_named_to_one_function_and_not_imported(source: str) -> None:
    modules = planted(peer__cli__families=source, peer__extras__gguf="")
    found = [*strange_extras(modules), *imports_against_the_order(modules)]
    assert bool(found) == ("peer.extras" in source)


def test_every_room_in_the_order_exists() -> None:
    rooms = {module.room for module in ours(repository())}
    assert rooms == set(ORDER)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn", ["torch.nn"]),
        ("def f():\n    from random import choice", ["random"]),
        ("if True:\n    import time as t, socket", ["time", "socket"]),
    ],
)
def test_imports_are_seen_wherever_they_stand(source: str, found: list[str]) -> None:
    assert [each.module for each in Module("peer.x", source).imports] == found


# The tests themselves

TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Shunned:
    """Text that stands in no module of the tests but those that are ``allowed``. To parse all tests
    takes seconds."""

    pattern: str
    breaches: tuple[str, ...]
    others: tuple[str, ...]
    allowed: re.Pattern[str] = re.compile(r"(?!)")

    def found_in(self, modules: Modules) -> list[str]:
        pattern = re.compile(self.pattern, re.MULTILINE)
        return [
            f"{module.name}: {found.group().strip()}"
            for module in modules.values()
            if not self.allowed.fullmatch(module.name)
            for found in pattern.finditer(module.source)
        ]


SHUNNED = {
    "an import from another test module": Shunned(
        r"^\s*(?:from|import)\s+tests\b[\w.]*(?:\.test_|\s+import\s+(?:\([^)]*|[^\n]*)\btest_)",
        breaches=(
            "from tests.dht.test_b import c",
            "import tests.dht.test_b as b",
            "def f():\n    from tests.dht import a, test_b",
            "from tests.dht import (\n    a,\n    test_b,\n)",
        ),
        others=(
            "from tests.dht.swarm import (\n    a,\n)\nfrom tests import x\n\ndef test_b(): ...",
        ),
        allowed=re.compile(r"(?:.*\.)?(?!test_)\w+"),
    ),
    # Liars and faults stand on ``averaging.live.slices.watch``: a private method may change. A test
    # of its own has ``monkeypatch``.
    "a private part of a peer that is replaced": Shunned(
        r"^\s*(?:[A-Z]\w*\._\w+ = |setattr\([A-Z]\w*, \"_)",
        breaches=(
            "def lie():\n    FragmentWork._do = done",
            'setattr(Reducing, "_merge", merged)',
        ),
        others=("self._do = 1\n    averager._x = 2",),
    ),
    "a process that the library of processes does not start": Shunned(
        r"^[^#\"'\n]*(?<![\w\"'])Popen\(",
        breaches=("process = subprocess.Popen(command)", "    with Popen(command) as started:"),
        others=("def f(process: subprocess.Popen[str]): ...", "popen(command)"),
        # The second one has it in the text of a program.
        allowed=re.compile(r"tests\.processes|tests\.peer\.bridge\.test_shared_memory"),
    ),
}
"""What no test module has, and what finds it."""


@pytest.mark.parametrize("shunned", SHUNNED.values(), ids=SHUNNED)
def test_no_test_has(shunned: Shunned) -> None:
    modules = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules[name] = Module(name, path.read_text(encoding="utf-8"))
    wrong = shunned.found_in(modules)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("shunned", SHUNNED.values(), ids=SHUNNED)
def test_breaches_are_found_and_nothing_else(shunned: Shunned) -> None:
    for source in shunned.breaches:
        assert shunned.found_in(planted(tests__test_a=source)), source
    for source in shunned.others:
        assert not shunned.found_in(planted(tests__test_a=source)), source


def test_folders_of_tests_mirror_the_rooms() -> None:
    """Each is a package as well, or ``tests/dht`` would hide ``dht``."""
    folders = {path.parent for path in TESTS.rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)

    rooms = {folder.relative_to(TESTS).as_posix() for folder in folders}
    strange = [
        room
        for room in sorted(rooms)
        if room.startswith(PACKAGES) and not (ROOT / room / "__init__.py").exists()
    ]
    assert not strange, "\n".join(strange)
