"""The settings of a run: the sections of the run file, and ``RunFile``, which holds them all.

A setting is declared once, here or in ``merging``, with its type, default, limits and description.
The defaults of a schema are frozen, because a setting that is left out is part of the run's id: a
changed default needs a new ``SCHEMA``. Descriptions are not part of the id.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct
from multiaddr import Multiaddr

from dht import addresses
from dht.identity import RunId
from peer.run_file.declaring import (
    LATER,
    PRINTABLE,
    Section,
    fields_of,
    is_later,
    printable,
    text,
)
from peer.run_file.forms import ExampleForm, form_of
from peer.run_file.merging import Mixing, Outer, Rounds

SCHEMA = 1
"""The only value of ``schema`` that this version reads."""

SEEDS_MAX = 32

_MODULE = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z"
_HEX_64 = r"^[0-9a-f]{64}\Z"
HUB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z"
HUB_COMMIT = r"^[0-9a-f]{40}\Z"
_HUB_TOKENIZER = HUB_NAME.replace(r"\Z", r"(@[0-9a-f]{40})?\Z")
OWNED_HUB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*\Z"
"""Without an owner, ``datasets`` takes some names for readers of local files: 'text' is one."""
_HTTPS = r"https://[A-Za-z0-9.-]+\.[A-Za-z0-9-]+(:[0-9]{1,5})?(/[!-~]*)?"
_HTTPS_OR_NOTHING = rf"^({_HTTPS})?\Z"
_HTTPS_OR_MAIL_OR_NOTHING = (
    rf"^({_HTTPS}|[A-Za-z0-9._%+-]{{1,64}}@[A-Za-z0-9.-]+\.[A-Za-z0-9-]+)?\Z"
)
_PEER_ID = r"^[1-9A-HJ-NP-Za-km-z]{40,64}\Z"


_AN_ADDRESS = "an https address such as 'https://example.org/run', at most 200 characters"


# --- the model ------------------------------------------------------------------------


class _Model(Section, frozen=True, kw_only=True):
    layout_hash: Annotated[
        Annotated[str, text(_HEX_64, "64 hex digits", 64)] | None,
        "Digest of the names, shapes and fragments of the trained parameters, as `shoal run "
        "check` prints it. When set, a peer whose model differs is refused before it joins.",
    ] = None


class GptModel(_Model, frozen=True, kw_only=True, tag_field="recipe", tag="gpt"):
    """The built-in decoder: RMSNorm, rotary positions, causal attention."""

    layers: Annotated[int, Meta(ge=1, le=512), "Number of transformer blocks."] = 4
    width: Annotated[int, Meta(ge=8, le=65536), "Size of the residual stream."] = 128
    heads: Annotated[
        int, Meta(ge=1, le=1024), "Attention heads; twice their number divides the width."
    ] = 4
    context: Annotated[int, Meta(ge=2, le=1 << 20), "Maximum number of tokens in a sequence."] = 128
    vocabulary: Annotated[
        int, Meta(ge=2, le=1 << 20), "Number of distinct tokens; 256 for bytes."
    ] = 256
    mlp: Annotated[Literal["swiglu", "gelu"], "Type of the feed-forward layer in a block."] = (
        "swiglu"
    )
    mlp_width: Annotated[
        Annotated[int, Meta(ge=8, le=1 << 18)] | None,
        "Hidden size of the feed-forward layer; unset: 4 x width for gelu, 8/3 x width rounded "
        "up to a multiple of 32 for swiglu.",
    ] = None
    tied_head: Annotated[bool, "Whether the output head shares the weights of the embedding."] = (
        True
    )
    rotary_base: Annotated[
        float,
        Meta(ge=1.0, le=1e9),
        "Base of the wavelengths of the rotary position embedding.",
    ] = 10000.0
    kv_heads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        LATER,
        "Heads of keys and values (grouped-query attention), a divisor of `heads`; unset: as "
        "many as `heads`.",
    ] = None
    qk_norm: Annotated[
        bool, LATER, "Whether each head normalises its queries and keys (RMSNorm)."
    ] = False
    logit_soft_cap: Annotated[
        Annotated[float, Meta(gt=0.0)] | Literal["off"],
        LATER,
        "Upper bound c on the logits, which become c tanh(logit / c). Or 'off'.",
    ] = "off"


class Lora(Section, frozen=True, kw_only=True):
    """Low-rank adapters (arXiv 2106.09685) of linear layers; the base is frozen."""

    rank: Annotated[int, Meta(ge=1, le=1024), "Rank of the two matrices of an adapter."] = 16
    alpha: Annotated[
        float,
        Meta(gt=0.0, le=65536.0),
        "Scale of the adapters: their product is multiplied by alpha / rank.",
    ] = 32.0
    targets: Annotated[
        list[
            Annotated[
                str,
                text(_MODULE, "the name of a layer such as 'q_proj'", 128),
            ]
        ],
        Meta(min_length=1, max_length=64),
        "Linear layers that get adapters, by the ends of their names, such as 'q_proj' or "
        "'mlp.up_proj'.",
    ]
    base_dtype: Annotated[
        Literal["bf16", "fp32", "int8", "nf4"],
        "Type in which peers hold the frozen base: 2, 4, 1 or half a byte for a parameter. "
        "'int8' and 'nf4' need the package bitsandbytes at every peer.",
    ] = "bf16"


class HfModel(_Model, frozen=True, kw_only=True, tag_field="recipe", tag="hf"):
    """A causal language model of the transformers package, built from its configuration."""

    config: Annotated[
        dict[str, Any],
        "Keys of the transformers configuration; model_type is required. Remote code is never "
        "executed.",
    ]
    config_unset: Annotated[
        Annotated[list[Annotated[str, printable(64)]], Meta(max_length=64)] | None,
        LATER,
        "Keys of the configuration that are null, for which TOML has no value.",
    ] = None
    base: Annotated[
        Annotated[str, printable(1024)] | None,
        LATER,
        "Published model that the run begins from: 'owner/name@' and a commit on the hub, or a "
        "folder in the data folder. Unset: weights are drawn.",
    ] = None
    base_files: Annotated[
        Annotated[list[Annotated[str, printable(256)]], Meta(min_length=1, max_length=64)] | None,
        LATER,
        "Its .safetensors files, each with '#sha256=...', which every peer verifies; `shoal run "
        "new --base` writes them.",
    ] = None
    lora: Annotated[
        Lora | None, LATER, "Adapters that are trained and exchanged instead of the whole model."
    ] = None


class CustomModel(_Model, frozen=True, kw_only=True, tag_field="recipe", tag="custom"):
    """The program passes its own model to peer.join."""


Model: TypeAlias = GptModel | HfModel | CustomModel


# --- the data --------------------------------------------------------------------------------


class _Data(Section, frozen=True, kw_only=True):
    sequence_length: Annotated[
        int, Meta(ge=1, le=1 << 20), "Number of tokens predicted per sequence."
    ] = 128
    held_out: Annotated[
        float,
        Meta(gt=0.0, le=0.5),
        "Share of the data that no peer trains on; the held-out loss is measured on it.",
    ] = 0.05


class PythonStdlibData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="python_stdlib"):
    """Source files of the Python standard library, as bytes; needs no download."""


class TextData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="text"):
    """Local text files, as bytes. Every peer has a copy in the folder given with --data."""

    files: Annotated[
        list[Annotated[str, printable(256)]],
        Meta(min_length=1, max_length=64),
        "Glob patterns relative to the data folder, such as 'corpus/**/*.txt'.",
    ]


class _FormedData(_Data, frozen=True, kw_only=True):
    form: Annotated[
        Literal["text", "chat", "completion"],
        LATER,
        "'text': every token is predicted. 'chat' and 'completion': examples, of which only the "
        "answers are; a sequence holds whole examples.",
    ] = "text"
    columns: Annotated[
        Annotated[list[Annotated[str, printable(64)]], Meta(min_length=1, max_length=2)] | None,
        LATER,
        "Columns of an example: of a chat one with messages of role and content, unset: "
        "'messages'; of a completion two, unset: 'prompt' and 'completion'.",
    ] = None
    template: Annotated[
        Annotated[dict[str, str], Meta(max_length=8)] | None,
        LATER,
        "Text of each role (user, assistant; prompt, answer) with {content} for what it says; "
        "unset: 'User: ...' and 'Assistant: ...', or prompt and answer alone.",
    ] = None

    @property
    def examples(self) -> ExampleForm | None:
        """The form of the examples; ``None`` for text."""
        return None if self.form == "text" else form_of(self.form, self.columns, self.template)


class HfData(_FormedData, frozen=True, kw_only=True, tag_field="recipe", tag="hf"):
    """A dataset of the Hugging Face hub, of which the parts that are read are downloaded."""

    dataset: Annotated[
        str,
        text(OWNED_HUB_NAME, "a name such as 'owner/name'", 128),
        "Name of the dataset on the hub.",
    ]
    subset: Annotated[
        Annotated[str, printable(128)] | None, "Configuration of the dataset, if it has several."
    ] = None
    split: Annotated[str, printable(64), "Split of the dataset."] = "train"
    revision: Annotated[
        Annotated[str, printable(128)] | None,
        "Commit of the dataset, 40 hex digits, so that every peer reads the same data. A "
        "dataset without it is refused.",
    ] = None
    text_field: Annotated[str, printable(64), "Column that holds the text."] = "text"
    tokenizer: Annotated[
        str,
        text(
            _HUB_TOKENIZER,
            "'bytes' or a name with a commit, such as 'owner/name@' and 40 hex digits",
            128,
        ),
        "'bytes', or the name of a tokenizer on the hub with its commit: 'owner/name@...'.",
    ] = "bytes"


class FileSource(Section, frozen=True, kw_only=True):
    """Files that are read with one weight."""

    files: Annotated[
        list[Annotated[str, printable(1024)]],
        Meta(min_length=1, max_length=64),
        "Files (.txt, .jsonl, .parquet, and token shards .bin and .npy), folders or glob "
        "patterns in the data folder, or https URLs. A name ends in '#sha256=...' to fix the "
        "content, which a URL must. A file .sha256, as sha256sum prints it, is a list of files "
        "beside it.",
    ]
    weight: Annotated[
        float, Meta(gt=0.0, le=1e6), "Share of the sequences, relative to other sources."
    ] = 1.0
    text_field: Annotated[
        str, printable(64), "Field of .jsonl, column of .parquet that holds the text."
    ] = "text"
    dtype: Annotated[
        Literal["uint16", "uint32"], "Type of the tokens in .bin files, little-endian."
    ] = "uint16"


class FilesData(_FormedData, frozen=True, kw_only=True, tag_field="recipe", tag="files"):
    """Files of text or tokens, in the folder given with --data or downloaded over https."""

    tokenizer: Annotated[
        str,
        printable(1024),
        "'bytes', the name of a tokenizer on the hub with its commit ('owner/name@...'), or a "
        "tokenizer.json in the data folder or at an https URL, with '#sha256=...'. Token shards "
        "need none.",
    ] = "bytes"
    end_token: Annotated[
        Annotated[str, printable(64)] | None,
        "Token that ends a document, such as '<|endoftext|>'. A tokenizer.json needs it; a "
        "tokenizer of the hub has its own.",
    ] = None
    sources: Annotated[
        list[FileSource],
        Meta(min_length=1, max_length=32),
        "Where the data comes from. Each source is a table [[data.sources]].",
    ]


class CustomData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="custom"):
    """The program passes its own dataset to run.data."""


Data: TypeAlias = PythonStdlibData | TextData | HfData | FilesData | CustomData


# --- local training --------------------------------------------------------------------


class _Inner(Section, frozen=True, kw_only=True):
    learning_rate: Annotated[
        float, Meta(gt=0.0, le=100.0), "Peak learning rate; [schedule] scales it."
    ] = 1e-3
    batch_size: Annotated[
        int,
        Meta(ge=1, le=1 << 20),
        "Sequences per optimizer step of one peer, together some thousand tokens: a swarm loses "
        "more by noisy steps than data parallel does.",
    ] = 32
    clip_norm: Annotated[
        Annotated[float, Meta(gt=0.0)] | Literal["off"],
        "Maximum norm of the gradient; a longer one is scaled down to it. Or 'off'.",
    ] = 1.0


class AdamwInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="adamw"):
    """Adam with decoupled weight decay (matrices only)."""

    beta1: Annotated[float, Meta(ge=0.0, lt=1.0), "Decay rate of the first moment."] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0), "Decay rate of the second moment."] = 0.95
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0), "Added to the denominator."] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0.0, le=10.0), "Weight decay of matrices."] = 0.1


class SgdInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="sgd"):
    """Stochastic gradient descent with momentum."""

    momentum: Annotated[float, Meta(ge=0.0, lt=1.0), "Momentum; 0 for none."] = 0.9
    nesterov: Annotated[bool, "Use Nesterov momentum."] = False
    weight_decay: Annotated[float, Meta(ge=0.0, le=10.0), "Weight decay of matrices."] = 0.0


class MuonInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="muon"):
    """Orthogonal updates for the matrices of blocks; AdamW for embeddings, head and vectors."""

    momentum: Annotated[
        float, Meta(ge=0.0, lt=1.0), "Nesterov momentum of the matrices of blocks."
    ] = 0.95
    weight_decay: Annotated[float, Meta(ge=0.0, le=10.0), "Weight decay of matrices."] = 0.1
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0), "Decay rate of AdamW's first moment."] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0), "Decay rate of AdamW's second moment."] = 0.95
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0), "Added to AdamW's denominator."] = 1e-8


class CustomInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="custom"):
    """The program brings its own optimizer; run.schedule sets its learning rate."""


Inner: TypeAlias = AdamwInner | SgdInner | MuonInner | CustomInner


class Schedule(Section, frozen=True, kw_only=True):
    """Learning rate as a function of the tokens that all peers together have trained on."""

    shape: Annotated[
        Literal["cosine", "linear", "constant"], "Shape of the decay from the peak to the end."
    ] = "cosine"
    warmup_tokens: Annotated[
        int, Meta(ge=0, le=1 << 60), "Global tokens until the rate has risen to its peak."
    ] = 1_000_000
    decay_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 60)] | None,
        "Global tokens at which the decay ends; unset: end.tokens.",
    ] = None
    final_fraction: Annotated[
        float, Meta(ge=0.0, le=1.0), "Rate at the end, as a share of the peak."
    ] = 0.1


# --- membership, measurements and the end ----------------------------------------------------


class Membership(Section, frozen=True, kw_only=True):
    """How peers detect that others are alive."""

    heartbeat_s: Annotated[float, Meta(ge=0.5, le=600.0), "Seconds between two heartbeats."] = 10.0
    expiry_s: Annotated[
        float, Meta(ge=1.0, le=3600.0), "Seconds of silence after which a peer counts as gone."
    ] = 30.0


class RunLimits(Section, frozen=True, kw_only=True):
    """Limits on the contribution of one peer."""

    step_tokens_max: Annotated[
        int,
        Meta(ge=1, le=1 << 40),
        "Maximum number of tokens that one optimizer step of one peer counts in a merge.",
    ] = 1 << 18


class Evaluation(Section, frozen=True, kw_only=True):
    """Held-out loss, which one peer at a time measures and publishes."""

    sequences: Annotated[int, Meta(ge=1, le=1 << 20), "Held-out sequences per measurement."] = 128
    every_versions: Annotated[
        int, Meta(ge=1, le=1 << 20), "Merges of a fragment between two measurements."
    ] = 1
    rise_max: Annotated[
        Annotated[float, Meta(gt=0.0, le=1e6)] | Literal["off"],
        LATER,
        "Largest rise of a peer's held-out loss, as a share of it, by states that the peer has "
        "not merged step by step; beyond it the peer goes back to its own. Or 'off'.",
    ] = 0.25


class End(Section, frozen=True, kw_only=True):
    """When the run ends."""

    date: Annotated[
        Annotated[datetime, Meta(tz=True)] | None,
        "Latest end of the run, such as 2027-03-31T12:00:00Z.",
    ] = None
    tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 60)] | Literal["unlimited"],
        "Global tokens to train on, or 'unlimited'.",
    ] = 100_000_000

    def __post_init__(self) -> None:
        if self.date is not None:  # the run id must not depend on the time zone
            moment = self.date.astimezone(UTC).replace(microsecond=0)
            msgspec.structs.force_setattr(self, "date", moment)


AUDITS_OF_STRANGERS, AUDITS_OF_ACQUAINTANCES = 0.1, 0.01
"""Chance of an audit where the run file says none. On the lines of homes a tenth is a third of all
bytes beside the payload."""


class Policy(Section, frozen=True, kw_only=True):
    """Which peers may take part."""

    admission: Annotated[
        Literal["open", "invited", "listed"],
        "'open': every peer; 'invited': peers with an invite of the owner (`shoal invite`); "
        "'listed': only those in `peers`.",
    ] = "open"
    peers: Annotated[
        list[Annotated[str, text(_PEER_ID, "a peer id", 64)]],
        Meta(max_length=128),
        "Peer ids, for admission = 'listed'.",
    ] = msgspec.field(default_factory=list)
    owner: Annotated[
        Annotated[str, text(_PEER_ID, "a peer id", 64)] | None,
        "Public key of the owner, who may invite and ban peers, in the form of a peer id. "
        "`shoal run sign` writes it; unset: the run has no owner.",
    ] = None
    probation_rounds: Annotated[
        int,
        Meta(ge=0, le=100_000),
        LATER,
        "Merges that a newcomer to an open run contributes to, over `probation_minutes`, before "
        "it leads, reduces and votes; half as many as the live peer with the most are always "
        "enough. 0: newcomers count at once.",
    ] = 64
    probation_minutes: Annotated[
        float,
        Meta(ge=0.0, le=1e5),
        LATER,
        "Minutes over which a newcomer contributes to them: see `probation_rounds`.",
    ] = 10.0
    audit_rate: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        LATER,
        "Chance that a piece of a merged slice is merged again by another member, to find peers "
        "that merge falsely: 0.1 finds one after ten lies on average, and costs 5% of a round's "
        "bytes. 0: no audits; unset: 0.1 in open runs, 0.01 in others, whose peers know whom they "
        "let in.",
    ] = None
    spot_checks: Annotated[
        float,
        Meta(ge=0.0, le=24.0),
        LATER,
        "Contributions of others that each learner checks in a cycle, to find members that "
        "poison: whether one lowers the loss on the data that its author must have used. One in "
        "a cycle costs two forward passes of a batch and the bytes of one upload; as a reducer, "
        "a learner refuses peers that fail repeatedly. All learners must read the run's recipe, "
        "from the same data. 0: no checks.",
    ] = 0.0

    @property
    def audits(self) -> float:
        """Chance that a piece of a merged slice is audited."""
        if self.audit_rate is None:
            return AUDITS_OF_STRANGERS if self.admission == "open" else AUDITS_OF_ACQUAINTANCES
        return self.audit_rate


class RunFile(Section, frozen=True, kw_only=True):
    """All settings of a run.

    Two run files that differ in nothing but ``seeds`` have the same ``run_id``.
    """

    schema: Annotated[int, Meta(ge=1), "Version of this format. Its defaults never change."] = (
        SCHEMA
    )
    name: Annotated[
        str,
        text(
            "^[a-z0-9][a-z0-9._-]*\\Z",
            "lower-case letters, digits, '-', '_' and '.', at most 64",
            64,
        ),
        "Name of the run, for display.",
    ] = "my-run"
    description: Annotated[
        str, text(PRINTABLE, "at most 1000 printable characters", 1000), "Purpose of the run."
    ] = ""
    licence: Annotated[
        str, text(PRINTABLE, "at most 100 printable characters", 100), "Licence of the weights."
    ] = ""
    homepage: Annotated[
        str,
        text(_HTTPS_OR_NOTHING, _AN_ADDRESS, 200),
        LATER,
        "Address of a page about the run, shown before joining.",
    ] = ""
    contact: Annotated[
        str,
        text(_HTTPS_OR_MAIL_OR_NOTHING, f"{_AN_ADDRESS}, or a mail address", 200),
        LATER,
        "Where its author can be reached, shown before joining.",
    ] = ""
    discussion: Annotated[
        str,
        text(_HTTPS_OR_NOTHING, _AN_ADDRESS, 200),
        LATER,
        "Address of the place where its peers talk, shown before joining.",
    ] = ""
    random_seed: Annotated[
        int,
        Meta(ge=0, le=(1 << 63) - 1),
        "Seed of the first weights: every founder draws the same ones.",
    ] = 0
    seeds: Annotated[
        list[str],
        Meta(max_length=SEEDS_MAX),
        "Addresses of bootstrap or other peers through which the run is found, such as "
        "'/dns4/seed.example.org/tcp/7700/p2p/12D3Koo...'. Not part of the run's id.",
    ] = msgspec.field(default_factory=list)
    model: Model = GptModel()
    data: Data = PythonStdlibData()
    inner: Inner = AdamwInner()
    schedule: Schedule = Schedule()
    outer: Outer = Outer()
    rounds: Rounds = Rounds()
    mixing: Mixing = Mixing()
    membership: Membership = Membership()
    limits: RunLimits = RunLimits()
    evaluation: Evaluation = Evaluation()
    policy: Policy = Policy()
    end: End = End()

    def canonical(self) -> bytes:
        """Every setting except ``seeds`` as sorted compact JSON, which is hashed and served.

        Settings that are younger than their schema are left out at their default.
        """
        plain = msgspec.to_builtins(self)
        del plain["seeds"]
        _leave_out_younger(self, plain)
        for section in fields_of(type(self)):
            table = getattr(self, section.name)
            if isinstance(table, Struct):
                _leave_out_younger(table, plain[section.name])
        return json.dumps(
            plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()

    @property
    def run_id(self) -> RunId:
        """The blake3 digest of the canonical form, in hex."""
        return RunId(blake3(self.canonical()).hexdigest())

    @property
    def seed_addresses(self) -> tuple[Multiaddr, ...]:
        return tuple(addresses.parse_seed(seed) for seed in self.seeds)

    @property
    def synchronous(self) -> bool:
        """``True`` if training waits for every merge (``outer.overlap_steps`` is 0)."""
        return self.outer.overlap_steps == 0

    @property
    def decay_tokens(self) -> int | None:
        """Global tokens at which the decay of the learning rate ends; ``None``: it never decays."""
        if self.schedule.shape == "constant":
            return None
        if self.schedule.decay_tokens is not None:
            return self.schedule.decay_tokens
        assert isinstance(self.end.tokens, int)  # a run file without either is refused
        return self.end.tokens


def _leave_out_younger(table: Struct, plain: dict[str, Any]) -> None:
    for field in fields_of(type(table)):
        if is_later(field.type) and getattr(table, field.name) == default_of(field):
            del plain[field.name]


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """The default of a setting; ``NODEFAULT`` if it has none."""
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def vocabulary(model: Model) -> int | None:
    """Number of distinct tokens of a model; ``None`` if its settings do not say it."""
    if isinstance(model, GptModel):
        return model.vocabulary
    size = model.config.get("vocab_size") if isinstance(model, HfModel) else None
    return size if isinstance(size, int) and size > 0 else None
