"""A model in memory with the text form of its tokens, from a run's parameters or an export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from torch import nn

from peer.errors import PathError, RunFileError, Unusable, one_line
from peer.extras.export.folder import RUN_FILE
from peer.extras.export.parameters import model_of
from peer.extras.export.tokenizer import TokenizerFiles, is_of_bytes
from peer.extras.use.codec import ByteCodec, Codec, FormCodec, Message, codec_in, codec_of
from peer.installed import needed
from peer.run_file.reading import from_canonical
from peer.run_file.sections import CustomModel, RunFile
from peer.storage.outer_state import OuterState

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
        if self.text.is_chat:
            return self.text.messages(messages)
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
    codec = None if tokenizer is None else codec_of(tokenizer)
    return ReadyModel(
        model=model,
        context=context_of(model, outer.run.data.sequence_length),
        codec=_in_form(codec, outer.run),
        run=outer.run,
        data_dir=data_dir,
        name=f"run {outer.run.name}",
    )


def _in_form(codec: Codec | None, run: RunFile | None) -> Codec | None:
    """The codec that writes what is said as the examples of the run were written."""
    form = None if run is None else getattr(run.data, "examples", None)
    return codec if codec is None or form is None else FormCodec(codec, form)


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
        codec=_in_form(codec_in_folder(folder), run),
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
