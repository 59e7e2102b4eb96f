"""Datasets and tokenizers of the Hugging Face hub.

The author of a dataset is a stranger: only text in files of the dataset itself is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from dht.identity import PeerId
from dht.whole_files import write_whole
from peer.data.batches.order import Order
from peer.data.batches.sequences import Data
from peer.data.documents import (
    DocumentStream,
    ShardedDocuments,
    Tokenizer,
    Until,
    held_out_documents,
    text_in,
    tokenize_bytes,
)
from peer.data.kept_documents import KeptDocuments
from peer.data.text.downloads import Host
from peer.data.text.formats import text_of as text_of_example
from peer.data.text.token_cache import TokenCache
from peer.data.text.tokenizer_json import checked
from peer.data.text.tokenizing import Facts
from peer.data.text.workers import Job, Workers
from peer.errors import DataUnavailable, one_line
from peer.extras import check_installed, hub_errors, needed
from peer.https import reason_of
from peer.run_file.forms import Form
from peer.run_file.sections import HfData, RunFile, vocabulary

HUB = "https://huggingface.co"

_HF_FORMS = ("arrow", "csv", "json", "parquet", "text")
"""Readers of plain columns. Others unpack archives and decode images or sound."""

_PLAIN = ("Value", "Json")
"""Types of columns that are decoded without a look at anything else."""


def open_hub(
    run: RunFile,
    recipe: HfData,
    peer_id: PeerId,
    *,
    cache_dir: Path,
    over: Callable[[], bool] | None = None,
) -> Data:
    """``over``: reading is to end with an error. ``None``: it takes as long as it will."""
    check_hub(recipe)
    tokenize: Tokenizer = tokenize_bytes
    digest = "bytes"
    form = recipe.examples
    text_of, fill = text_in(recipe.text_field), None
    if form is not None:
        tokenize, facts = _in_worker(recipe, cache_dir, vocabulary=vocabulary(run.model))
        digest, fill = f"{facts.digest}/{form}", facts.end
        text_of = partial(_example_of, form)
    elif recipe.tokenizer != "bytes":
        tokenize, facts = _in_worker(recipe, cache_dir, vocabulary=vocabulary(run.model))
        digest = facts.digest
    failures: tuple[type[Exception], ...] = (*hub_errors(), KeyError)
    try:
        commit = checked_commit(recipe.dataset, recipe.revision)
        import datasets

        builder = datasets.load_dataset_builder(recipe.dataset, recipe.subset, revision=commit)
        check_files(recipe.dataset, type(builder).__module__, builder.config.data_files or {})
        streamed = builder.as_streaming_dataset(split=recipe.split)
        wanted = (recipe.text_field,) if form is None else form.columns
        documents: ShardedDocuments = Streamed(plain_columns(streamed, wanted))
        documents = documents if over is None else Until(documents, over)
        held_out = held_out_documents(
            documents,
            tokenize,
            text_of=text_of,
            held_out=recipe.held_out,
            sequences=run.evaluation.sequences,
            sequence_length=recipe.sequence_length,
            fill=fill,
        )
    except failures as error:
        raise DataUnavailable("hf", f"{recipe.dataset}: {error}") from error
    stream = DocumentStream(
        documents,
        tokenize,
        files=Order(documents.num_shards, run_id=run.run_id, peer_id=peer_id),
        text_of=text_of,
        held_out=recipe.held_out,
        sequence_length=recipe.sequence_length,
        fill=fill,
        kept=_kept(recipe, commit, digest, documents.num_shards, cache_dir),
    )
    return Data(stream, held_out, f"hf: {recipe.dataset}, streamed, {documents.num_shards} files")


class Streamed:
    """Documents of the hub: that they cannot be read any more is an error of the data.

    ``datasets`` has tried again for minutes when it raises one.
    """

    def __init__(self, documents: ShardedDocuments) -> None:
        self._documents = documents

    @property
    def num_shards(self) -> int:
        return self._documents.num_shards

    def shard(self, num_shards: int, index: int) -> Streamed:
        return Streamed(self._documents.shard(num_shards=num_shards, index=index))

    def skip(self, n: int) -> Streamed:
        return Streamed(self._documents.skip(n))

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        try:
            yield from self._documents
        except hub_errors() as error:
            raise DataUnavailable("hf", one_line(error)) from error


def _in_worker(
    recipe: HfData, cache_dir: Path, *, vocabulary: int | None
) -> tuple[Tokenizer, Facts]:
    """A tokenizer in a process with limits, as it and its texts are a stranger's."""
    path, end_token = None, ""
    if recipe.tokenizer != "bytes":
        file, end_token = hub_tokenizer_file(recipe.tokenizer, cache_dir / "tokenizers")
        path = str(file)
    workers = Workers(1, parallel=True)
    job = Job(tokenizer=path, end_token=end_token, form=recipe.examples)
    facts = workers.do(job)
    if vocabulary is not None and facts.vocabulary > vocabulary:
        raise DataUnavailable(
            "hf",
            f"tokenizer {recipe.tokenizer!r} has {facts.vocabulary} tokens, the model has "
            f"{vocabulary}: use that of the model",
        )
    return lambda texts: workers.encode(msgspec.structs.replace(job, texts=tuple(texts))), facts


