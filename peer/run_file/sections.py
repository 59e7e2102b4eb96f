"""The settings of a run: every section of the run file, and ``RunFile``, which holds them all.

A setting is declared once, here, with its type, its default, its limits and the description that
``peer.run_file.writing`` prints as a comment. The defaults of a schema are frozen, because a
setting that is left out is part of the run's id: a changed default needs a new ``SCHEMA``.
Descriptions are not part of the id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct
from multiaddr import Multiaddr

from dht import addresses
from dht.identity import RunId
from peer.run_file.adapters import Lora
from peer.run_file.forms import Form, form_of

SCHEMA = 1
"""The only value of ``schema`` that this version reads."""

SEEDS_MAX = 32


def _text(pattern: str, rule: str, description: str, *, length_max: int) -> Meta:
    return Meta(
        pattern=pattern, max_length=length_max, description=description, extra={"rule": rule}
    )


# No control characters: these texts are shown on the terminals of other people.
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
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


def _later(description: str) -> Meta:
    """A setting that this schema got when runs existed already.

    At its default it is not in the canonical form, so that those runs keep their ids.
    """
    return Meta(description=description, extra={"later": True})


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file."""


# --- the model ------------------------------------------------------------------------


class _Model(_Section, frozen=True, kw_only=True):
    layout_hash: Annotated[
        Annotated[str, _text(_HEX_64, "64 hex digits", "", length_max=64)] | None,
        Meta(
            description="Digest of the names, shapes and fragments of the trained parameters, as "
            "`shoal run check` prints it. When set, a peer whose model differs is refused before "
            "it joins."
        ),
    ] = None


class GptModel(_Model, frozen=True, kw_only=True, tag_field="recipe", tag="gpt"):
    """The built-in decoder: RMSNorm, rotary positions, causal attention."""

    layers: Annotated[int, Meta(ge=1, le=512, description="Number of transformer blocks.")] = 4
    width: Annotated[int, Meta(ge=8, le=65536, description="Size of the residual stream.")] = 128
    heads: Annotated[
        int,
        Meta(ge=1, le=1024, description="Attention heads; twice their number divides the width."),
    ] = 4
    context: Annotated[
        int, Meta(ge=2, le=1 << 20, description="Maximum number of tokens in a sequence.")
    ] = 128
    vocabulary: Annotated[
        int, Meta(ge=2, le=1 << 20, description="Number of distinct tokens; 256 for bytes.")
    ] = 256
    mlp: Annotated[
        Literal["swiglu", "gelu"], Meta(description="Type of the feed-forward layer in a block.")
    ] = "swiglu"
    mlp_width: Annotated[
        Annotated[int, Meta(ge=8, le=1 << 18)] | None,
        Meta(
            description="Hidden size of the feed-forward layer; unset: 4 x width for gelu, "
            "8/3 x width rounded up to a multiple of 32 for swiglu."
        ),
    ] = None
    tied_head: Annotated[
        bool, Meta(description="Whether the output head shares the weights of the embedding.")
    ] = True
    rotary_base: Annotated[
        float,
        Meta(
            ge=1.0, le=1e9, description="Base of the wavelengths of the rotary position embedding."
        ),
    ] = 10000.0
    kv_heads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        _later(
            "Heads of keys and values (grouped-query attention), a divisor of `heads`; unset: as "
            "many as `heads`."
        ),
    ] = None
    qk_norm: Annotated[
        bool, _later("Whether each head normalises its queries and keys (RMSNorm).")
    ] = False
    logit_soft_cap: Annotated[
        float | Literal["off"],
        _later("Upper bound c on the logits, which become c tanh(logit / c). Or 'off'."),
    ] = "off"
    size: Annotated[
        Literal["124m", "350m", "1b"] | None,
        _later(
            "Named size: gives layers, width, heads, context, vocabulary and qk_norm the values of "
            "a model of about so many parameters, except those that the file sets itself."
        ),
    ] = None
    """``reading`` puts the values in place of the name, so that both spellings have one id."""

    def __post_init__(self) -> None:
        if self.size is not None:
            raise ValueError(f"size is {self.size!r}; use GptModel(**SIZES[{self.size!r}])")


