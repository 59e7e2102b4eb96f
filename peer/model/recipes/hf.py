"""A causal language model of the transformers package, built from its configuration.

Nothing is downloaded and no remote code is executed: the model class must be part of the
installed transformers.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from peer.errors import ExtraMissing, Fault, RunFileError
from peer.run_file.sections import HfModel


def check_installed() -> None:
    """Raise ``ExtraMissing`` without the package."""
    for package in ("transformers", "huggingface_hub"):
        if importlib.util.find_spec(package) is None:
            raise ExtraMissing("the model recipe 'hf'", "transformers", "hf")


def build_hf(recipe: HfModel, *, random_seed: int, weights: bool = True) -> nn.Module:
    """The model in fp32 on the CPU, with weights that transformers draws from the run's seed.

    Unlike those of ``gpt``, these weights come from torch's generator: two founders with different
    processors or versions may differ in the last bits. Peers that join take the weights of the run.
    """
    check_installed()
    import transformers
    from huggingface_hub import errors as hub_errors

    # transformers reports an invalid configuration with any of these errors, newer versions with
    # an error of their own.
    strict = getattr(hub_errors, "StrictDataclassError", ValueError)
    refusals = (
        *(ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError),
        *(AssertionError, ImportError, strict),
    )
    settings = dict(recipe.config)
    model_type = settings.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(model_type, **settings)
        with torch.random.fork_rng(devices=[]), torch.device("cpu" if weights else "meta"):
            torch.manual_seed(random_seed)
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=False
            )
    except refusals as error:
        reason = " ".join(str(error).split())[:300]
        problem = f"model.config is refused by transformers {transformers.__version__}: {reason}"
        raise RunFileError("run file", [Fault("model.config", problem)]) from error
    return model.float()
