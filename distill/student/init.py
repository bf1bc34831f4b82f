"""The draft before training: blocks of the target kept, a smaller model loaded, or a fresh one made; LoRA adapters by peft.

Adapters are put into the draft itself, which stays the causal LM it was. Merging restores the modules from before, so that an
artifact holds none.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from configs.runtime.errors import ConfigError, InputError, first_line
from configs.schema.target import TargetConfig
from configs.schema.training import LoraSettings, StudentConfig
from distill.student.kept_blocks import keep_layers
from heads.frozen.checkpoint_files import UNREADABLE
from heads.frozen.identity import hash_tokenizer, locate
from heads.frozen.loading import Target, move
from heads.frozen.model_config import auto_class, causal_config, overridden
from heads.frozen.weights import loader_of
from heads.inference.model_checks import check_rolls_back, check_split

UNTRUSTED = {"trust_remote_code": False}  # otherwise transformers asks on the terminal


def initial_draft(config: StudentConfig, target: Target) -> PreTrainedModel:
    """Return the untrained draft in float32 on the target's device, in training mode, frozen where it is not trained."""
    if config.init == "target_layers":
        draft = keep_layers(target.model, config.layers or [])
    elif config.init == "model":
        draft = _other_model(str(config.path), target)
    else:
        draft = _overridden_model(config.overrides or {}, target)
    draft = move(draft, target.device).eval()  # dropout would blur the checks
    check_rolls_back(draft)
    check_split(draft)
    if config.lora is not None:
        add_adapters(draft, config.lora)
    # Random embeddings must be trained: frozen, they would stay noise.
    train_embeddings = config.train_embeddings or config.init == "fresh"
    draft.get_input_embeddings().requires_grad_(train_embeddings)
    draft.get_output_embeddings().requires_grad_(train_embeddings)
    return draft.train()


def add_adapters(draft: PreTrainedModel, settings: LoraSettings) -> None:
    """Put adapters on a draft's linear layers, in place, and freeze everything else. Until trained they change nothing."""
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules="all-linear")
    inject_adapter_in_model(config, draft)  # peft leaves the head out


def merge_adapters(draft: PreTrainedModel) -> None:
    """Replace every adapted layer, in place, by an ordinary one that computes the same; without adapters do nothing."""
    adapted = [(name, module) for name, module in draft.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, layer in adapted:
        layer.merge()
        parent, _, own_name = name.rpartition(".")
        setattr(draft.get_submodule(parent), own_name, layer.get_base_layer())
    if adapted:
        del draft.peft_config  # peft's record, which would outlive the adapters


def _other_model(path: str, target: Target) -> PreTrainedModel:
    """Load a smaller model; its tokenizer must be the target's, while its embedding may hold more padded rows."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **UNTRUSTED)
        draft = loader_of(locate(TargetConfig(name=path)), torch.float32)()
    except UNREADABLE as error:
        raise InputError(f"student.path: {path} does not hold a causal LM and its tokenizer: {first_line(error)}") from error
    if auto_class(draft.config) is not AutoModelForCausalLM:
        raise InputError(f"student.path: {path} holds more than a causal LM ({type(draft).__name__}); a draft is a causal LM")
    if hash_tokenizer(tokenizer) != target.identity.tokenizer_sha256:
        raise InputError(
            f"student.path: {path} has another tokenizer than {target.identity.name}; its drafts would mean other tokens"
        )
    rows, needed = draft.config.get_text_config().vocab_size, len(target.tokenizer)
    if rows < needed:
        raise InputError(f"student.path: {path} has a vocabulary of {rows}, the target's tokenizer {needed}")
    return draft


def overridden_config(overrides: dict[str, bool | int | float | str], model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of a new draft: the target's own with some values replaced."""
    config = model.config.get_text_config()
    values = config.to_dict()
    for name in overrides:
        if name not in values:
            nearest = difflib.get_close_matches(name, values, n=1, cutoff=0.0)[0]
            raise ConfigError(f"student.overrides: the target's config has no {name!r}; the nearest it has is {nearest!r}")
    if "vocab_size" in overrides:
        raise ConfigError("student.overrides: vocab_size is the target's; draft_vocab_size makes the draft say fewer tokens")
    with _making_model(overrides):
        return overridden(config, overrides)


def _overridden_model(overrides: dict[str, bool | int | float | str], target: Target) -> PreTrainedModel:
    config, attention = causal_config(overridden_config(overrides, target.model)), target.model.config._attn_implementation
    with _making_model(overrides):
        draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
        check_split(draft)  # its probe is a forward: shapes that contradict each other fail here
    return draft


@contextmanager
def _making_model(overrides: dict[str, bool | int | float | str]) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, StrictDataclassError) as error:
        raise ConfigError(f"student.overrides: {overrides} make no model: {' '.join(str(error).split())}") from error