_OF_ALL_SIZES = {"context": 1024, "vocabulary": 50304, "qk_norm": True}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "124m": {"layers": 12, "width": 768, "heads": 12, **_OF_ALL_SIZES},
    "350m": {"layers": 24, "width": 1024, "heads": 16, **_OF_ALL_SIZES},
    "1b": {"layers": 24, "width": 1792, "heads": 14, **_OF_ALL_SIZES},
}
"""Settings that ``model.size`` stands for. The vocabulary is GPT-2's, rounded up to 128."""


class HfModel(_Model, frozen=True, kw_only=True, tag_field="recipe", tag="hf"):
    """A causal language model of the transformers package, built from its configuration."""

    config: Annotated[
        dict[str, Any],
        Meta(
            description="Keys of the transformers configuration; model_type is required. Remote "
            "code is never executed."
        ),
    ]
    config_unset: Annotated[
        Annotated[
            list[Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=64)]],
            Meta(max_length=64),
        ]
        | None,
        _later("Keys of the configuration that are null, for which TOML has no value."),
    ] = None
    base: Annotated[
        Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=1024)] | None,
        _later(
            "Published model that the run begins from: 'owner/name@' and a commit on the hub, an "
            "https URL that ends in '/', or a folder in the data folder. Unset: weights are drawn."
        ),
    ] = None
    base_files: Annotated[
        Annotated[
            list[Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=256)]],
            Meta(min_length=1, max_length=64),
        ]
        | None,
        _later(
            "Its .safetensors files, each with '#sha256=...', which every peer verifies; `shoal "
            "run new --base` writes them."
        ),
    ] = None
    lora: Annotated[
        Lora | None,
        _later("Adapters that are trained and exchanged instead of the whole model."),
    ] = None


class CustomModel(_Model, frozen=True, kw_only=True, tag_field="recipe", tag="custom"):
    """The program passes its own model to peer.join."""


Model: TypeAlias = GptModel | HfModel | CustomModel


# --- the data --------------------------------------------------------------------------------


class _Data(_Section, frozen=True, kw_only=True):
    sequence_length: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Number of tokens predicted per sequence.")
    ] = 128
    held_out: Annotated[
        float,
        Meta(
            gt=0.0,
            le=0.5,
            description="Share of the data that no peer trains on; the held-out loss is measured "
            "on it.",
        ),
    ] = 0.05


class PythonStdlibData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="python_stdlib"):
    """Source files of the Python standard library, as bytes; needs no download."""


class TextData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="text"):
    """Local text files, as bytes. Every peer has a copy in the folder given with --data."""

    files: Annotated[
        list[Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=256)]],
        Meta(
            min_length=1,
            max_length=64,
            description="Glob patterns relative to the data folder, such as 'corpus/**/*.txt'.",
        ),
    ]


class _FormedData(_Data, frozen=True, kw_only=True):
    form: Annotated[
        Literal["text", "chat", "completion"],
        _later(
            "'text': every token is predicted. 'chat' and 'completion': examples, of which only "
            "the answers are; a sequence holds whole examples."
        ),
    ] = "text"
    columns: Annotated[
        Annotated[
            list[Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=64)]],
            Meta(min_length=1, max_length=2),
        ]
        | None,
        _later(
            "Columns of an example: of a chat one with messages of role and content, unset: "
            "'messages'; of a completion two, unset: 'prompt' and 'completion'."
        ),
    ] = None
    template: Annotated[
        Annotated[dict[str, str], Meta(max_length=8)] | None,
        _later(
            "Text of each role (user, assistant; prompt, answer) with {content} for what it says; "
            "unset: 'User: ...' and 'Assistant: ...', or prompt and answer alone."
        ),
    ] = None

    @property
    def examples(self) -> Form | None:
        """The form of the examples; ``None`` for text."""
        return None if self.form == "text" else form_of(self.form, self.columns, self.template)


