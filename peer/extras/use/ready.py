"""A model in memory with the text form of its tokens, from a run's parameters or an export."""

from __future__ import annotations

import codecs
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from blake3 import blake3
from torch import nn

from peer.data.text.tokenizing import BYTES_END, ByteTokenizer
from peer.errors import DataUnavailable, PathError, RunFileError, Unusable, one_line
from peer.extras.export.folder import RUN_FILE
from peer.extras.export.parameters import model_of
from peer.extras.export.tokenizer import TokenizerFiles, is_of_bytes
from peer.installed import needed
from peer.run_file.forms import ExampleForm
from peer.run_file.reading import from_canonical
from peer.run_file.sections import CustomModel, RunFile
from peer.storage.outer_state import OuterState

Message = Mapping[str, str]
"""``role`` and ``content`` of a message in a chat."""

HELD_MAX = 4
"""Tokens that are held back for the rest of a character, which has at most as many bytes."""

Decode = Callable[[int], str]
"""Returns the text that the next token completes, which may be empty."""


class ByteCodec:
    """The text form of a model's tokens: token i is the byte i."""

    end: int | None = BYTES_END
    """The token that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        (tokens,) = ByteTokenizer().encode([text])
        numbers: list[int] = tokens.tolist()
        return numbers

    def chat(self, messages: Sequence[Message]) -> list[int] | None:
        """The tokens of a chat, up to the model's answer; ``None``: it does not know how."""
        return None

    def decoder(self, before: Sequence[int] = ()) -> tuple[Decode, Callable[[], str]]:
        """A function for one token after the other, and one that returns what is left.

        ``before``: the tokens that they continue.
        """
        decoding = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A model may have more tokens than there are bytes.
        return (
            lambda token: decoding.decode(bytes([token])) if token < 256 else "\ufffd",
            lambda: decoding.decode(b"", final=True),
        )

    def size_bytes(self, tokens: Sequence[int]) -> int:
        """Return the number of bytes of the text of tokens; one that ends a document has none."""
        return sum(token != self.end for token in tokens)


class TokenizerCodec:
    """The same with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, end: int | None) -> None:
        self._tokenizer = tokenizer
        self.end = end

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def chat(self, messages: Sequence[Message]) -> list[int] | None:
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        text = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        return self.encode(text)

    def decoder(self, before: Sequence[int] = ()) -> tuple[Decode, Callable[[], str]]:
        pieces = _Pieces(self._text, before[-HELD_MAX:])
        return pieces.add, pieces.rest

    def size_bytes(self, tokens: Sequence[int]) -> int:
        kept = [token for token in tokens if token != self.end]
        # Half characters at the ends would become replacement characters of three bytes.
        return len(self._text(kept).strip("\ufffd").encode())

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class _Pieces:
    """Cuts the text of growing tokens into pieces that end between characters.

    The text of a token depends on the one before it (a leading space, the bytes of a character),
    so a piece is what new tokens add to the text of the last ones.
    """

    def __init__(self, text: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._text = text
        self._last = list(before)
        self._new: list[int] = []

    def add(self, token: int) -> str:
        self._new.append(token)
        piece = self._added()
        is_half = piece.endswith("\ufffd") and len(self._new) < HELD_MAX
        return "" if is_half else self._shown(piece)

    def rest(self) -> str:
        return self._shown(self._added()) if self._new else ""

    def _added(self) -> str:
        return self._text(self._last + self._new)[len(self._text(self._last)) :]

    def _shown(self, piece: str) -> str:
        self._last, self._new = self._new, []
        return piece


Codec: TypeAlias = ByteCodec | TokenizerCodec


def in_form(codec: Codec, form: ExampleForm, messages: Sequence[Message]) -> list[int]:
    """The tokens of a chat in the form in which a run's examples were in its training."""
    turns, opening = form.opening(messages)
    end = [] if codec.end is None else [codec.end]
    tokens = [token for turn in turns for token in (*codec.encode(turn.text), *end)]
    return tokens + codec.encode(opening)


def codec_of(files: TokenizerFiles) -> Codec:
    """The codec of a run's tokenizer. Raises ``ExtraMissing`` or ``DataUnavailable``."""
    if files.is_bytes:
        return ByteCodec()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.files.items():
            (Path(folder) / name).write_bytes(content)
        return codec_in(Path(folder), end=files.end)


