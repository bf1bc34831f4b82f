"""Several documents in one row of a causal LM: what tells them apart, and which models listen.

transformers (`masking_utils`, from 5.0) takes a row whose positions do not rise by one for several documents: it lets no token
see another document's, and counts a window's positions within one. It does so in training only: without a cache and without
a mask, under sdpa and eager attention; flash attention looks for it in batches of a single row. So positions are all that
has to be handed over, and a model is asked on a probe whether it heeds them.
B rows, T positions, D width.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.errors import InputError, first_line
from heads.lm_head import backbone
from heads.rollback import carried_state

PROBE = ((5, 4), (2, 7))  # lengths of the documents in each row
_CHECKED: WeakSet[PreTrainedModel] = WeakSet()  # whose states on the probe were right


def read_documents(model: PreTrainedModel, ids_BT: Tensor, packed_positions_BT: Tensor | None) -> Tensor:
    """Return the final, normed hidden states `[B, T, D]` of whole rows; padding stands right, so causality alone hides it.

    Args:
        model: run without a cache.
        ids_BT: token ids.
        packed_positions_BT: positions from 0 in each document; None: each row is a single one.
    """
    apart = {} if packed_positions_BT is None else {"position_ids": packed_positions_BT}
    states_BTD: Tensor = backbone(model)(input_ids=ids_BT, use_cache=False, **apart).last_hidden_state
    return states_BTD


def check_keeps_apart(model: PreTrainedModel) -> None:
    """Refuse a model in which the documents of a row would see each other.

    Raises:
        InputError: it has recurrent, linear-attention or otherwise unknown layers; or on a probe the states of documents in
            one row are not those of each alone (some make their positions of a padding mask and know no others).
    """
    remedy = "set data.packing to null"
    if (what := carried_state(model)) is not None:
        raise InputError(
            f"data.packing: {type(model).__name__} has {what}, which would run on from one conversation of a row into the "
            f"next; {remedy}"
        )
    if model in _CHECKED:
        return
    try:
        error = _probe_error(model)
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as failure:
        raise InputError(
            f"data.packing: {type(model).__name__} does not take the positions of several conversations in a row "
            f"({first_line(failure)}); {remedy}"
        ) from failure
    if not error <= max(1e-4, 16 * torch.finfo(model.dtype).eps):
        raise InputError(
            f"data.packing: conversations in one row of {type(model).__name__} see each other: on a probe its states differ by "
            f"{error:.2g} of them from those of each alone; {remedy}"
        )
    _CHECKED.add(model)


def _probe_error(model: PreTrainedModel) -> float:
    """Return how far the states of documents in shared rows are from those of each alone, as a share of these.

    Root mean square.
    """
    was_training = model.training
    model.eval()  # dropout would be another at each forward
    vocab_size = model.config.get_text_config().vocab_size
    ids_BT = (torch.arange(len(PROBE) * sum(PROBE[0]), device=model.device) * 7919 % vocab_size).view(len(PROBE), -1)
    positions_BT = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in PROBE]).to(model.device)
    with torch.no_grad():
        together_BTD = read_documents(model, ids_BT, positions_BT)
        parts = [part.unsqueeze(0) for row, lengths in zip(ids_BT, PROBE, strict=True) for part in row.split(lengths)]
        alone = torch.cat([read_documents(model, part, None)[0] for part in parts])
    model.train(was_training)
    return float((together_BTD.flatten(0, 1) - alone).float().norm() / alone.float().norm())