class HfData(_FormedData, frozen=True, kw_only=True, tag_field="recipe", tag="hf"):
    """A dataset of the Hugging Face hub, streamed."""

    dataset: Annotated[
        str,
        _text(
            OWNED_HUB_NAME,
            "a name such as 'owner/name'",
            "Name of the dataset on the hub.",
            length_max=128,
        ),
    ]
    subset: Annotated[
        Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=128)] | None,
        Meta(description="Configuration of the dataset, if it has several."),
    ] = None
    split: Annotated[
        str, _text(_PRINTABLE, "a printable text", "Split of the dataset.", length_max=64)
    ] = "train"
    revision: Annotated[
        Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=128)] | None,
        Meta(
            description="Commit of the dataset, 40 hex digits, so that every peer reads the same "
            "data. A dataset without it is refused."
        ),
    ] = None
    text_field: Annotated[
        str, _text(_PRINTABLE, "a printable text", "Column that holds the text.", length_max=64)
    ] = "text"
    tokenizer: Annotated[
        str,
        _text(
            _HUB_TOKENIZER,
            "'bytes' or a name with a commit, such as 'owner/name@' and 40 hex digits",
            "'bytes', or the name of a tokenizer on the hub with its commit: 'owner/name@...'.",
            length_max=128,
        ),
    ] = "bytes"


class FileSource(_Section, frozen=True, kw_only=True):
    """Files that are read with one weight."""

    files: Annotated[
        list[Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=1024)]],
        Meta(
            min_length=1,
            max_length=64,
            description="Files (.txt, .jsonl, .parquet, and token shards .bin and .npy), folders "
            "or glob patterns in the data folder, or https URLs. A name ends in '#sha256=...' to "
            "fix the content, which a URL must. A file .sha256, as sha256sum prints it, is a list "
            "of files beside it.",
        ),
    ]
    weight: Annotated[
        float,
        Meta(gt=0.0, le=1e6, description="Share of the sequences, relative to other sources."),
    ] = 1.0
    text_field: Annotated[
        str,
        _text(
            _PRINTABLE,
            "a printable text",
            "Field of .jsonl, column of .parquet that holds the text.",
            length_max=64,
        ),
    ] = "text"
    dtype: Annotated[
        Literal["uint16", "uint32"],
        Meta(description="Type of the tokens in .bin files, little-endian."),
    ] = "uint16"


class FilesData(_FormedData, frozen=True, kw_only=True, tag_field="recipe", tag="files"):
    """Files of text or tokens, in the folder given with --data or downloaded over https."""

    tokenizer: Annotated[
        str,
        _text(
            _PRINTABLE,
            "a printable text",
            "'bytes', the name of a tokenizer on the hub with its commit ('owner/name@...'), or a "
            "tokenizer.json in the data folder or at an https URL, with '#sha256=...'. Token "
            "shards need none.",
            length_max=1024,
        ),
    ] = "bytes"
    end_token: Annotated[
        Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=64)] | None,
        Meta(
            description="Token that ends a document, such as '<|endoftext|>'. A tokenizer.json "
            "needs it; a tokenizer of the hub has its own."
        ),
    ] = None
    sources: Annotated[
        list[FileSource],
        Meta(
            min_length=1,
            max_length=32,
            description="Where the data comes from. Each source is a table [[data.sources]].",
        ),
    ]


class CustomData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="custom"):
    """The program passes its own dataset to run.data."""


Data: TypeAlias = PythonStdlibData | TextData | HfData | FilesData | CustomData


# --- local training --------------------------------------------------------------------


class _Inner(_Section, frozen=True, kw_only=True):
    learning_rate: Annotated[
        float, Meta(gt=0.0, le=100.0, description="Peak learning rate; [schedule] scales it.")
    ] = 1e-3
    batch_size: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Sequences per optimizer step of one peer.")
    ] = 32
    clip_norm: Annotated[
        float | Literal["off"],
        Meta(
            description="Maximum norm of the gradient; a longer one is scaled down to it. Or 'off'."
        ),
    ] = 1.0


class AdamwInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="adamw"):
    """Adam with decoupled weight decay (matrices only)."""

    beta1: Annotated[float, Meta(ge=0.0, lt=1.0, description="Decay rate of the first moment.")] = (
        0.9
    )
    beta2: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="Decay rate of the second moment.")
    ] = 0.95
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0, description="Added to the denominator.")] = 1e-8
    weight_decay: Annotated[
        float, Meta(ge=0.0, le=10.0, description="Weight decay of matrices.")
    ] = 0.1


class SgdInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="sgd"):
    """Stochastic gradient descent with momentum."""

    momentum: Annotated[float, Meta(ge=0.0, lt=1.0, description="Momentum; 0 for none.")] = 0.9
    nesterov: Annotated[bool, Meta(description="Use Nesterov momentum.")] = False
    weight_decay: Annotated[
        float, Meta(ge=0.0, le=10.0, description="Weight decay of matrices.")
    ] = 0.0


class MuonInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="muon"):
    """Orthogonal updates for the matrices of blocks; AdamW for embeddings, head and vectors."""

    momentum: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="Nesterov momentum of the matrices of blocks.")
    ] = 0.95
    weight_decay: Annotated[
        float, Meta(ge=0.0, le=10.0, description="Weight decay of matrices.")
    ] = 0.1
    beta1: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="Decay rate of AdamW's first moment.")
    ] = 0.9
    beta2: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="Decay rate of AdamW's second moment.")
    ] = 0.95
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0, description="Added to AdamW's denominator.")] = (
        1e-8
    )


class CustomInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="custom"):
    """The program brings its own optimizer; run.schedule sets its learning rate."""


Inner: TypeAlias = AdamwInner | SgdInner | MuonInner | CustomInner


class Schedule(_Section, frozen=True, kw_only=True):
    """Learning rate as a function of the tokens that all peers together have trained on."""

    shape: Annotated[
        Literal["cosine", "linear", "constant"],
        Meta(description="Shape of the decay from the peak to the end."),
    ] = "cosine"
    warmup_tokens: Annotated[
        int,
        Meta(ge=0, le=1 << 60, description="Global tokens until the rate has risen to its peak."),
    ] = 1_000_000
    decay_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 60)] | None,
        Meta(description="Global tokens at which the decay ends; unset: end.tokens."),
    ] = None
    final_fraction: Annotated[
        float, Meta(ge=0.0, le=1.0, description="Rate at the end, as a share of the peak.")
    ] = 0.1


# --- merging and membership -----------------------------------------------------------------


Codec: TypeAlias = Literal["f32", "f16", "int8", "int4", "int3", "int2"]

CODECS_SINCE: Mapping[str, int] = {"int3": 2}
"""Encodings that came later, with the protocol number from which on every build has them."""

_CODEC = "|".join(get_args(Codec))
CodecPair: TypeAlias = Annotated[
    str,
    Meta(
        pattern=f"^({_CODEC})(/({_CODEC}))?$",
        extra={"rule": "an encoding, or two for up/down, such as 'int2/int4'"},
    ),
]
"""The encodings of both ways, as in ``int2/int4``, or one for both."""


def codec_pairs(codecs: Sequence[str]) -> list[tuple[str, str]]:
    """The encodings of the way up and of the way down, from names such as ``int2/int4``."""
    parts = (codec.partition("/") for codec in codecs)
    return [(up, down or up) for up, _, down in parts]


