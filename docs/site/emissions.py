"""Finds the events that the source emits, by its syntax trees: nothing is imported.

An event is emitted by a call of one of ``EMITTERS`` with the name as its first argument, or by a
dictionary with the key ``event``. Functions that pass a name on are emitters themselves, so that a
computed name is a fault wherever it is not a parameter of an emitter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("dht", "averaging", "peer")

EMITTERS = {
    "dht": {"PresenceEvent", "tell"},
    "averaging": {
        "CountRefused",
        "LeaveOut",
        "Note",
        "Strike",
        "WarnOfCommit",
        "_note",
        "_on_event",
        "event",
        "note",
    },
    "peer": {"Happened", "event", "write"},
    "peer/agent": {
        "_on_event",
        "_tell_not_saved",
        "averager_event",
        "note",
        "tell",
        "told",
    },
    "peer/extras/site": {"tell", "_tell"},
    "peer/joining": {"event"},
    "peer/rules": {"Tell"},
    "peer/storage": {"_tell"},
    "peer/trainer": {"_events.append", "add"},
    "peer/simulate": {"record"},
}
"""Functions and classes whose first argument is the name of an event, by folder. ``write`` is the
method of an event log, ``add`` takes a name and fields, and ``_events.append`` a pair of them."""

PASSED_ON: dict[str, tuple[str, ...]] = {
    "effect": (),
    "effect.name": (),
    "str(event['event'])": (),
    "event.name": (),
    "fields.pop('event')": (),
    "message.name": (),
    "note.event": (),
    "event.kind": ("crash", "leave", "pause", "partition", "join", "order"),
}
"""Computed names: those of events that were emitted elsewhere, and those that an experiment of
``shoal simulate`` may have."""


@dataclass(frozen=True, slots=True)
class Emission:
    """One place that emits an event."""

    place: str
    name: str
    fields: frozenset[str]
    """Names of the fields that are written in the call."""
    called: str = ""
    """The emitter, such as ``self.event``."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A call of an emitter whose name is neither a literal nor a parameter of an emitter."""

    place: str
    source: str


def everywhere(root: Path = ROOT) -> Iterator[Emission | Computed]:
    """All emissions in the three packages."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            if place.startswith("peer/events/"):
                continue
            yield from emissions(path.read_text(encoding="utf-8"), place)


def emissions(source: str, place: str) -> Iterator[Emission | Computed]:
    """The emissions in one module. ``place``: its path from the root of the repository."""
    emitters = {
        name
        for folder, names in EMITTERS.items()
        if place.startswith(f"{folder}/")
        for name in names
    }
    yield from _below(ast.parse(source), (), emitters, place)


def _below(
    node: ast.AST, functions: tuple[ast.AST, ...], emitters: set[str], place: str
) -> Iterator[Emission | Computed]:
    """``functions``: those around ``node``, the innermost last."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        functions = (*functions, node)
    elif isinstance(node, ast.Call):
        yield from _called(node, functions, emitters, place)
    elif isinstance(node, ast.Dict):
        yield from _literal(node, place)
    for child in ast.iter_child_nodes(node):
        yield from _below(child, functions, emitters, place)


def _called(
    call: ast.Call, functions: tuple[ast.AST, ...], emitters: set[str], place: str
) -> Iterator[Emission | Computed]:
    called = ast.unparse(call.func)
    last = called.rpartition(".")[2]
    if not call.args:
        return
    name, rest = call.args[0], call.args[1:]
    if called.endswith("_events.append") and "_events.append" in emitters:
        assert isinstance(name, ast.Tuple)
        name, *rest = name.elts
    elif last not in emitters or (last == "write" and not called.endswith("log.write")):
        return
    elif last == "add" and len(call.args) != 2:
        return  # of a set
    where = f"{place}:{call.lineno}"
    names = _names(name)
    if names is None:
        source = ast.unparse(name)
        passed = isinstance(name, ast.Call | ast.Dict) and last == "_on_event"
        names = list(PASSED_ON.get(source, ()))
        if not (passed or source in PASSED_ON or _is_parameter(source, functions, emitters)):
            yield Computed(where, ast.unparse(call))
    fields = {word.arg for word in call.keywords if word.arg is not None}
    for each in rest:
        fields |= _keys(each, functions)
    if (last == "tell" and place.startswith("dht/")) or last == "_tell_not_saved":
        fields.add("text")
    for literal in names:
        yield Emission(where, literal, frozenset(fields), called)


def _literal(record: ast.Dict, place: str) -> Iterator[Emission]:
    """A record such as ``{"event": "done", ...}``."""
    for key, value in zip(record.keys, record.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == "event":
            for name in _names(value) or ():
                fields = _keys(record, ()) - {"event"}
                yield Emission(f"{place}:{record.lineno}", name, frozenset(fields))


def _names(node: ast.AST) -> list[str] | None:
    """The literal names, one or either of two."""
    if isinstance(node, ast.IfExp):
        either = [_names(node.body), _names(node.orelse)]
        return None if None in either else [name for names in either for name in names or ()]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return ["log"] if isinstance(node, ast.Name) and node.id == "OPENED" else None


def _keys(node: ast.AST, functions: tuple[ast.AST, ...]) -> set[str]:
    """Keys of a dictionary, given in the call or assigned to a name in the same function."""
    if isinstance(node, ast.Name) and functions:
        for each in ast.walk(functions[-1]):
            targets = each.targets if isinstance(each, ast.Assign) else []
            if isinstance(each, ast.AnnAssign):
                targets = [each.target]
            if any(isinstance(t, ast.Name) and t.id == node.id for t in targets):
                assert isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None
                return _keys(each.value, ())
    if not isinstance(node, ast.Dict):
        return set()
    return {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}


def _is_parameter(source: str, functions: tuple[ast.AST, ...], emitters: set[str]) -> bool:
    for function in functions:
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        named = isinstance(function, ast.Lambda) or function.name in emitters
        taken = [*function.args.posonlyargs, *function.args.args]
        if named and any(argument.arg == source for argument in taken):
            return True
    return False
