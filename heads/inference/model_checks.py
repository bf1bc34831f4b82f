"""Checks of a causal LM on a probe, before anything is decoded or trained with it.

`check_rolls_back`: may rejected tokens be taken back? What a model declares is looked at first; then transformers' own
forward is tried on `heads.inference.kv_cache` with a draft that is rejected.

`check_keeps_apart`: may several documents stand in one row? transformers (`masking_utils`, from 5.0) takes a row whose
positions do not rise by one for several documents: it lets no token see another document's, and counts a window's positions
within one. It does so in training only: without a cache and without a mask, under sdpa and eager attention; flash attention
looks for it in batches of a single row. So positions are all that has to be handed over.

Each check runs once for each model. B rows, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.inference.causal_lm import backbone
from heads.inference.kv_cache import forward_rows, new_cache

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
DOCUMENTS = ((5, 4), (2, 7))  # lengths of the documents in each row of the probe
_ROLLS_BACK: WeakSet[PreTrainedModel] = WeakSet()  # models that have passed
_KEEPS_APART: WeakSet[PreTrainedModel] = WeakSet()


def check_rolls_back(model: PreTrainedModel) -> None:
    """Refuse a model whose memory of the past cannot be taken back after a rejected draft.

    Raises:
        InputError: it has recurrent, linear-attention or otherwise unknown layers; or on a probe with a rejected draft its
            states are not those of one forward over the text (some make their positions of a plain padding mask).
    """
    name = type(model).__name__
    if (what := carried_state(model)) is not None:
        raise InputError(f"{name} has {what}: rejected tokens cannot be rolled back, so it cannot be decoded speculatively")
    _check_probe(
        model,
        _ROLLS_BACK,
        _rollback_error,
        fails=f"{name} does not run on a cache whose rows can be rolled back ({{}}), so it cannot be decoded here; "
        "take a model of another family",
        differs=f"{name} computes other states after a rejected draft than without it, by {{:.2g}} of them: rejected tokens "
        "cannot be rolled back, so it cannot be decoded speculatively",
        allow_nan=True,  # states that are no numbers are the decoder's to report, by request
    )


def check_keeps_apart(model: PreTrainedModel) -> None:
    """Refuse a model in which the documents of a row would see each other.

    Raises:
        InputError: it has recurrent, linear-attention or otherwise unknown layers; or on a probe the states of documents in
            one row are not those of each alone (some make their positions of a padding mask and know no others).
    """
    name, remedy = type(model).__name__, "set data.packing to null"
    if (what := carried_state(model)) is not None:
        raise InputError(
            f"data.packing: {name} has {what}, which would run on from one conversation of a row into the next; {remedy}"
        )
    _check_probe(
        model,
        _KEEPS_APART,
        _documents_error,
        fails=f"data.packing: {name} does not take the positions of several conversations in a row ({{}}); {remedy}",
        differs=f"data.packing: conversations in one row of {name} see each other: on a probe its states differ by {{:.2g}} of "
        f"them from those of each alone; {remedy}",
    )


def carried_state(model: PreTrainedModel) -> str | None:
    """Return what carries a model's past other than keys and values by position, or may do so; None: nothing."""
    unknown = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if unknown:
        return f"layers of type {', '.join(sorted(unknown))}"
    return "a recurrent state" if model._is_stateful else None


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


def _check_probe(
    model: PreTrainedModel,
    passed: WeakSet[PreTrainedModel],
    error_of: Callable[[PreTrainedModel], float],
    *,
    fails: str,
    differs: str,
    allow_nan: bool = False,
) -> None:
    """Refuse a model whose states on a probe are wrong by more than rounding, or that cannot run it.

    Args:
        model: not asked again once it is in `passed`.
        passed: the models that have passed this check.
        error_of: runs the probe; the root mean square of the error as a share of the right states.
        fails: what is said where the probe raises; `{}` is the error's first line.
        differs: what is said where the states are wrong; `{}` is by how much.
        allow_nan: let an error that is no number pass.

    Raises:
        InputError: with one of these two sentences.
    """
    if model in passed:
        return
    try:
        with _evaluating(model):
            error = error_of(model)
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as failure:
        raise InputError(fails.format(first_line(failure))) from failure
    limit = max(1e-4, 16 * torch.finfo(model.dtype).eps)
    if error > limit or (error != error and not allow_nan):
        raise InputError(differs.format(error))
    passed.add(model)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Switch dropout off, and gradients; the model's mode is put back in the end."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(False), torch.no_grad():  # inference mode would choose another forward
            yield
    finally:
        model.train(was_training)


def _rollback_error(model: PreTrainedModel) -> float:
    """Compare states of a probe read in pieces, one of them taken back, with those read at once."""
    ids_1T = torch.arange(1, 11, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    whole_1TD = backbone(model)(input_ids=ids_1T, use_cache=False).last_hidden_state.float()
    cache = new_cache(model, 12)
    forward_rows(model, cache, ids_1T[:, :6], [0])
    forward_rows(model, cache, ids_1T[:, :3], [6])
    again_1TD = forward_rows(model, cache, ids_1T[:, 5:], [5]).float()
    return float((again_1TD - whole_1TD[:, 5:]).norm() / whole_1TD[:, 5:].norm())


def _documents_error(model: PreTrainedModel) -> float:
    """Compare the states of documents in shared rows with those of each alone."""
    vocab_size = model.config.get_text_config().vocab_size
    ids_BT = (torch.arange(len(DOCUMENTS) * sum(DOCUMENTS[0]), device=model.device) * 7919 % vocab_size).view(
        len(DOCUMENTS), -1
    )
    positions_BT = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS]).to(model.device)
    together_BTD = read_documents(model, ids_BT, positions_BT)
    parts = [part.unsqueeze(0) for row, lengths in zip(ids_BT, DOCUMENTS, strict=True) for part in row.split(lengths)]
    alone = torch.cat([read_documents(model, part, None)[0] for part in parts])
    return float((together_BTD.flatten(0, 1) - alone).float().norm() / alone.float().norm())
