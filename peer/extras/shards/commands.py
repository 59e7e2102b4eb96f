"""``shoal data prepare``: token shards for a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from peer.cli.application import Json, report_if_slow, show
from peer.quantities import plural
from peer.storage.home import data_cache

data = typer.Typer(help="Prepare training data.", no_args_is_help=True)


@data.callback()
def _group() -> None:
    """Prepare training data."""


@data.command()
def prepare(
    texts: Annotated[
        list[Path], Argument(help="Files .txt, .jsonl or .parquet, or folders.", metavar="TEXT...")
    ],
    out: Annotated[Path, Option(file_okay=False, help="Folder for the shards.", metavar="FOLDER")],
    tokenizer: Annotated[
        str, Option(help="'bytes', a tokenizer.json, or a tokenizer of the hub.", metavar="NAME")
    ] = "bytes",
    end_token: Annotated[
        str | None, Option(help="Token that ends a document.", metavar="TOKEN")
    ] = None,
    text_field: Annotated[
        str, Option(help="Field or column that holds the text.", metavar="NAME")
    ] = "text",
    as_json: Json = False,
) -> None:
    """Write text as token shards with their hashes, and print the lines for a run file.

    Example: shoal data prepare texts --out shards --tokenizer t.json --end-token '<|endoftext|>'
    """
    from peer.extras.shards.writing import tokenizer_named, write_shards

    chosen = tokenizer_named(tokenizer, end_token, data_cache())
    with report_if_slow("still tokenizing"):
        written = write_shards(texts, chosen, out, text_field=text_field)
    record = {
        "files": [str(path) for path in written.files],
        "list": str(written.list_file),
        "tokens": written.tokens,
        "vocabulary": written.vocabulary,
        "source": written.source,
    }
    shards = plural(len(written.files), "shard")
    lines = (
        f"# {written.tokens} tokens of a vocabulary of {written.vocabulary}, in {shards}",
        "# For a run file, whose model.vocabulary is at least that; a URL may stand before",
        "# the name of the list. Peers with the files pass the folder above them with --data.",
        *('[data]\nrecipe = "files"\n\n' + written.source).splitlines(),
    )
    show(record, lines, as_json=as_json)
