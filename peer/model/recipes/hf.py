"""A causal language model of the transformers package, built from its configuration.

Its weights are drawn, or read from the files of a published model that are on this machine. Nothing
is downloaded and no remote code is executed: the model class must be part of the installed
transformers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from peer.errors import ExtraMissing, Fault, PathError, RunFileError, one_line
from peer.installed import extra
from peer.run_file.sections import HfModel, Lora

NAMES_MAX = 5
"""Number of names that an error lists."""


class BaseUnfit(PathError):
    """The weights of a published model are not those of the model in the run file."""

    exit_code = 2
    message = "the base model is not the model of the run file ({path}): {reason}"


def check_installed() -> None:
    """Raise ``ExtraMissing`` without the package."""
    for package in ("transformers", "huggingface_hub"):
        if importlib.util.find_spec(package) is None:
            raise ExtraMissing("the model recipe 'hf'", "transformers", "hf")


def build_hf(
    recipe: HfModel, *, random_seed: int, weights: bool = True, base: Path | None = None
) -> nn.Module:
    """The model on the CPU, in fp32 except for the frozen base of adapters.

    ``base``: the folder with the weights of the recipe's base (of
    ``peer.extras.bases.base_models``); without it they are drawn from the run's seed. Unlike those
    of ``gpt``, these come from torch's generator: two founders with different processors or
    versions may differ in the last bits. Peers that join take the weights of the run. Raises
    ``ExtraMissing``, ``RunFileError``, ``BaseUnfit``.
    """
    check_installed()
    model = _built(recipe, random_seed=random_seed, weights=weights, base=base)
    if recipe.lora is None:
        return model.float()
    adapted: nn.Module = extra("bases.lora").with_adapters(
        model, recipe.lora, random_seed=random_seed
    )
    return adapted


def _built(recipe: HfModel, *, random_seed: int, weights: bool, base: Path | None) -> nn.Module:
    import transformers
    from huggingface_hub import errors as hub_errors

    # transformers reports an invalid configuration with any of these errors, newer versions with
    # an error of their own.
    strict = getattr(hub_errors, "StrictDataclassError", ValueError)
    refusals = (
        *(ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError),
        *(AssertionError, ImportError, strict),
    )
    settings = {**recipe.config, **dict.fromkeys(recipe.config_unset or ())}
    model_type = settings.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(model_type, **settings)
        if weights and base is not None:
            return _loaded(recipe.lora, config, base)
        with torch.random.fork_rng(devices=[]), torch.device("cpu" if weights else "meta"):
            torch.manual_seed(random_seed)
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=False
            )
    except refusals as error:
        reason = one_line(error)
        problem = f"model.config is refused by transformers {transformers.__version__}: {reason}"
        raise RunFileError("run file", [Fault("model.config", problem)]) from error
    return model


def _loaded(lora: Lora | None, config: Any, base: Path) -> nn.Module:
    """The published weights. They must be those of the configuration, all of them."""
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32}
    if lora is not None and lora.base_dtype != "fp32":
        options["dtype"] = torch.bfloat16
        if lora.base_dtype != "bf16":
            adapters = extra("bases.lora")
            adapters.check_quantizer(lora)
            device = 0 if torch.cuda.is_available() else "cpu"
            options |= {
                "quantization_config": adapters.quantization(lora),
                "device_map": {"": device},
            }
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            base,
            config=config,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
        raise BaseUnfit(str(base), one_line(error)) from error
    if missing := sorted(info["missing_keys"]):
        raise BaseUnfit(
            str(base),
            f"{', '.join(missing[:NAMES_MAX])} "
            + (f"and {len(missing) - NAMES_MAX} more are" if missing[NAMES_MAX:] else "is")
            + " not in its files; write the run file with `shoal run new --base`",
        )
    # It is loaded for use. Dropout and recomputed activations are for a model in training.
    loaded: nn.Module = model.train()
    return loaded
