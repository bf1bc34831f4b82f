"""The draft before training: blocks of the target kept, a smaller model taken, or a fresh one made."""

from __future__ import annotations

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from configs.errors import InputError
from configs.schema import StudentConfig
from distill.target import Target, move
from heads.identity import hash_tokenizer
from heads.kv_cache import check_rolls_back
from heads.lm_head import check_split


def initial_draft(config: StudentConfig, target: Target) -> PreTrainedModel:
    """Return the untrained draft in float32 on the target's device, in training mode.

    Raises:
        InputError: a kept block does not exist, or the model reads other token ids than the target.
    """
    if config.init == "target_layers":
        draft = keep_layers(target.model, config.layers or [])
    elif config.init == "model":
        draft = _other_model(str(config.path), target)
    else:
        draft = _fresh_model(str(config.path), target)
    draft = move(draft, target.device, torch.float32)
    check_rolls_back(draft)
    check_split(draft)
    if not config.train_embeddings:
        draft.get_input_embeddings().requires_grad_(False)
        draft.get_output_embeddings().requires_grad_(False)
    return draft.train()


def keep_layers(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Return a copy of a causal LM that has only these of its blocks; embeddings, final norm and head stay.

    Raises:
        InputError: the model has no such block.
    """
    text_config = model.config.get_text_config()
    if max(layers) >= text_config.num_hidden_layers:
        blocks = f"{type(model).__name__} has blocks 0 to {text_config.num_hidden_layers - 1}"
        raise InputError(f"student.layers: {max(layers)} was asked for, but {blocks}")
    config = copy.deepcopy(text_config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    draft = _from_config(config, model)
    new_index = {str(old): str(new) for new, old in enumerate(layers)}
    weights = {}
    for name, tensor in model.state_dict().items():
        head, found, tail = name.partition("model.layers.")
        index, _, rest = tail.partition(".")
        if not found:
            weights[name] = tensor
        elif index in new_index:
            weights[f"{head}{found}{new_index[index]}.{rest}"] = tensor
    draft.load_state_dict(weights)
    return draft


def _other_model(path: str, target: Target) -> PreTrainedModel:
    """Load a smaller model; its tokenizer must be the target's, while its embedding may hold more padded rows."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        draft = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"student.path: {path} does not hold a causal LM: {str(error).splitlines()[0]}") from error
    if hash_tokenizer(tokenizer) != target.identity.tokenizer_sha256:
        raise InputError(
            f"student.path: {path} has another tokenizer than {target.identity.name}; its drafts would mean other tokens"
        )
    return draft


def _fresh_model(path: str, target: Target) -> PreTrainedModel:
    """Make a randomly initialised model from a folder's `config.json`."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"student.path: {path} holds no model config: {str(error).splitlines()[0]}") from error
    rows, needed = config.get_text_config().vocab_size, len(target.tokenizer)
    if rows < needed:
        raise InputError(f"student.path: {path} has a vocabulary of {rows}, the target's tokenizer {needed}")
    return _from_config(config, target.model)


def _from_config(config: PreTrainedConfig, like: PreTrainedModel) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=like.config._attn_implementation)