def _example_of(form: Form, row: Mapping[str, Any]) -> str:
    for column in form.columns:
        if column not in row:
            raise _no_column(column, row)
    values = [row[column] for column in form.columns]
    if (fault := form.fault(values)) is not None:
        raise DataUnavailable("hf", f"an example {fault}")
    return text_of_example(values)


def _kept(recipe: HfData, commit: str, digest: str, files: int, cache_dir: Path) -> KeptDocuments:
    place = (recipe.dataset, commit, recipe.subset, recipe.split, recipe.text_field, files)
    cache = TokenCache(cache_dir / "tokens")
    return KeptDocuments(cache, *place, recipe.held_out, digest)


def check_hub(recipe: HfData) -> None:
    check_installed("datasets", "the data recipe 'hf'")
    for name in {recipe.dataset, recipe.tokenizer} - {"bytes"}:
        _refuse_local(name.partition("@")[0])


def _refuse_local(name: str) -> None:
    """Raise ``DataUnavailable`` if a local file has the name of a dataset or tokenizer.

    ``datasets`` and ``transformers`` would prefer it, so that a run file from a stranger could
    select files of the user.
    """
    if Path(name).exists():
        raise DataUnavailable(
            "hf",
            f"{name!r} is a name on the hub, but {Path(name).absolute()} exists as well; "
            "start in another folder",
        )


def checked_commit(dataset: str, revision: str | None) -> str:
    """The commit of a revision whose README refers to no files outside the dataset.

    ``datasets`` would open the places that a README names, also addresses that only this machine
    reaches, before ``check_files`` can see them. Raises ``DataUnavailable`` and ``OSError``.
    """
    import huggingface_hub
    import yaml
    from huggingface_hub.errors import EntryNotFoundError

    commit = str(huggingface_hub.HfApi().dataset_info(dataset, revision=revision).sha)
    for name in ("README.md", ".huggingface.yaml"):
        try:
            path = huggingface_hub.hf_hub_download(
                dataset, name, repo_type="dataset", revision=commit
            )
        except EntryNotFoundError:
            continue
        if name == "README.md":
            card = huggingface_hub.DatasetCard.load(path).data.to_dict()
        else:
            card = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        configs = [each for each in card.get("configs") or () if isinstance(each, Mapping)]
        for text in _texts([(each.get("data_files"), each.get("data_dir")) for each in configs]):
            # A colon is part of an address or of an archive inside another file.
            if ":" in text or text.startswith(("/", "~")) or ".." in text.split("/"):
                raise DataUnavailable("hf", f"{dataset} refers to a place outside of it: {text}")
    return commit


