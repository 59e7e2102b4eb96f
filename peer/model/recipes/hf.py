"""A causal language model of the transformers package, from its configuration alone.

Nothing is downloaded and no remote code is ever trusted: the model class must be
one that the installed transformers ships.
"""

from __future__ import annotations

import torch
from torch import nn

from peer.errors import ExtraMissing, Fault, RunFileError
from peer.run_file.sections import HfModel


def build_hf(recipe: HfModel, *, random_seed: int, weights: bool = True) -> nn.Module:
    """The model in fp32 on the CPU, drawn by transformers' own rules from the run's seed.

    Unlike ``gpt``'s, these draws are torch's: two founders with different processors or
    versions may differ in the last bits. Whoever joins takes the weights of the run.
    """
    try:
        import transformers
        from huggingface_hub import errors as hub_errors
    except ImportError as error:
        raise ExtraMissing("the model recipe 'hf'", "transformers", "hf") from error
    # transformers checks a configuration by failing somewhere; then the file is at fault. Newer
    # ones have errors of their own for it.
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
