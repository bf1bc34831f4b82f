"""A draft made of the target's own blocks, some of them; embeddings, final norm and head are kept.

What a block computes may depend on its place: on entries of the config (`heads.frozen.model_config`), on its number, on how
many there are. So the draft is compared on a probe with the target whose other blocks are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.frozen.hidden_states import blocks, num_blocks
from heads.frozen.model_config import causal_config, config_of_blocks
from heads.frozen.placement import real_weight
from heads.inference.causal_lm import read_documents
from heads.inference.model_checks import check_on_probe, probe_ids, relative_error
from heads.inference.runner import backbone

REMEDY = "choose other student.layers, or give student.init 'fresh', 'model' or 'config'"


def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a copy in float32 of a causal LM with only these of its blocks, of which it must compute what it did with them."""
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
