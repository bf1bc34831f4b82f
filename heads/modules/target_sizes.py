"""Sizes of a target's blocks, from its config where that names them and from its modules where it does not.

I width of the MLP, D width of a state.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from configs.runtime.errors import InputError
from heads.frozen.hidden_states import blocks


def check_widths(target: PreTrainedModel) -> None:
    """Refuse a target whose embedding or output head has another width than its states, which heads read and write.

    Raises:
        InputError: it has, as OPT-350m.
    """
    width, head = target.config.get_text_config().hidden_size, target.get_output_embeddings()
    widths = {cast(nn.Embedding, target.get_input_embeddings()).weight.shape[1]}
    if isinstance(head, nn.Linear):  # another kind is refused by `heads.inference.causal_lm.head_rows`
        widths.add(head.in_features)
    if not widths <= {width}:
        raise InputError(
            f"{type(target).__name__} has states of width {width} and an embedding or output head of width "
            f"{', '.join(map(str, sorted(widths - {width})))}: heads need one width; distil a draft LM, or take another target"
        )


def mlp_width(target: PreTrainedModel) -> int:
    """Return the width of the target's MLPs; of several the most common one.

    Raises:
        InputError: neither its config nor its linear layers tell.
    """
    config = target.config.get_text_config()
    if (named := number_of(config, "intermediate_size")) is not None:
        return named
    # The last layer of an MLP leads from I back to D; other layers that end in D are no wider.
    inputs = [_num_inputs(module, config.hidden_size) for module in blocks(target).modules()]
    if not any(inputs):
        raise InputError(
            f"{type(target).__name__} has neither an intermediate_size in its config nor an MLP of linear layers, so the "
            "width of a head's MLP does not follow from it: heads that have layers of their own cannot be made for it"
        )
    return max(inputs)


def number_of(config: Any, name: str) -> int | None:
    """Return a whole number of a config, where blocks differ in it the most common one; None where there is none."""
    values = [getattr(each, name, None) for each in config.per_layer_config]  # one config a block
    for number, value in enumerate(values):
        if isinstance(value, list | tuple) and len(value) == len(values):
            values[number] = value[number]
    numbers = Counter(value for value in values if isinstance(value, int) and value > 0)
    return numbers.most_common(1)[0][0] if numbers else None


def longest_text(config: Any) -> int:
    """Return how many positions a target's config names; where it names none (ALiBi), a number that decides nothing."""
    return number_of(config, "max_position_embeddings") or number_of(config, "max_seq_len") or 2048


def _num_inputs(module: nn.Module, width: int) -> int:
    """Return how many features a linear layer reads that gives `width`; 0 for other modules."""
    if isinstance(module, nn.Linear) and module.out_features == width:
        return module.in_features
    return module.nx if isinstance(module, Conv1D) and module.nf == width else 0
