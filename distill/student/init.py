"""The draft before training: blocks of the target kept, a smaller model loaded, or a fresh one made; LoRA adapters by peft.

Adapters are put into the draft itself, which stays the causal LM it was. Merging restores the modules from before, so that an
artifact holds none.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from configs.runtime.errors import ConfigError, InputError, first_line
from configs.schema.target import TargetConfig
from configs.schema.training import LoraSettings, StudentConfig
from heads.device import restored_random_state
from heads.frozen.hidden_states import blocks, causal_config, config_of_blocks, num_blocks, overridden
from heads.frozen.identity import hash_tokenizer, locate
from heads.frozen.loading import Target, move
from heads.frozen.placement import real_weight
from heads.frozen.weights import UNREADABLE, auto_class, cause_of, loader_of
from heads.inference.causal_lm import read_documents
from heads.inference.model_checks import check_on_probe, check_rolls_back, check_split, probe_ids, relative_error
from heads.inference.runner import backbone

UNTRUSTED = {"trust_remote_code": False}  # otherwise transformers asks on the terminal

log = logging.getLogger("draftsmith")


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
    choose_trained(draft, config)
    return draft.train()


def choose_trained(draft: PreTrainedModel, config: StudentConfig) -> None:
    """Put adapters on a draft where they are asked for, and freeze what is not trained, in place."""
    if config.lora is not None:
        add_adapters(draft, config.lora)
    # Random embeddings must be trained: frozen, they would stay noise.
    train_embeddings = config.train_embeddings or config.init == "fresh"
    draft.get_input_embeddings().requires_grad_(train_embeddings)
    draft.get_output_embeddings().requires_grad_(train_embeddings)


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
    """Load a smaller model with the target's tokenizer, and give it as many tokens as the target has, for which engines ask."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **UNTRUSTED)
        draft = loader_of(locate(TargetConfig(name=path)), torch.float32)()
    except UNREADABLE as error:
        raise InputError(
            f"student.path: {path} does not hold a causal LM and its tokenizer: {cause_of(Path(path), error)}"
        ) from error
    if auto_class(draft.config) is not AutoModelForCausalLM:
        raise InputError(f"student.path: {path} holds more than a causal LM ({type(draft).__name__}); a draft is a causal LM")
    if hash_tokenizer(tokenizer) != target.identity.tokenizer_sha256:
        raise InputError(
            f"student.path: {path} has another tokenizer than {target.identity.name}; its drafts would mean other tokens"
        )
    rows, needed = draft.config.get_text_config().vocab_size, len(target.tokenizer)
    if rows < needed:
        raise InputError(f"student.path: {path} has a vocabulary of {rows}, the target's tokenizer {needed}")
    if rows != target.vocab_size:
        log.info("student.path: %s has %d rows of tokens, and gets the target's %d", path, rows, target.vocab_size)
        resize_vocabulary(draft, target.vocab_size)
    return draft


def resize_vocabulary(model: PreTrainedModel, size: int) -> None:
    """Cut the last rows off a causal LM's embedding and head, or add rows, in place.

    Rows that are added are the mean of those there: such a logit is never above the largest.
    """
    known = model.config.get_text_config().vocab_size
    with restored_random_state(model.device):  # new rows are drawn before they get their values
        model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            for weight in part.parameters():
                weight[known:] = weight[:known].mean(0)


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


# --- blocks of the target -----------------------------------------------------------------------------------------

REMEDY = "choose other student.layers, or give student.init 'fresh', 'model' or 'config'"