class Outer(_Section, frozen=True, kw_only=True):
    """How the updates of all peers are merged into the shared model."""

    fragments: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Number of parts of the model (P) that are merged separately, in turn.",
        ),
    ] = 8
    steps_per_cycle: Annotated[
        int,
        Meta(ge=1, le=100_000, description="Steps (H) in which every fragment is merged once."),
    ] = 24
    overlap_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Steps (tau) that a merge may take while training goes on; 0: training "
            "waits for every merge. With more, a round waits longer for late peers; "
            "`carry` keeps the steps made meanwhile.",
        ),
    ] = 6
    learning_rate: Annotated[
        float, Meta(gt=0.0, le=10.0, description="Learning rate (eta) of the outer optimizer.")
    ] = 1.0
    momentum: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="Nesterov momentum (mu) of the outer optimizer.")
    ] = 0.5
    merge: Annotated[
        Literal["mean", "rda", "clip", "centered_clip"],
        Meta(description="Rule that combines the contributions of a round into one update."),
    ] = "mean"
    codec: Annotated[Codec, Meta(description="Encoding of updates on the wire, for both ways.")] = (
        "int4"
    )
    codec_up: Annotated[
        Codec | None, _later("Encoding of what peers send to be merged; unset: as `codec`.")
    ] = None
    codec_down: Annotated[
        Codec | None, _later("Encoding of merged updates on their way back; unset: as `codec`.")
    ] = None
    smaller_codecs: Annotated[
        Annotated[list[CodecPair], Meta(max_length=8)],
        _later(
            "Encodings for lines that do not carry the preferred ones, each smaller than the one "
            "before it, such as `int2/int4` (up/down). Peers change over together."
        ),
    ] = []
    steps_per_cycle_max: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        _later(
            "The longest cycle, for lines that do not carry the smallest encodings either; unset: "
            "cycles keep the length of steps_per_cycle."
        ),
    ] = None
    line_share: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)],
        _later("Share of a line that merging may take before encodings and cycles adapt to it."),
    ] = 0.7
    feedback: Annotated[
        Literal["auto", "on", "off"],
        _later(
            "Error feedback: whether what the encoding of an update lost is part of the peer's "
            "next one. `auto`: where updates are sent in int2 and adopted by `carry`."
        ),
    ] = "auto"
    adoption: Annotated[
        Literal["carry", "replace", "blend"],
        Meta(
            description="How a learner takes in a merged fragment: `carry` adds the steps made "
            "meanwhile, `replace` drops them, `blend` averages with the own value."
        ),
    ] = "carry"
    blend_alpha: Annotated[
        float, Meta(ge=0.0, le=1.0, description="Share of the own value, for `blend`.")
    ] = 0.5
    buffers: Annotated[
        Literal["own", "mean"],
        _later(
            "Buffers that are saved with the model, such as the running statistics of BatchNorm: "
            "`own` leaves each peer its own, `mean` merges them like parameters, as exact means."
        ),
    ] = "own"

    @property
    def codecs(self) -> tuple[str, str]:
        """The codecs of the way up and of the way down."""
        return self.codec_up or self.codec, self.codec_down or self.codec

    @property
    def codecs_text(self) -> str:
        up, down = self.codecs
        return up if up == down else f"{up} up, {down} down"

    @property
    def smaller_pairs(self) -> list[tuple[str, str]]:
        """The smaller encodings of the way up and of the way down."""
        return codec_pairs(self.smaller_codecs)

    @property
    def fed_back(self) -> frozenset[str]:
        """Encodings of uploads whose loss is part of the peer's next update."""
        used = {self.codecs[0], *(up for up, _ in self.smaller_pairs)}
        if self.feedback == "auto":
            return frozenset(used & {"int2"} if self.adoption == "carry" else ())
        return frozenset(used if self.feedback == "on" else ())


Quorum: TypeAlias = (
    Annotated[int, Meta(ge=2, le=64)]
    | Annotated[float, Meta(gt=0.0, le=1.0)]
    | Literal["majority", "all"]
)


class Rounds(_Section, frozen=True, kw_only=True):
    """When a round starts and ends, and which contributions it accepts."""

    quorum: Annotated[
        Quorum,
        Meta(
            description="Peers that must have joined: a number, a fraction of the live peers of "
            "the group, 'majority' or 'all'. Never fewer than two."
        ),
    ] = "majority"
    grace: Annotated[
        float,
        Meta(
            ge=0.0,
            lt=1.0,
            description="Waiting time for late peers after the quorum, as a share of the time "
            "that overlapping training hides.",
        ),
    ] = 0.8
    quorum_deadline_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400.0,
            description="Seconds after which a round without a quorum is aborted.",
        ),
    ] = 30.0
    round_deadline_s: Annotated[
        float,
        Meta(
            ge=1.0, le=86_400.0, description="Seconds after which an unfinished round is aborted."
        ),
    ] = 300.0
    group_size: Annotated[
        int,
        Meta(
            ge=2,
            le=64,
            description="Maximum number of peers in one round. More peers are divided into groups "
            "that change with every version: see [mixing].",
        ),
    ] = 16
    stale_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Maximum age of a contribution in versions. Older work is discarded, "
            "unless it began less than ten minutes ago.",
        ),
    ] = 8
    norm_max_ratio: Annotated[
        float | Literal["off"],
        Meta(
            description="Maximum norm of a contribution relative to the usual norm, which follows "
            "from the other contributions and the last merges; a longer one is refused. Or 'off'."
        ),
    ] = 50.0
    alone_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=1e7,
            description="Seconds without another peer after which a peer continues the run alone.",
        ),
    ] = 600.0


