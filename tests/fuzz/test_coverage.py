"""Every place in the packages that decodes bytes is fuzzed, or its bytes come from no stranger."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec

from averaging.numbers.codecs import codec_names
from dht.libp2p.directory_wire import RULES
from dht.libp2p.lane import wire as lane_wire
from dht.membership import hello
from tests.fuzz.targets import LANE, TARGETS

ROOT = Path(__file__).parents[2]
PACKAGES = ("dht", "averaging", "peer")
DECODERS = {
    "Decoder", "FromString", "ParseFromString", "MergeFromString", "unpack", "unpack_from",
    "loads", "safe_load", "frombuffer", "safe_open", "literal_eval", "Parse", "decompressobj",
}  # fmt: skip
"""Names of functions that decode bytes or text, as attributes of anything."""

FUZZED: dict[str, tuple[str, ...]] = {
    "dht/addresses.py": ("address", "seed"),
    "dht/records.py": ("record", "signed_record", "claimed_run"),
    "dht/membership/credentials.py": (
        "credential",
        "directive",
        "invite_text",
        "delegation_text",
    ),
    "dht/membership/hello.py": ("hello", "hello_reply", "dial_back", "dial_back_reply", "papers"),
    "dht/libp2p/framing/frame_stream.py": ("frames",),
    "dht/libp2p/framing/packing.py": ("packed",),
    "dht/libp2p/hivemind_patches.py": ("directory_value", "directory_store", "directory_found"),
    "dht/libp2p/directory_wire.py": ("directory_packed", "directory_subkey"),
    "dht/libp2p/lane/nat_pmp.py": ("port_mapping",),
    "dht/libp2p/lane/wire.py": tuple(f"lane_{type(each).__name__.lower()}" for each in LANE),
    "averaging/messages.py": ("message", "commit", "opening", "signatures"),
    "averaging/history/replay.py": ("replay_head",),
    "averaging/history/manifest.py": ("manifest",),
    "averaging/history/parent_maps.py": ("merged_maps",),
    "averaging/history/claims.py": ("statement", "claims"),
    "averaging/guard/rules/proofs.py": ("proof",),
    "averaging/history/readings.py": ("reading",),
    "averaging/guard/auditing.py": ("audit_request", "shown_upload"),
    "averaging/live/states/fetch_server.py": ("fetch_request",),
    "averaging/numbers/codec.py": tuple(f"payload_{name}" for name in codec_names()),
    "averaging/numbers/norm_bounds.py": ("payload_int4", "payload_int8"),
    "averaging/numbers/block_codecs.py": tuple(f"payload_{name}" for name in codec_names()),
    "peer/calls.py": (
        *("status", "description", "kinds", "attestable", "run_page"),
        *("question", "credit_summary"),
    ),
    "peer/extras/credit/accounting/wire.py": ("credit_summary", "credit_part"),
    "peer/description.py": ("description", "kinds"),
    "peer/extras/site/run_page/content.py": ("run_page",),
    "peer/status.py": ("status",),
    "peer/attestable.py": ("attestable",),
    "peer/extras/run_lists/listed.py": ("run_list",),
    "peer/run_file/reading.py": ("run_file", "run_file_text"),
}
"""Targets of the modules that decode what strangers send."""

OWN_MEMORY = "views of arrays of this process"
OWN_FILES = "files that this peer has written"
OWN_PROCESS = "from a process that this one has started, or that has started this one"
OWN_DAEMON = "from the libp2p daemon, which strangers reach through FrameStream only"
NOT_FROM_STRANGERS: dict[str, str] = {
    "dht/membership/peer_cache.py": OWN_FILES,
    "dht/presence/door.py": OWN_FILES,
    "dht/whole_files.py": OWN_FILES,
    "dht/libp2p/lane/pacing.py": "from the kernel",
    "dht/libp2p/hivemind_host.py": OWN_DAEMON,
    "dht/libp2p/hivemind_daemon.py": OWN_DAEMON,
    "averaging/live/streams/buffers.py": OWN_MEMORY,
    "averaging/live/states/state_files.py": OWN_MEMORY,
    "averaging/numbers/arrays.py": OWN_MEMORY,
    "peer/bridge/messages.py": OWN_PROCESS,
    "peer/bridge/shared_memory.py": OWN_PROCESS,
    "peer/extras/orders/owning.py": "the owner's own run file",
    "peer/extras/orders/signing.py": "the owner's own run file",
    "peer/extras/bases/base_models.py": "weights with a hash in the run file",
    "peer/data/text/formats.py": "downloaded data with a hash in the run file",
    "peer/data/hub.py": "the card of a dataset, which the author of a run file chose",
    "peer/data/batches/sequences.py": OWN_MEMORY,
    "peer/extras/bases/published.py": "a published model, which the author of a run file chose",
    "peer/data/text/token_cache.py": OWN_FILES,
    "peer/data/text/tokenizer_json.py": "a tokenizer, which the author of a run file chose",
    "peer/data/text/tokenizing.py": "the text of a document, which any bytes are",
    "peer/data/text/workers.py": OWN_PROCESS,
    "peer/extras/doctor/this_machine.py": OWN_PROCESS,
    "peer/island/channel.py": OWN_PROCESS,
    "peer/island/follower.py": OWN_PROCESS,
    "peer/extras/export/gguf.py": "an export that this program has written",
    "peer/extras/export/tokenizer.py": "files that this module or transformers has written",
    "peer/model/recipes/counting.py": OWN_PROCESS,
    "peer/extras/use/adapted.py": "an adapter that this peer's user names",
    "peer/extras/use/tasks.py": "an export that this program has written",
    "peer/model/weights.py": "weights that this peer's user names",
    "peer/demo/processes.py": OWN_PROCESS,
    "peer/extras/site/publishing/__main__.py": OWN_PROCESS,
    "peer/extras/site/publishing/publisher.py": OWN_PROCESS,
    "peer/rules/limits.py": OWN_FILES,
    "peer/run_file/setting_rules.py": "text that was read as TOML before",
    "peer/extras/site/run_page/record.py": OWN_FILES,
    "peer/simulate/settings.py": "an experiment that this peer's user names",
    "peer/storage/checkpoint.py": OWN_FILES,
    "peer/extras/hosting/group.py": OWN_PROCESS,
    "peer/storage/outer_state.py": OWN_MEMORY,
    "peer/storage/progress.py": OWN_FILES,
    "peer/storage/proofs.py": OWN_FILES,
    "peer/storage/tensor_file.py": OWN_FILES,
    "peer/trainer/computing/fitting.py": OWN_FILES,
    "peer/trainer/session.py": OWN_FILES,
    "peer/views/event_log.py": OWN_FILES,
}
"""Modules that decode other bytes, and where these come from."""


def decoding_modules() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if decodes(path.read_text(encoding="utf-8")):
                yield name


def decodes(source: str) -> bool:
    return "from peer.calls import Call" in source or any(
        is_decoder(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
    )


def is_decoder(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in DECODERS
    if not isinstance(called, ast.Attribute):
        return False
    if called.attr == "decode":  # that of msgspec; bytes have one, too
        return ast.unparse(called.value).startswith("msgspec.")
    return called.attr in DECODERS


def test_every_module_that_decodes_bytes_is_fuzzed_or_decodes_no_strangers() -> None:
    found = set(decoding_modules())
    assert found - FUZZED.keys() - NOT_FROM_STRANGERS.keys() == set(), "add it to a table above"
    assert FUZZED.keys() & NOT_FROM_STRANGERS.keys() == set()
    assert (FUZZED.keys() | NOT_FROM_STRANGERS.keys()) - found == set(), "gone from the code"


def test_every_decoder_that_is_named_is_fuzzed() -> None:
    assert {name for names in FUZZED.values() for name in names} - TARGETS.keys() == set()


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
    assert decodes("import msgspec\nmsgspec.msgpack.decode(data, type=int)")
    assert decodes("import json\njson.loads(data)")
    assert decodes("from struct import unpack\nunpack('<Q', data)")
    assert not decodes("data.decode('utf-8')\npack('<Q', 1)")
