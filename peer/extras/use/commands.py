"""``shoal say`` and ``shoal eval``: a run's model continues texts, and its loss is measured."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category

import typer
from typer import Argument, Option

from peer.cli.application import USE_THE_MODEL, Json, json_text, report_if_slow, show
from peer.cli.finding import link_in
from peer.extras.export.found_models import check_there, find_model, is_remote, parts_of
from peer.run_file.places import base_of
from peer.storage.home import data_cache, data_home

if TYPE_CHECKING:
    from peer.extras.use.continuing import Sampling
    from peer.extras.use.measuring import Loss
    from peer.extras.use.ready import Message, ReadyModel


LOADING = "still loading the model"


def find_ready(where: str, *, data_dir: Path | None, quiet: bool) -> ReadyModel:
    """The model of a run, or that in an exported folder, in memory and with its tokenizer."""
    link_in(where)
    check_there(where)
    from peer.extras.use.ready import check_buildable, is_export, ready_in, ready_of_run

    if Path(where).suffix == ".safetensors" and Path(where).is_file():
        raise typer.BadParameter(
            f"{where} is one file of parameters; pass the run's folder or link, or a folder that "
            "`shoal export --to hf` has written"
        )
    if not is_remote(where) and is_export(Path(where)):
        with report_if_slow(LOADING):
            return ready_in(Path(where), data_dir=data_dir)
    if not is_remote(where) and is_adapter_folder(Path(where)):
        return _ready_adapter(Path(where), data_dir=data_dir, quiet=quiet)
    parts = data_home(os.environ) / "model"
    parts.parent.mkdir(parents=True, exist_ok=True)
    model = find_model(where, parts, data_dir=data_dir, quiet=quiet, check=check_buildable)
    model.check_recipe()
    base = model.base(quiet=quiet)
    with report_if_slow(LOADING):
        ready = ready_of_run(model.outer, model.tokenizer(), data_dir=model.data_dir, base=base)
    shutil.rmtree(parts_of(model.outer.run, parts), ignore_errors=True)
    return ready


def is_adapter_folder(folder: Path) -> bool:
    """Return whether peft has written the adapters in this folder."""
    return (folder / "adapter_config.json").is_file()


def _ready_adapter(folder: Path, *, data_dir: Path | None, quiet: bool) -> ReadyModel:
    from peer.extras.bases.commands import fetched_base
    from peer.extras.bases.lora import check_peft
    from peer.extras.use.adapters import adapted_in
    from peer.extras.use.ready import ExportUnusable, run_of

    check_peft()
    run = run_of(folder)
    if run is None or (named := base_of(run.model)) is None:
        why = "it does not say of which run its adapters are; load them with the package peft"
        raise ExportUnusable(str(folder), why)
    # A base in a folder is in the run's data folder; often the adapters were written beside it.
    beside = folder.absolute().parent
    places = data_dir or (beside if (beside / named.source).is_dir() else folder)
    base = fetched_base(run, founds=False, data_dir=places, quiet=quiet)
    with report_if_slow(LOADING):
        return adapted_in(folder, run, base, data_dir=data_dir)


commands = typer.Typer()

NO_TEXT = "there is no text to continue: pass it as TEXT, or as lines on standard input"

Where = Annotated[
    str,
    Argument(
        metavar="RUN_DIR|LINK|FOLDER",
        help="Folder of a peer in a run, shoal:// link or run file, or folder that `shoal export "
        "--to hf` or `--to peft` has written.",
    ),
]
DataFolder = Annotated[
    Path | None,
    Option(
        exists=True,
        file_okay=False,
        help="Folder with the run's local files: data, or a tokenizer.json. By default "
        "RUN_DIR/data, or the folder of the run file.",
        metavar="FOLDER",
    ),
]


@commands.command(rich_help_panel=USE_THE_MODEL)
def say(
    where: Where,
    text: Annotated[
        str | None,
        Argument(metavar="TEXT", help="Text to continue. Without it, lines are asked for."),
    ] = None,
    temperature: Annotated[
        float, Option(min=0, help="0 takes the most likely token; higher is more varied.")
    ] = 0.8,
    max_tokens: Annotated[int, Option(min=1, help="End after this many tokens.")] = 200,
    seed: Annotated[
        int | None,
        Option(min=0, max=2**63 - 1, help="The same seed gives the same text."),
    ] = None,
    data: DataFolder = None,
    as_json: Json = False,
) -> None:
    """Continue a text with the newest parameters of a run, or with an exported model.

    With a link they are downloaded from the run's keepers or learners, without taking part. Without
    TEXT, lines are continued one by one until an empty line or Ctrl-D. It computes on the
    processor.

    Example: shoal say my-model 'Once upon a time' --temperature 0.7 --max-tokens 100
    """
    if temperature != temperature:
        raise typer.BadParameter("'nan' is no number")
    if text is not None and not text.strip():
        raise typer.BadParameter(NO_TEXT)
    ready = find_ready(where, data_dir=data, quiet=as_json)

    from peer.extras.use.continuing import Sampling

    sampling = Sampling(temperature=temperature, tokens_max=max_tokens)
    talk = _Talk(ready, sampling, seed=seed, as_json=as_json)
    for line in _lines() if text is None else [text]:
        talk.answer(line)
    if not (talk.messages or sys.stdin.isatty()):
        raise typer.BadParameter(NO_TEXT)


def _lines() -> Iterator[str]:
    """The lines that are typed, up to an empty one or the end."""
    prompt = "> " if sys.stdin.isatty() else ""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as arguments of a command are read
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                print()
            return
        if not line.strip():
            return
        yield line


@dataclass(frozen=True, slots=True)
class _Talk:
    """Texts and their continuations; those of a chat know the earlier ones."""

    ready: ReadyModel
    sampling: Sampling
    seed: int | None
    as_json: bool
    messages: list[Message] = field(default_factory=list)

    def answer(self, text: str) -> None:
        # Bytes of the command line that are no UTF-8 arrive as halves of characters.
        text = text.encode(errors="surrogateescape").decode(errors="replace")
        self.messages.append({"role": "user", "content": text})
        prompt = self.ready.prompt(self.messages)
        seed = secrets.randbits(31) if self.seed is None else self.seed
        begun = time.monotonic()
        pieces = self._said(prompt, replace(self.sampling, seed=seed))
        took_s = time.monotonic() - begun
        said = "".join(pieces)
        self.messages.append({"role": "assistant", "content": said})
        if self.as_json:
            tokens = len(pieces) - 1
            record = {"prompt": text, "text": said, "tokens": tokens, "seed": seed}
            print(json_text({**record, "tokens_per_s": round(tokens / took_s, 1)}))

    def _said(self, prompt: list[int], sampling: Sampling) -> list[str]:
        """A piece of text for each token, and the rest."""
        from peer.extras.use.continuing import continued

        ready, pieces = self.ready, list[str]()
        show: Callable[[str], None] = _drop if self.as_json else _show
        decode, rest = ready.text.decoder(prompt)
        for token in continued(
            ready.model, prompt, sampling, context=ready.context, ends=ready.ends()
        ):
            pieces.append(decode(token))
            show(pieces[-1])
        pieces.append(rest())
        show(pieces[-1] + "\n")
        return pieces


def _show(piece: str) -> None:
    print(harmless(piece), end="", flush=True)


def harmless(text: str) -> str:
    """Text of a model, which strangers have trained, without what a terminal would obey."""
    return "".join("\ufffd" if category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _drop(piece: str) -> None:
    """Nothing is shown before the record."""


@commands.command("eval", rich_help_panel=USE_THE_MODEL)
def evaluate(
    where: Where,
    text: Annotated[
        list[Path] | None,
        Option(
            "--text",
            help="Measure on this text file instead of the run's held-out data; may be repeated.",
            metavar="FILE",
        ),
    ] = None,
    data: DataFolder = None,
    as_json: Json = False,
) -> None:
    """Measure the loss of a run's newest parameters, or of an exported model.

    Nats per token compare models with the same tokenizer, bits per byte all models. The held-out
    data is that on which the run's peers measure; no peer trains on it.

    Example: shoal eval 'shoal://RUN_ID?seed=...' --text my-notes.txt
    """
    from peer.extras.use.measuring import held_out_of_run, on_text

    ready = find_ready(where, data_dir=data, quiet=as_json)
    with report_if_slow("still measuring"):
        if text:
            losses = [on_text(ready, path) for path in text]
        else:
            losses = [held_out_of_run(ready, cache_dir=data_cache())]
    run_id = None if ready.run is None else ready.run.run_id
    record = {"run_id": run_id, "losses": [_record(loss) for loss in losses]}
    show(record, map(_line, losses), as_json=as_json)


def _line(loss: Loss) -> str:
    bits = "" if loss.bits_per_byte is None else f", {loss.bits_per_byte:.4f} bits per byte"
    return f"{loss.data}: {loss.nats_per_token:.4f} nats per token{bits}; {loss.tokens} tokens"


def _record(loss: Loss) -> dict[str, Any]:
    return {
        "data": loss.data,
        "nats_per_token": loss.nats_per_token,
        "bits_per_byte": loss.bits_per_byte,
        "tokens": loss.tokens,
        "bytes": loss.size_bytes,
    }