class Mixing(_Section, frozen=True, kw_only=True):
    """How groups exchange their state when there are more peers than rounds.group_size."""

    every: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Interval in versions between rounds that also average the slow weights; "
            "0: never, and the groups drift apart. A run that fits into one group averages none.",
        ),
    ] = 1
    dispersion_max: Annotated[
        float | Literal["off"],
        Meta(
            description="Average slow weights only if a peer is about to differ from its group by "
            "more than this, as distance divided by norm; or 'off': whenever `every` "
            "says so."
        ),
    ] = "off"
    theta: Annotated[
        Literal["f32", "f16"], Meta(description="Encoding of slow weights on the wire.")
    ] = "f32"
    momentum: Annotated[
        Literal["f32", "f16", "int8"], Meta(description="Encoding of momentum on the wire.")
    ] = "f16"


class Membership(_Section, frozen=True, kw_only=True):
    """How peers detect that others are alive."""

    heartbeat_s: Annotated[
        float, Meta(ge=0.5, le=600.0, description="Seconds between two heartbeats.")
    ] = 10.0
    expiry_s: Annotated[
        float,
        Meta(
            ge=1.0, le=3600.0, description="Seconds of silence after which a peer counts as gone."
        ),
    ] = 30.0


class Limits(_Section, frozen=True, kw_only=True):
    """Limits on the contribution of one peer."""

    step_tokens_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 40,
            description="Maximum number of tokens that one optimizer step of one peer counts in a "
            "merge.",
        ),
    ] = 1 << 18


class Evaluation(_Section, frozen=True, kw_only=True):
    """Held-out loss, which one peer at a time measures and publishes."""

    sequences: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Held-out sequences per measurement.")
    ] = 128
    every_versions: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Merges of a fragment between two measurements.")
    ] = 1
    rise_max: Annotated[
        Annotated[float, Meta(gt=0.0, le=1e6)] | Literal["off"],
        _later(
            "Largest rise of a peer's held-out loss, as a share of it, by states that the peer has "
            "not merged step by step; beyond it the peer goes back to its own. Or 'off'."
        ),
    ] = 0.25


class End(_Section, frozen=True, kw_only=True):
    """When the run ends."""

    tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 60)] | Literal["unlimited"],
        Meta(description="Global tokens to train on, or 'unlimited'."),
    ] = 100_000_000
    date: Annotated[
        Annotated[datetime, Meta(tz=True)] | None,
        Meta(description="Latest end of the run, such as 2027-03-31T12:00:00Z."),
    ] = None

    def __post_init__(self) -> None:
        if self.date is not None:  # the run id must not depend on the time zone
            moment = self.date.astimezone(UTC).replace(microsecond=0)
            msgspec.structs.force_setattr(self, "date", moment)


class Policy(_Section, frozen=True, kw_only=True):
    """Which peers may take part."""

    admission: Annotated[
        Literal["open", "invited", "listed"],
        Meta(
            description="'open': every peer; 'invited': peers with an invite of the owner "
            "(`shoal invite`); 'listed': only those in `peers`."
        ),
    ] = "open"
    peers: Annotated[
        list[Annotated[str, _text(_PEER_ID, "a peer id", "", length_max=64)]],
        Meta(max_length=128, description="Peer ids, for admission = 'listed'."),
    ] = msgspec.field(default_factory=list)
    owner: Annotated[
        Annotated[str, _text(_PEER_ID, "a peer id", "", length_max=64)] | None,
        Meta(
            description="Public key of the owner, who may invite and ban peers, in the form of a "
            "peer id. `shoal run sign` writes it; unset: the run has no owner."
        ),
    ] = None
    probation_rounds: Annotated[
        Annotated[int, Meta(ge=0, le=100_000)],
        _later(
            "Merges that a newcomer to an open run contributes to, over `probation_minutes`, "
            "before it leads, reduces and votes; half as many as the live peer with the most are "
            "always enough. 0: newcomers count at once."
        ),
    ] = 64
    probation_minutes: Annotated[
        Annotated[float, Meta(ge=0.0, le=1e5)],
        _later("Minutes over which a newcomer contributes to them: see `probation_rounds`."),
    ] = 10.0
    audit_rate: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)],
        _later(
            "Chance that a piece of a merged slice is merged again by another member, to find "
            "peers that merge falsely: 0.1 finds one after ten lies on average, and costs 5% of "
            "a round's bytes. 0: no audits."
        ),
    ] = 0.1
    spot_checks: Annotated[
        Annotated[float, Meta(ge=0.0, le=24.0)],
        _later(
            "Contributions of others that each learner checks in a cycle, to find members that "
            "poison: whether one lowers the loss on the data that its author must have used. One "
            "in a cycle costs two forward passes of a batch and the bytes of one upload; as a "
            "reducer, a learner refuses who fails repeatedly. All learners must read the run's "
            "recipe, from the same data. 0: no checks."
        ),
    ] = 0.0


