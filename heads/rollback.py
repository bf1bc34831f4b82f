"""Which models can take back what they have read: asked before anything is decoded or trained with them.

What a model declares is looked at first; then transformers' own forward is tried on `heads.kv_cache` with a draft that is
rejected, once for each model. B batch, T positions, D width.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from configs.errors import InputError, first_line
from heads.kv_cache import forward_rows, new_cache
from heads.lm_head import backbone

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_CHECKED: WeakSet[PreTrainedModel] = WeakSet()  # whose states on the probe were right


def check_rolls_back(model: PreTrainedModel) -> None:
    """Refuse a model whose memory of the past cannot be taken back after a rejected draft.

    Raises:
        InputError: it has recurrent, linear-attention or otherwise unknown layers; or on a probe with a rejected draft its
            states are not those of one forward over the text (some make their positions of a plain padding mask).
    """
    if (what := carried_state(model)) is not None:
        raise InputError(
            f"{type(model).__name__} has {what}: rejected tokens cannot be rolled back, so it cannot be decoded speculatively"
        )
    if model in _CHECKED:
        return
    try:
        error = _probe_error(model)
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as failure:
        raise InputError(
            f"{type(model).__name__} does not run on a cache whose rows can be rolled back ({first_line(failure)}), so it "
            "cannot be decoded here; take a model of another family"
        ) from failure
    if error > max(1e-4, 16 * torch.finfo(model.dtype).eps):  # no numbers at all are the decoder's to report, by request
        raise InputError(
            f"{type(model).__name__} computes other states after a rejected draft than without it, by {error:.2g} of them: "
            "rejected tokens cannot be rolled back, so it cannot be decoded speculatively"
        )
    _CHECKED.add(model)


def carried_state(model: PreTrainedModel) -> str | None:
    """Return what carries a model's past other than keys and values by position, or may do so; None: nothing."""
    unknown = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if unknown:
        return f"layers of type {', '.join(sorted(unknown))}"
    return "a recurrent state" if model._is_stateful else None


def _probe_error(model: PreTrainedModel) -> float:
    """Return how far transformers' states of a probe read in pieces, one of them taken back, are from those read at once.

    A share of the latter, root mean square.
    """
    was_training = model.training
    model.eval()  # dropout would be another at each forward
    with torch.inference_mode(False), torch.no_grad():
        ids_1T = torch.arange(1, 11, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
        whole_1TD = backbone(model)(input_ids=ids_1T, use_cache=False).last_hidden_state.float()
        cache = new_cache(model, 12)
        forward_rows(model, cache, ids_1T[:, :6], [0])
        forward_rows(model, cache, ids_1T[:, :3], [6])
        again_1TD = forward_rows(model, cache, ids_1T[:, 5:], [5]).float()
    model.train(was_training)
    return float((again_1TD - whole_1TD[:, 5:]).norm() / whole_1TD[:, 5:].norm())
