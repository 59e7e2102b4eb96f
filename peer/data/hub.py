"""Datasets and tokenizers of the Hugging Face hub.

The author of a dataset is a stranger: only text in files of the dataset itself is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from dht.whole_files import write_whole
from peer.data.text.downloads import Host
from peer.data.text.tokenizer_json import checked
from peer.errors import DataUnavailable, one_line
from peer.https import reason_of
from peer.installed import check_installed, hub_errors, needed
from peer.run_file.places import HUB_FILE, TEXT_FORMATS
from peer.run_file.sections import FilesData, FileSource, HfData

HUB = "https://huggingface.co"


def hub_files(recipe: HfData) -> FilesData:
    """The files of a dataset at its commit, to be read as other files are.

    Raises ``DataUnavailable`` or ``ExtraMissing``.
    """
    check_hub(recipe)
    failures: tuple[type[Exception], ...] = (*hub_errors(), KeyError)
    try:
        commit = checked_commit(recipe.dataset, recipe.revision)
        import datasets

        # It knows which files are of which split. It reads none of them.
        builder = datasets.load_dataset_builder(recipe.dataset, recipe.subset, revision=commit)
        by_split = {
            str(split): list(files) for split, files in (builder.config.data_files or {}).items()
        }
    except failures as error:
        raise DataUnavailable("hf", f"{recipe.dataset}: {one_line(error)}") from error
    if recipe.split not in by_split:
        known = ", ".join(sorted(by_split))
        raise DataUnavailable(
            "hf",
            f"{recipe.dataset} has no split {recipe.split!r}; it has {known[:300]}: set data.split",
        )
    files = by_split[recipe.split]
    check_files(recipe.dataset, files)
    alike = set(recipe.__struct_fields__) & set(FilesData.__struct_fields__)
    source = FileSource(files=files, text_field=recipe.text_field)
    return FilesData(sources=[source], **{name: getattr(recipe, name) for name in alike})


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
        configs = [config for config in card.get("configs") or () if isinstance(config, Mapping)]
        for text in _texts(
            [(config.get("data_files"), config.get("data_dir")) for config in configs]
        ):
            # A colon is part of an address or of an archive inside another file.
            if ":" in text or text.startswith(("/", "~")) or ".." in text.split("/"):
                raise DataUnavailable("hf", f"{dataset} refers to a place outside of it: {text}")
    return commit


def _texts(value: object) -> Iterator[str]:
    """All strings in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def check_files(dataset: str, files: Iterable[str]) -> None:
    """Check that a dataset is read from its own files. Raises ``DataUnavailable``.

    The README of a dataset may name other files: local ones, which training would reveal, or
    addresses that only this machine reaches.
    """
    for file in files:
        if not file.startswith(f"{HUB_FILE}datasets/{dataset}@") or ".." in file.split("/"):
            raise DataUnavailable("hf", f"{dataset} refers to a file outside of it: {file[:200]}")
        if not file.endswith(TEXT_FORMATS):
            raise DataUnavailable(
                "hf",
                f"{dataset} has the file {file.rpartition('/')[2][:200]!r}; files that can be read "
                f"end in {', '.join(TEXT_FORMATS)}. The hub makes .parquet of most datasets: set "
                "data.revision to the newest commit of the dataset's branch refs/convert/parquet",
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