def _texts(value: object) -> Iterator[str]:
    """All strings in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def check_files(dataset: str, reader: str, files: Mapping[str, Iterable[str]]) -> None:
    """Check that a dataset is read from its own files, as text. Raises ``DataUnavailable``.

    The README of a dataset may name other files: local ones, which training would reveal, or
    addresses that only this machine reaches.
    """
    form = reader.rpartition(".")[2]
    if form not in _HF_FORMS:
        raise DataUnavailable(
            "hf", f"{dataset} has the format {form!r}; supported are {', '.join(_HF_FORMS)}"
        )
    for file in (each for part in files.values() for each in part):
        if not file.startswith(f"hf://datasets/{dataset}@") or ".." in file.split("/"):
            raise DataUnavailable("hf", f"{dataset} refers to a file outside of it: {file[:200]}")


def plain_columns(documents: Any, wanted: Sequence[str]) -> Any:
    """The wanted columns of a streamed dataset, if they are plain. Raises ``DataUnavailable``.

    The files of a dataset say what its columns are. ``datasets`` would open the addresses and local
    files that a column of images names, also one that nobody asked for.
    """
    features = documents.features
    if features is None:  # of a form that has no types: nothing is decoded
        return documents
    for column in wanted:
        if column not in features:
            raise _no_column(column, features)
        if not _is_plain(features[column]):
            told = one_line(features[column])[:200]
            raise DataUnavailable(
                "hf", f"the column {column!r} is no text, but {told}; choose a column of text"
            )
    return documents.select_columns(list(wanted))


def _is_plain(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return all(map(_is_plain, feature.values()))
    kind = type(feature).__name__
    return kind in _PLAIN or (kind in ("List", "LargeList") and _is_plain(feature.feature))


def _no_column(column: str, known: Iterable[str]) -> DataUnavailable:
    return DataUnavailable(
        "hf",
        f"there is no column {column!r}; the columns are {', '.join(sorted(known))[:300]}: set "
        "data.text_field or data.columns",
    )


def commit_of(dataset: str) -> str:
    """The newest commit of a dataset. Raises ``DataUnavailable`` or ``ExtraMissing``."""
    huggingface_hub = needed("huggingface_hub", f"the commit of {dataset}")
    try:
        return str(huggingface_hub.HfApi().dataset_info(dataset).sha)
    except hub_errors() as error:
        reason = reason_of(error)
        text = f"the commit of {dataset} is not known: {reason}; name it as {dataset}@COMMIT"
        raise DataUnavailable("hf", text) from error


def hub_address(name: str, commit: str, file: str) -> str:
    """The address of a file of a model. Raises ``ExtraMissing``."""
    huggingface_hub = needed("huggingface_hub", f"the model {name}")
    return str(huggingface_hub.hf_hub_url(name, file, revision=commit))


def hub_host(name: str) -> Host:
    """The hub, as the user of this machine is known to it (``hf auth login``, ``HF_ENDPOINT``).

    Raises ``ExtraMissing``.
    """
    constants = needed("huggingface_hub.constants", f"the model {name}")
    log_in = f"accept its licence at {constants.ENDPOINT}/{name} and log in with `hf auth login`"
    sent = needed("huggingface_hub.utils", f"the model {name}").build_hf_headers()
    return Host(
        headers={name: sent[name] for name in ("authorization",) if name in sent},
        remedies={401: log_in, 403: log_in},
        is_chosen=constants.ENDPOINT != HUB,
    )


def _loaded_tokenizer(named: str) -> Any:
    """The tokenizer ``owner/name@commit``; without a commit, the newest."""
    name, _, commit = named.partition("@")
    transformers = needed("transformers", f"the tokenizer {name!r}")
    hub = needed("huggingface_hub", f"the tokenizer {name!r}")
    try:
        with suppress(hub.errors.EntryNotFoundError):
            path = hub.hf_hub_download(name, "tokenizer.json", revision=commit or "main")
            checked(Path(path).read_bytes())
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, revision=commit or "main", trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise DataUnavailable("hf", f"tokenizer {name!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise DataUnavailable("hf", f"tokenizer {name!r} has no end-of-text token")
    return tokenizer


def hub_tokenizer_file(name: str, folder: Path) -> tuple[Path, str]:
    """A tokenizer of the hub as a ``tokenizer.json`` in ``folder``, and its end-of-text token."""
    _refuse_local(name.partition("@")[0])
    tokenizer = _loaded_tokenizer(name)
    if not tokenizer.is_fast:
        raise DataUnavailable(
            "hf", f"tokenizer {name!r} has no tokenizer.json; choose one that has"
        )
    content = tokenizer.backend_tokenizer.to_str().encode()
    path = folder / f"{blake3(content).hexdigest()}.json"
    try:
        write_whole(path, content)
    except OSError as error:
        raise DataUnavailable("hf", f"{path}: {error.strerror}") from error
    return path, str(tokenizer.eos_token)


def save_hub_tokenizer(name: str, folder: Path) -> int:
    """Write the files of a tokenizer of the hub; returns its end-of-text token."""
    _refuse_local(name.partition("@")[0])
    tokenizer = _loaded_tokenizer(name)
    tokenizer.save_pretrained(folder)
    return int(tokenizer.eos_token_id)
