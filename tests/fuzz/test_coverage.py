"""Every place in the packages that decodes bytes is fuzzed, or its bytes come from no stranger."""

from __future__ import annotations

import ast
import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import get_args

import msgspec

from dht.libp2p.directory_wire import RULES
from dht.libp2p.lane import wire as lane_wire
from dht.membership import hello
from dht.membership.credentials import read_credential, read_directive
from tests.fuzz.targets import LANE, TARGETS

ROOT = Path(__file__).parents[2]
PACKAGES = ("dht", "averaging", "peer")
DECODERS = {
    "Decoder", "FromString", "ParseFromString", "MergeFromString", "unpack", "unpack_from",
    "loads", "safe_load", "frombuffer", "safe_open", "literal_eval", "Parse", "decompressobj",
}  # fmt: skip
"""Names of functions that decode bytes or text, as attributes of anything."""

OWN_MEMORY = "views of arrays of this process"
OWN_FILES = "files that this peer has written"
OWN_PROCESS = "from a process that this one has started, or that has started this one"
OWN_DAEMON = "from the libp2p daemon, which strangers reach through FrameStream only"
NOT_FROM_STRANGERS: dict[str, str] = {
    "dht/presence/seeking.py": OWN_FILES,
    "dht/presence/door.py": OWN_FILES,
    "dht/whole_files.py": OWN_FILES,
    "dht/libp2p/lane/pacing.py": "from the kernel",
    "dht/libp2p/hivemind_host.py": OWN_DAEMON,
    "dht/libp2p/hivemind_calls.py": OWN_DAEMON,
    "dht/libp2p/hivemind_daemon.py": OWN_DAEMON,
    "averaging/live/streams/buffers.py": OWN_MEMORY,
    "averaging/live/states/state_files.py": OWN_MEMORY,
    "averaging/numbers/arrays.py": OWN_MEMORY,
    "peer/bridge/messages.py": OWN_PROCESS,
    "peer/bridge/shared_memory.py": OWN_PROCESS,
    "peer/extras/orders/owning.py": "the owner's own run file",
    "peer/extras/orders/directives.py": "the owner's own run file",
    "peer/extras/bases/base_models.py": "weights with a hash in the run file",
    "peer/data/text/formats.py": "downloaded data with a hash in the run file",
    "peer/data/hub.py": "the card of a dataset, which the author of a run file chose",
    "peer/data/batches/sequences.py": OWN_MEMORY,
    "peer/data/text/token_cache.py": OWN_FILES,
    "peer/data/text/tokenizer_json.py": "a tokenizer, which the author of a run file chose",
    "peer/data/text/tokenizing.py": "the text of a document, which any bytes are",
    "peer/data/text/workers.py": OWN_PROCESS,
    "peer/extras/doctor/this_machine.py": OWN_PROCESS,
    "peer/extras/export/tokenizer.py": "files that this module or transformers has written",
    "peer/model/recipes/counting.py": OWN_PROCESS,
    "peer/model/weights.py": "weights that this peer's user names",
    "peer/demo/processes.py": OWN_PROCESS,
    "peer/extras/site/exporting.py": OWN_PROCESS,
    "peer/extras/site/keeping.py": OWN_PROCESS,
    "peer/guest/enforcement.py": OWN_FILES,
    "peer/run_file/reading.py:parse_whole": "a run file that this peer's user names",
    "peer/run_file/reading.py:with_settings": "the canonical form of a run file that was read",
    "peer/run_file/declaring.py": "text that was read as TOML before",
    "peer/extras/site/keepers_page.py": OWN_FILES,
    "peer/simulate/settings.py": "an experiment that this peer's user names",
    "peer/storage/checkpoint.py": OWN_FILES,
    "peer/extras/hosting/group.py": OWN_PROCESS,
    "peer/storage/outer_state.py": OWN_MEMORY,
    "peer/storage/progress.py": OWN_FILES,
    "peer/storage/proofs.py": OWN_FILES,
    "peer/trainer/computing/fitting.py": OWN_FILES,
    "peer/trainer/session.py": OWN_FILES,
    "peer/views/event_log.py": OWN_FILES,
}
"""Modules that decode other bytes, and where these come from."""


