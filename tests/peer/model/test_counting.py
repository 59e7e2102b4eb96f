"""Counting a model before it is built, when its configuration comes from a stranger."""

from __future__ import annotations

import errno
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peer.errors import RunFileError
from peer.model.recipes import build_model, counting, trained_parameters
from peer.model.recipes.counting import size_of
from peer.processes import ran_out_of_memory
from peer.run_file.hf_config import MODEL_TYPES
from peer.run_file.sections import GptModel, HfModel, RunFile

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


def test_a_model_of_our_own_is_counted_without_a_child() -> None:
    run = RunFile(model=GptModel(layers=1, width=16, heads=2))
    parameters = trained_parameters(build_model(run)).values()
    assert size_of(run).parameters == sum(p.numel() for p in parameters)


def transformers_models() -> Path:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    return Path(transformers.__file__).parent / "models"


HUGE = LLAMA | {"num_hidden_layers": 4096}
COUNT = f"""
import sys, msgspec
from peer.model.recipes import counting
counting.LIMIT = VALUE
answer = counting._count(counting.HfModel(config={json.dumps(HUGE)}))
import socket
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", PORT)),
    lambda: socket.getaddrinfo("localhost", PORT),
):
    try:
        attempt()
    except PermissionError:
        continue
    sys.exit("the network is open")
sys.stdout.buffer.write(msgspec.json.encode(answer))
"""
"""The child with a lower limit, which tries to open a connection afterwards."""


def count_huge(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers_models()
    started = subprocess.run
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = COUNT.replace("LIMIT", limit).replace("VALUE", str(value))
        program = program.replace("PORT", str(server.getsockname()[1]))

        def limited(command: list[str], **options: Any) -> Any:
            assert command[1:] == ["-P", "-m", "peer.model.recipes.counting"]
            return started([sys.executable, "-c", program], **options)

        monkeypatch.setattr(subprocess, "run", limited)
        monkeypatch.setattr(counting, limit, value)
        size_of(RunFile(model=HfModel(config=HUGE)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (SystemError("returned NULL without setting an exception"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
    ],
    ids=repr,
)
def test_a_failed_allocation_is_told_in_whatever_form_it_comes(
    error: Exception, expected: bool
) -> None:
    assert ran_out_of_memory(error) is expected


@pytest.mark.slow
def test_a_configuration_that_takes_too_long_ends_only_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RunFileError, match=r"model\.config is too .*more than 1 s of processor"):
        count_huge("PROCESSOR_MAX_S", 1, monkeypatch)


FETCHES = re.compile(
    r"lazy_load_kernel|get_kernel\(|hf_hub_download|cached_file|requests\.|urlopen|causal_conv1d"
    r"|load_backbone|\.from_pretrained\("
)


def test_the_code_of_examined_models_fetches_nothing() -> None:
    models = transformers_models()
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    for name in map(model_type_to_module_name, sorted(MODEL_TYPES)):
        source = (models / name / f"modeling_{name}.py").read_text(encoding="utf-8")
        # Docstrings have examples of loading weights.
        code = re.sub(r'r?"""[\s\S]*?"""', "", source)
        assert not FETCHES.search(code), name
