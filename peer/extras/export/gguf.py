"""An export as one GGUF file, for llama.cpp and programs that are built on it.

It is made of the export for transformers: the parameters under the names that the package ``gguf``
gives them, the settings of the architecture, and the tokenizer. llama.cpp must compute the same
function and split text in the same way, so only models that are known to do so are written: Llama
and Qwen3, with tokens of bytes or the byte-level BPE of GPT-2. llama.cpp's own script knows more of
both.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from peer.errors import ExtraMissing, PeerError
from peer.extras.export.architecture import architecture_of
from peer.extras.export.folder import (
    Export,
    check_exportable,
    flush,
    folder_beside,
    write_model_files,
)
from peer.run_file.sections import GptModel, HfModel, RunFile

ARCHITECTURES = ("llama", "qwen3")

UNUSED_MERGE = "\u0200 \u0200"
"""A merge of characters that stand for no byte: llama.cpp demands a list that is not empty."""

NORMAL, CONTROL = 1, 3
"""Kinds of tokens in GGUF."""


class NoGguf(PeerError):
    """A model that is not written as GGUF here."""

    exit_code = 2
    reason: str
    message = (
        "--to gguf: {reason}; llama.cpp's convert_hf_to_gguf.py may take the folder that "
        "`--to hf` writes"
    )


def check(run: RunFile) -> None:
    """Raise ``NoGguf``, ``ExtraMissing``, or what ``check_exportable`` raises."""
    check_exportable(run)
    if isinstance(run.model, GptModel):
        _check_architecture(architecture_of(run.model).model_type)
    elif isinstance(run.model, HfModel):
        _check_architecture(str(run.model.config.get("model_type")))
    if importlib.util.find_spec("gguf") is None:
        raise ExtraMissing("--to gguf", "gguf", "gguf")


def write(export: Export, out: Path) -> None:
    """Write the file; it is complete or absent.

    Raises ``NotWritten``, and what ``check`` raises.
    """
    check(export.outer.run)
    with folder_beside(out) as temporary:
        write_model_files(export, temporary)
        if export.tokenizer is not None:
            for name, content in export.tokenizer.files.items():
                (temporary / name).write_bytes(content)
        made = temporary / "made.gguf"
        _convert(temporary, made, export.outer.run)
        flush(made)
        made.rename(out)


def _check_architecture(model_type: str) -> None:
    if model_type not in ARCHITECTURES:
        raise NoGguf(f"it writes {' and '.join(ARCHITECTURES)}, and the model is {model_type!r}")


def _convert(folder: Path, out: Path, run: RunFile) -> None:
    """Write what a folder for transformers has as GGUF."""
    import gguf

    config = json.loads((folder / "config.json").read_bytes())
    writer = gguf.GGUFWriter(out, config["model_type"])
    writer.add_name(run.name)
    if run.description:
        writer.add_description(run.description)
    if run.licence:
        writer.add_license(run.licence)
    writer.add_string("shoal.run_id", run.run_id)
    _add_settings(writer, config)
    _add_tokenizer(writer, folder, config)
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = dict(_tensors(folder))
    named = {}
    for name in tensors:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None or name.endswith(".bias"):
            raise NoGguf(f"the parameter {name} has no place in GGUF's {config['model_type']}")
        named[found] = name
    in_bf16 = config["dtype"] == "bfloat16"
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if in_bf16 else gguf.LlamaFileType.ALL_F32)
    try:
        for found, name in named.items():
            values = _values(tensors[name], name, config)
            kinds = gguf.GGMLQuantizationType
            kind = kinds.BF16 if values.dtype == torch.bfloat16 else kinds.F32
            array = _in_numpy(values)
            if kind == kinds.BF16:
                array = array.view("u1")  # the writer turns the shape of bytes into that of values
            writer.add_tensor_info(found, array.shape, array.dtype, array.nbytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in named.values():
            writer.write_tensor_data(_in_numpy(_values(tensors[name], name, config)))
    finally:
        writer.close()


def _in_numpy(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same bytes; numpy has no bf16."""
    array: np.ndarray[Any, Any] = (
        values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    ).numpy()
    return array


def _tensors(folder: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dictionary
                yield name, (path, name)


def _values(place: tuple[Path, str], name: str, config: Mapping[str, Any]) -> torch.Tensor:
    """A parameter as llama.cpp has it. Vectors are fp32 there, whatever the matrices are."""
    with safe_open(place[0], "pt") as file:
        values: torch.Tensor = file.get_tensor(place[1])
    if values.ndim < 2:
        return values.float().contiguous()
    if config["model_type"] == "llama" and ".self_attn." in name:
        if ".q_proj." in name:
            values = _interleaved(values, config["num_attention_heads"])
        elif ".k_proj." in name:
            values = _interleaved(values, config["num_key_value_heads"])
    return values.contiguous()


def _interleaved(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of GGUF's Llama, whose rotary positions pair feature 2i with 2i + 1."""
    rows, columns = values.shape
    return values.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _add_settings(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    features = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise NoGguf(f"its rotary positions are scaled ({rope['rope_type']!r})")
    base = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(features)
    writer.add_value_length(features)
    writer.add_rope_dimension_count(features)
    writer.add_rope_freq_base(float(base))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    except FileNotFoundError:
        raise NoGguf("the run has no tokenizer.json") from None
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    model, size = tokenizer["model"], config["vocab_size"]
    if model["type"] != "BPE" or not _splits_as_gpt2(tokenizer, merges=bool(model["merges"])):
        raise NoGguf("its tokenizer splits text otherwise than the byte-level BPE of GPT-2")
    tokens = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, NORMAL)
    for each in tokenizer.get("added_tokens") or ():
        tokens[each["id"]] = each["content"]
        kinds[each["id"]] = CONTROL if each["special"] else NORMAL
    if max(tokens) >= size:
        raise NoGguf(f"its tokenizer has token {max(tokens)}, and the model a vocabulary of {size}")
    unused = 5
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(n, f"[PAD{n}]") for n in range(size)])
    writer.add_token_types([kinds.get(n, unused) for n in range(size)])
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    writer.add_token_merges(merges or [UNUSED_MERGE])
    writer.add_add_bos_token(False)
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    if end is not None:
        writer.add_eos_token_id(end)
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if template:
        writer.add_chat_template(template)


def _splits_as_gpt2(tokenizer: Mapping[str, Any], *, merges: bool) -> bool:
    """Return whether llama.cpp's pre-tokenizer "gpt-2" gives the same tokens.

    Without merges every byte is a token, wherever the text is split.
    """
    pre = tokenizer.get("pre_tokenizer") or {}
    if tokenizer.get("normalizer") is not None or pre.get("type") != "ByteLevel":
        return False
    if pre.get("add_prefix_space"):
        return False
    return pre.get("use_regex", True) is True or not merges