def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a copy in float32 of a causal LM with some of its blocks, and its embeddings, final norm and head.

    What a block computes may depend on its place: on entries of the config (`config_of_blocks`), on its number, on how
    many there are. So the draft is compared on a probe with the model whose other blocks are passed over.
    """
    name_of_class, total = type(model).__name__, num_blocks(model)
    if max(layers) >= total:
        raise InputError(f"student.layers: {max(layers)} was asked for, but {name_of_class} has blocks 0 to {total - 1}")
    config = causal_config(config_of_blocks(model.config.get_text_config(), layers))
    attention = model.config._attn_implementation
    which = f"student.layers: blocks {', '.join(map(str, layers))} of {name_of_class}"
    try:
        draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise InputError(f"{which} make no model of their own ({first_line(error)}); {REMEDY}") from error
    weights = _kept_weights(model, draft, layers)
    try:
        draft.load_state_dict(weights, assign=True)  # in the target's dtype, in which the probe then compares
    except RuntimeError as error:
        reason = str(error).partition("\n")[2].strip().partition("\n")[0]
        raise InputError(
            f"{which} cannot stand alone: their kind follows from their place, or weights are shared by all blocks ({reason}); "
            f"{REMEDY}"
        ) from error
    draft.tie_weights()
    if model.device.type != "meta":  # a plan builds drafts without any values to compare
        draft.to(model.device)
        check_on_probe(
            model,
            partial(_kept_error, draft=draft.eval(), layers=layers),
            fails=f"{which} do not run as a model of their own ({{}}); {REMEDY}",
            differs=f"{which} compute something else as a model of their own than in the target, by {{:.2g}} of its states: "
            f"they depend on their number or on the count; {REMEDY}",
        )
    return draft.float()


def _kept_weights(model: PreTrainedModel, draft: PreTrainedModel, layers: Sequence[int]) -> dict[str, Tensor]:
    """Return copies of the target's weights under their names in the draft, without those of the blocks left out."""
    prefix, own_prefix = (f"{_name_of(each, blocks(each))}." for each in (model, draft))
    # Of a model that also takes images or sound the text part is copied, under the names of a causal LM.
    parts = [(backbone(model), backbone(draft)), (model.get_output_embeddings(), draft.get_output_embeddings())]
    renamed = {f"{_name_of(model, theirs)}.": f"{_name_of(draft, ours)}." for theirs, ours in parts}
    has_more = model.config.get_text_config() is not model.config
    new_index = {str(old): str(new) for new, old in enumerate(layers)}
    weights, own = {}, draft.state_dict()
    for name, tensor in model.state_dict().items():
        index, _, rest = name.removeprefix(prefix).partition(".")
        part = next((part for part in renamed if name.startswith(part)), None) if has_more else ""
        if name.startswith(prefix):
            if index in new_index:
                weights[f"{own_prefix}{new_index[index]}.{rest}"] = real_weight(model, name, tensor).clone()
        elif part is not None:
            own_name = renamed.get(part, "") + name.removeprefix(part)
            weights[own_name] = _part_for(tensor, own.get(own_name, tensor).shape, layers, num_blocks(model)).clone()
    return weights


def _part_for(tensor: Tensor, shape: Sequence[int], layers: Sequence[int], total: int) -> Tensor:
    """Return the part of a weight outside the blocks that is the kept ones', where it has one for each (Gemma 3n); else all."""
    for axis, (size, own_size) in enumerate(zip(tensor.shape, shape, strict=False)):
        if size != own_size and size * len(layers) == own_size * total:
            return tensor.unflatten(axis, (total, -1)).index_select(axis, torch.tensor(layers)).flatten(axis, axis + 1)
    return tensor


@contextmanager
def _passed_over(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[None]:
    """Let every block that is not of these return what it reads."""
    left_out = [block for number, block in enumerate(blocks(model)) if number not in layers]

    def return_input(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        states_BTE = args[0] if args else kwargs["hidden_states"]
        return (states_BTE, *output[1:]) if isinstance(output, tuple | list) else states_BTE

    handles = [block.register_forward_hook(return_input, with_kwargs=True) for block in left_out]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kept_error(model: PreTrainedModel, draft: PreTrainedModel, layers: Sequence[int]) -> float:
    ids_1T = probe_ids(model)
    with _passed_over(model, layers):
        expected_1TE = read_documents(model, ids_1T, None)
    return relative_error(read_documents(draft, ids_1T, None), expected_1TE)


def _name_of(model: PreTrainedModel, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)