@dataclass(frozen=True)
class Place:
    """A function that decodes bytes; ``first_line`` is 0 where a module decodes by a value of its
    own, which any of its functions may use."""

    module: str
    first_line: int
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}" if self.name else self.module


def decoding_places() -> Iterator[Place]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            yield from places_in(path.read_text(encoding="utf-8"), name)


def places_in(source: str, module: str) -> set[Place]:
    found: set[Place] = set()
    if "from peer.calls import Call" in source:
        found.add(Place(module, 0, ""))

    def search(node: ast.AST, inside: Place) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            inside = Place(module, first, node.name)
        if isinstance(node, ast.Call) and is_decoder(node.func):
            found.add(inside)
        for child in ast.iter_child_nodes(node):
            search(child, inside)

    search(ast.parse(source), Place(module, 0, ""))
    return found


@cache
def entered() -> tuple[dict[str, set[int]], set[int]]:
    """What runs while the examples of all targets are read: the first lines of functions, by
    module, and the ids of the decoders and calls whose methods they use."""
    lines: dict[str, set[int]] = defaultdict(set)
    decoders: set[int] = set()
    root = f"{ROOT}/"

    def see(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "c_call":
            decoders.add(id(getattr(argument, "__self__", None)))
        elif event == "call" and code.co_filename.startswith(root):
            lines[code.co_filename.removeprefix(root)].add(code.co_firstlineno)
            decoders.add(id(frame.f_locals.get("self")))

    for remembers in (read_credential, read_directive):
        remembers.cache_clear()  # an earlier test may have read the same

    async def read() -> None:  # frames need a loop
        sys.setprofile(see)
        try:
            for target in TARGETS.values():
                for example in target.examples:
                    target.decode(example)
        finally:
            sys.setprofile(None)

    asyncio.run(read())
    return lines, decoders


def is_fuzzed(place: Place) -> bool:
    lines, decoders = entered()
    if place.first_line:
        return place.first_line in lines[place.module]
    module = sys.modules.get(place.module.removesuffix(".py").replace("/", "."))
    made = vars(module).values() if module is not None else ()
    return bool(lines[place.module]) or any(id(value) in decoders for value in made)


def is_decoder(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in DECODERS
    if not isinstance(called, ast.Attribute):
        return False
    if called.attr == "decode":  # that of msgspec; bytes have one, too
        return ast.unparse(called.value).startswith("msgspec.")
    return called.attr in DECODERS


def test_every_function_that_decodes_bytes_is_fuzzed_or_decodes_no_strangers() -> None:
    places = set(decoding_places())
    known = {each for each in places if {each.module, str(each)} & NOT_FROM_STRANGERS.keys()}
    missed = sorted(str(place) for place in places - known if not is_fuzzed(place))
    assert not missed, "add an example to the targets, or a reason to the table above"
    gone = NOT_FROM_STRANGERS.keys() - {text for each in known for text in (each.module, str(each))}
    assert not gone, "gone from the code"


def test_every_kind_of_message_is_fuzzed() -> None:
    assert {type(example) for example in LANE} == set(get_args(lane_wire.Message))
    read = {
        kind
        for kind in vars(hello).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == hello.__name__
    }
    names = {kind.__name__ for kind in read if not kind.__name__.startswith("_")}
    assert names == {"Passed", "Hello", "HelloReply", "DialBack", "DialBackReply", "Papers"}
    calls = {name.removesuffix("Request").lower() for name in RULES}
    replies = {"store": "stored", "find": "found", "ping": "pinged"}
    for call in calls:
        assert {f"directory_{call}", f"directory_{replies[call]}"} <= TARGETS.keys()


def test_a_planted_decoder_is_found() -> None:
    assert places_in("import msgspec\nmsgspec.msgpack.decode(data, type=int)", "a")
    assert places_in("import json\ndef f():\n    json.loads(data)", "a") == {Place("a", 2, "f")}
    assert places_in("from struct import unpack\nunpack('<Q', data)", "a") == {Place("a", 0, "")}
    assert not places_in("data.decode('utf-8')\npack('<Q', 1)", "a")
    assert not is_fuzzed(Place("dht/addresses.py", 1_000_000, "f"))
