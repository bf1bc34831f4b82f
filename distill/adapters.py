"""LoRA by peft: low-rank adapters beside a draft's frozen linear layers, and their merging into ordinary weights.

The adapters are put into the draft itself, which stays the causal LM it was: losses, checkpoints and wrappers see nothing but
a few more parameters. Merging gives back exactly the modules from before, so that an artifact knows nothing of adapters.
"""

from __future__ import annotations

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from configs.errors import ConfigError
from configs.learning import LoraSettings


def add_adapters(draft: PreTrainedModel, settings: LoraSettings) -> None:
    """Put adapters into a draft, in place, and freeze everything else. Until trained they change nothing.

    Raises:
        ConfigError: no layer has such a name, a layer cannot be adapted, or the name is that of the embedding or the head.
    """
    names = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear" if names is None else list(names),  # peft's word leaves the head out
    )
    linear = sorted({name.rpartition(".")[2] for name, module in draft.named_modules() if isinstance(module, nn.Linear)})
    try:
        inject_adapter_in_model(config, draft)
    except ValueError as error:
        raise ConfigError(
            f"student.lora.target_modules: cannot adapt {names}; linear layers are {', '.join(linear)}"
        ) from error
    if any(isinstance(end, BaseTunerLayer) for end in (draft.get_input_embeddings(), draft.get_output_embeddings())):
        raise ConfigError(
            "student.lora.target_modules: embedding and head cannot be adapted; train_embeddings trains them whole"
        )


def merge_adapters(draft: PreTrainedModel) -> None:
    """Replace every adapted layer, in place, by an ordinary one that computes the same; without adapters do nothing."""
    adapted = [(name, module) for name, module in draft.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, layer in adapted:
        layer.merge()
        parent, _, own_name = name.rpartition(".")
        setattr(draft.get_submodule(parent), own_name, layer.get_base_layer())
    if adapted:
        del draft.peft_config  # peft's note on the model, which would outlive the adapters