class RunFile(_Section, frozen=True, kw_only=True):
    """All settings of a run.

    Two run files that differ in nothing but ``seeds`` have the same ``run_id``.
    """

    schema: Annotated[
        int, Meta(ge=1, description="Version of this format. Its defaults never change.")
    ] = SCHEMA
    name: Annotated[
        str,
        _text(
            r"^[a-z0-9][a-z0-9._-]*\Z",
            "lower-case letters, digits, '-', '_' and '.', at most 64",
            "Name of the run, for display.",
            length_max=64,
        ),
    ] = "my-run"
    description: Annotated[
        str,
        _text(
            _PRINTABLE, "at most 1000 printable characters", "Purpose of the run.", length_max=1000
        ),
    ] = ""
    licence: Annotated[
        str,
        _text(
            _PRINTABLE,
            "at most 100 printable characters",
            "Licence of the weights.",
            length_max=100,
        ),
    ] = ""
    homepage: Annotated[
        Annotated[str, _text(_HTTPS_OR_NOTHING, _AN_ADDRESS, "", length_max=200)],
        _later("Address of a page about the run, shown before joining."),
    ] = ""
    contact: Annotated[
        Annotated[
            str,
            _text(
                _HTTPS_OR_MAIL_OR_NOTHING, f"{_AN_ADDRESS}, or a mail address", "", length_max=200
            ),
        ],
        _later("Where its author can be reached, shown before joining."),
    ] = ""
    discussion: Annotated[
        Annotated[str, _text(_HTTPS_OR_NOTHING, _AN_ADDRESS, "", length_max=200)],
        _later("Address of the place where its peers talk, shown before joining."),
    ] = ""
    random_seed: Annotated[
        int,
        Meta(
            ge=0,
            le=(1 << 63) - 1,
            description="Seed of the first weights: every founder draws the same ones.",
        ),
    ] = 0
    seeds: Annotated[
        list[str],
        Meta(
            max_length=SEEDS_MAX,
            description="Addresses of bootstrap or other peers through which the run is found, "
            "such as '/dns4/seed.example.org/tcp/7700/p2p/12D3Koo...'. Not part of the"
            " run's id.",
        ),
    ] = msgspec.field(default_factory=list)
    model: Model = GptModel()
    data: Data = PythonStdlibData()
    inner: Inner = AdamwInner()
    schedule: Schedule = Schedule()
    outer: Outer = Outer()
    rounds: Rounds = Rounds()
    mixing: Mixing = Mixing()
    membership: Membership = Membership()
    limits: Limits = Limits()
    evaluation: Evaluation = Evaluation()
    end: End = End()
    policy: Policy = Policy()

    def canonical(self) -> bytes:
        """Every setting except ``seeds`` as sorted compact JSON, which is hashed and served.

        Settings that are younger than their schema are left out at their default.
        """
        plain = msgspec.to_builtins(self)
        del plain["seeds"]
        _leave_out_younger(self, plain)
        for section in msgspec.structs.fields(self):
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
    for field in msgspec.structs.fields(table):
        if _is_later(field.type) and getattr(table, field.name) == _default_of(field):
            del plain[field.name]


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _is_later(annotation: Any) -> bool:
    """Return whether a setting was declared with ``_later``."""
    return any(
        isinstance(part, Meta) and "later" in (part.extra or {})
        for part in getattr(annotation, "__metadata__", ())
    )


def vocabulary(model: Model) -> int | None:
    """Number of distinct tokens of a model; ``None`` if its settings do not say it."""
    if isinstance(model, GptModel):
        return model.vocabulary
    size = model.config.get("vocab_size") if isinstance(model, HfModel) else None
    return size if isinstance(size, int) and size > 0 else None