def codec_in(folder: Path, *, end: int | None = None) -> Codec:
    """The codec of the tokenizer in a folder. Raises ``ExtraMissing`` or ``DataUnavailable``."""
    transformers = needed("transformers", f"the tokenizer in {folder}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # tokenizers raises bare exceptions
        why = one_line(error)
        raise DataUnavailable("tokenizer", f"{folder} has none that can be read: {why}") from error
    return TokenizerCodec(tokenizer, tokenizer.eos_token_id if end is None else end)


CONFIG = "config.json"


class ExportUnusable(PathError):
    """A folder is no model that transformers loads."""

    exit_code = 2
    message = "cannot load a model from the folder {path}: {reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel:
    """A model that can be used, and where it comes from."""

    model: nn.Module
    context: int
    """Tokens that it can read at once."""
    data_dir: Path
    """Folder to which the names in the run's data are relative."""
    name: str
    codec: Codec | None = None
    run: RunFile | None = None
    """``None`` for a folder that no run has made."""

    @property
    def text(self) -> Codec:
        """The codec. Raises ``Unusable``."""
        if self.codec is None:
            raise Unusable(
                f"{self.name} names no tokenizer, so text cannot become its tokens",
                section="no-tokenizer",
            )
        return self.codec

    def ends(self) -> frozenset[int]:
        """The tokens after which nothing follows."""
        config = getattr(self.model, "generation_config", None)
        named = getattr(config, "eos_token_id", None)
        many = named if isinstance(named, list) else [named, self.codec and self.codec.end]
        return frozenset(token for token in many if isinstance(token, int))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens to continue: of a chat, or of the last message alone."""
        form = None if self.run is None else getattr(self.run.data, "examples", None)
        if form is not None:
            return in_form(self.text, form, messages)
        if (tokens := self.text.chat(messages)) is not None:
            return tokens
        tokens = self.text.encode(messages[-1]["content"])
        # Nothing is known of a text that has not begun: a document has ended before it.
        return tokens or [0 if self.text.end is None else self.text.end]


def check_buildable(run: RunFile) -> None:
    """Raise ``Unusable`` for a model that is not in this package or transformers."""
    if isinstance(run.model, CustomModel):
        raise Unusable(
            f"the model of run {run.name!r} is 'custom': only the program that brings it can build "
            "it; `shoal export` writes its parameters, and peer.load_weights reads them",
            section="not-buildable",
        )


def ready_of_run(
    outer: OuterState,
    tokenizer: TokenizerFiles | None,
    *,
    data_dir: Path,
    base: Path | None = None,
) -> ReadyModel:
    """The run's own model with its parameters. Raises what ``check_buildable`` does.

    ``base``: folder with the weights below the run's adapters.
    """
    check_buildable(outer.run)
    model = model_of(outer, base)
    return ReadyModel(
        model=model,
        context=context_of(model, outer.run.data.sequence_length),
        codec=None if tokenizer is None else codec_of(tokenizer),
        run=outer.run,
        data_dir=data_dir,
        name=f"run {outer.run.name}",
    )


def is_export(folder: Path) -> bool:
    """Return whether this is a folder for transformers, and not one of a peer."""
    return (folder / CONFIG).is_file()


def ready_in(folder: Path, *, data_dir: Path | None) -> ReadyModel:
    """The model in a folder. Raises ``ExportUnusable``, ``ExtraMissing``, ``DataUnavailable``."""
    return made_ready(pretrained(str(folder)), folder, run_of(folder), data_dir=data_dir)


def made_ready(
    model: nn.Module, folder: Path, run: RunFile | None, *, data_dir: Path | None
) -> ReadyModel:
    """The model of a folder with what else is there. Raises what ``codec_in_folder`` does."""
    return ReadyModel(
        model=model,
        context=context_of(model, 1024),
        codec=codec_in_folder(folder),
        run=run,
        data_dir=data_dir or folder,
        name=f"the model in {folder}" if run is None else f"run {run.name}",
    )


def pretrained(named: str) -> nn.Module:
    """The model of a folder, in fp32.

    Raises ``ExportUnusable`` or ``ExtraMissing``.
    """
    transformers = needed("transformers", f"the model in {named}")
    transformers.utils.logging.disable_progress_bar()
    try:
        # Weights in other formats can run code.
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            named,
            trust_remote_code=False,
            local_files_only=True,
            # It asks the hub for adapters of the model otherwise, and again and again without a
            # network: for 23 s.
            adapter_kwargs={"local_files_only": True},
            use_safetensors=True,
        )
    except Exception as error:  # it raises errors of many kinds about damaged files
        reason = one_line(error)
        raise ExportUnusable(named, reason) from error
    ready: nn.Module = model.float().eval()  # processors are slow with bf16
    return ready


def codec_in_folder(folder: Path) -> Codec | None:
    """The codec of the tokenizer beside a model; ``None`` if there is none.

    Raises ``ExtraMissing`` or ``DataUnavailable``.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return None
    # Text of bytes is cut exactly without transformers, whose part are chat templates.
    return ByteCodec() if is_of_bytes(folder) and not _has_template(folder) else codec_in(folder)


def _has_template(folder: Path) -> bool:
    inside = b"chat_template" in (folder / "tokenizer_config.json").read_bytes()
    return inside or (folder / "chat_template.jinja").exists()


def run_of(folder: Path) -> RunFile | None:
    """The run that has made the model in a folder; ``None`` if no run has.

    Raises ``ExportUnusable``.
    """
    try:
        content = (folder / RUN_FILE).read_bytes()
        return from_canonical(content, blake3(content).hexdigest(), source=RUN_FILE)
    except FileNotFoundError:
        return None
    except (OSError, RunFileError) as error:
        raise ExportUnusable(str(folder), " ".join(f"{RUN_FILE}: {error}".split())) from error


def context_of(model: nn.Module, otherwise: int) -> int:
    """Tokens that a model can read at once; ``otherwise`` if it does not say."""
    shape: Any = getattr(model, "shape", None) or getattr(model, "config", None)
    for name in ("context", "max_position_embeddings", "n_positions"):
        if isinstance(length := getattr(shape, name, None), int):
            return length
    return otherwise
