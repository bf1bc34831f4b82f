"""Checks of a causal LM on a few made-up tokens (a probe), before anything is decoded or trained with it.

transformers says nowhere whether a family's forward has the properties that this project builds on, so each is tried once.
B rows, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.inference.causal_lm import forward_rows, head_logits, new_cache, read_documents
from heads.inference.recurrent_cache import cache_argument
from heads.inference.runner import WRONG_STATES, backbone, first_of_equals, runner_of
from heads.sampling.token_tree import tree_attention

# Types of layers that carry no past but keys and values by position.
STATELESS = {"full_attention", "sliding_attention", "indexed_attention", "chunked_attention", "moe", "mlp"}
OWN_WINDOWS = ("window_size", "keep_window_size")  # GPT-Neo, Doge
DOCUMENTS = ((5, 4), (2, 7))  # lengths of the documents in each row of the probe


def check_split(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are not finite, or are not `head_logits` of its backbone's last hidden state."""
    check_on_probe(
        model,
        _split_error,
        fails=f"{type(model).__name__} does not run on text alone ({{}}); take another target",
        differs=f"{type(model).__name__} computes its logits in a way draftsmith does not know: its head applied to its last "
        "hidden state differs by {:.2g} of them",
    )


def check_rolls_back(model: PreTrainedModel) -> None:
    """Refuse a model whose memory of the past cannot be taken back after a rejected draft.

    Where only rows of unequal lengths, or only trees, go wrong on the probe, these are refused from now on
    (`heads.inference.runner.Runner.refused`), and chains of one text are not.
    """
    name, runner = type(model).__name__, runner_of(model)
    if runner.runs_elsewhere or "rolls back" in runner.passed:
        return
    base: Any = backbone(model)
    if getattr(base, "use_alibi", hasattr(base, "build_alibi_tensor")):  # Falcon; BLOOM
        raise InputError(
            f"{name} cannot be decoded here: its ALiBi counts positions by the columns of the cache, and no speculative "
            "decoding is done for such models; take a model of another family"
        )
    what = _carried_state(model, STATELESS | {"minimax_m3_sparse"})
    if what is not None and not runner.mixers:
        raise InputError(
            f"{name} has {what} that transformers' cache does not hold: rejected tokens cannot be rolled back, so it cannot be "
            "decoded speculatively; take a model of another family"
        )
    if not _rolls_back(model, num_rows=2, tree=True):
        check_on_probe(
            model,
            _rollback_error,
            fails=f"{name} does not run on a cache whose rows can be rolled back ({{}}), so it cannot be decoded here; "
            "take a model of another family",
            differs=f"{name} computes other states after a rejected draft than without it, by {{:.2g}} of them: rejected "
            "tokens cannot be rolled back, so it cannot be decoded speculatively; take a model of another family",
            allow_nan=True,  # the decoder reports states that are not finite, by request
        )
        alone = {"batches": _rolls_back(model, num_rows=2), "trees": _rolls_back(model, tree=True)}
        runner.refused = frozenset(kind for kind, right in alone.items() if not right) or frozenset(WRONG_STATES)
    runner.passed.add("rolls back")


def _rolls_back(model: PreTrainedModel, num_rows: int = 1, tree: bool = False) -> bool:
    try:
        error_of = partial(_rollback_error, num_rows=num_rows, tree=tree)
        check_on_probe(model, error_of, differs="{}", fails="{}", allow_nan=True)
    except InputError:
        return False
    return True


def check_keeps_apart(model: PreTrainedModel) -> None:
    """Refuse a model in which the documents of a packed row attend to each other, as where positions come from a mask."""
    name, remedy = type(model).__name__, "set data.packing to null"
    what = _carried_state(model, STATELESS)
    if what is not None and not runner_of(model).runs_elsewhere:
        raise InputError(
            f"data.packing: {name} has {what}, which would run on from one conversation of a row into the next; {remedy}"
        )
    check_on_probe(
        model,
        _documents_error,
        name="keeps apart",
        fails=f"data.packing: {name} does not take the positions of several conversations in a row ({{}}); {remedy}",
        differs=f"data.packing: conversations in one row of {name} see each other: on a probe its states differ by {{:.2g}} of "
        f"them from those of each alone; {remedy}",
    )


def _carried_state(model: PreTrainedModel, known: set[str]) -> str | None:
    """Return what carries a model's past, or may do so, other than keys and values by position; None: nothing."""
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := layer_types - known:
        return f"layers of type {', '.join(sorted(unknown))}"
    return "a recurrent state" if model._is_stateful and not layer_types else None  # a family's mark, not a model's


def check_on_probe(
    model: PreTrainedModel,
    error_of: Callable[[PreTrainedModel], float],
    *,
    differs: str,
    fails: str | None = None,
    name: str | None = None,
    allow_nan: bool = False,
) -> None:
    """Refuse a model whose values on a probe are wrong by more than rounding, or that cannot run it.

    `error_of` runs the probe, in evaluation mode and without gradients, and returns the error (`relative_error`), which
    `differs` tells as `{}`. What it raises is told by `fails`; None lets that pass through. A check with a `name` runs once.
    """
    runner = runner_of(model)
    if runner.runs_elsewhere or name in runner.passed:
        return
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(False), torch.no_grad():  # in inference mode a registered forward would run
            error = error_of(model)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as failure:
        if fails is None or isinstance(failure, InputError):
            raise
        raise InputError(fails.format(first_line(failure))) from failure
    finally:
        model.train(was_training)
    if error > rounding(model) or (error != error and not allow_nan):
        raise InputError(differs.format(error))
    if name is not None:
        runner.passed.add(name)


def rounding(model: PreTrainedModel) -> float:
    """Return up to which error two ways of computing a model's states are taken for the same (`relative_error`)."""
    return max(1e-4, 16 * torch.finfo(model.dtype).eps)


def probe_ids(model: PreTrainedModel, num_rows: int = 1, length: int = 8) -> Tensor:
    """Return different token ids `[num_rows, length]` of the model's vocabulary, on its device."""
    ids = torch.arange(1, num_rows * length + 1, device=model.device) * 7919  # a prime: neighbours in a row are far apart
    ids = (ids % model.config.get_text_config().vocab_size).view(num_rows, length)
    placeholder = runner_of(model).placeholder
    return ids if placeholder is None else ids.masked_fill(ids == placeholder, 1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the error as a share of that of the expected values; infinite where shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    error = float((found.float() - expected.float()).norm())
    return error / float(expected.float().norm()) if error else 0.0  # zeros for zeros are right


def _split_error(model: PreTrainedModel) -> float:
    ids_1T = probe_ids(model)
    logits_1TV = model(input_ids=ids_1T, use_cache=False).logits
    if not bool(torch.isfinite(logits_1TV).all()):
        name = type(model).__name__
        raise InputError(f"{name} computes logits that are not finite in {model.dtype}: its weights are damaged or overflow")
    return relative_error(head_logits(model, read_documents(model, ids_1T, None)), logits_1TV)


def _rollback_error(model: PreTrainedModel, num_rows: int = 1, tree: bool = False) -> float:
    """Compare states of a probe read in pieces, a rejected chain or a path of a tree taken back, with those read at once.

    Of a model with mixers either may be right: those read at once, or those of `generate`, which runs them token by token.
    """
    config = model.config.get_text_config()
    # A family with a window that is no `sliding_window` has masks of its own: the probe is longer than that.
    windows = [getattr(config, name, None) or 0 for name in OWN_WINDOWS]
    context = getattr(config, "max_position_embeddings", None) or 0
    P = 6 + 2 * max((window for window in windows if 2 * window + 10 <= context), default=0)
    ids_BT = probe_ids(model, num_rows, P + 4)
    with first_of_equals(config):
        whole_BTD = read_documents(model, ids_BT, None)
    cache = new_cache(model, P + 8)
    forward_rows(model, cache, ids_BT[:, :P], [0] * num_rows)
    starts = [P - 1 - row for row in range(num_rows)]  # each row is one token shorter than the one before
    again_B5, expected_B5D = _slices(ids_BT, starts, 5), _slices(whole_BTD, starts, 5)
    if not tree:
        read_BT = torch.cat([again_B5[:, :1], ids_BT[:, :3]], 1)  # a pending token and drafts, which are rejected
        pending_B1D = forward_rows(model, cache, read_BT, starts)[:, :1]
        rest_B4D = forward_rows(model, cache, again_B5[:, 1:], [start + 1 for start in starts])
        found_B5D = torch.cat([pending_B1D, rest_B4D], 1)
    else:
        attention = tree_attention(torch.tensor([[0, 0, 2]] * num_rows, device=model.device), starts)
        tree_B4D = forward_rows(model, cache, again_B5[:, [0, 0, 1, 2]], attention.starts, attention)
        path = [0, 2, 3]
        cache.keep_path(starts, [path] * num_rows)
        rest_B2D = forward_rows(model, cache, again_B5[:, 3:], [start + 3 for start in starts])
        found_B5D = torch.cat([tree_B4D[:, path], rest_B2D], 1)
    error = relative_error(found_B5D, expected_B5D)
    if error <= rounding(model) or not runner_of(model).mixers:
        return error
    return min(error, relative_error(found_B5D, _in_steps(model, ids_BT, starts)))


def _in_steps(model: PreTrainedModel, ids_BT: Tensor, starts: Sequence[int]) -> Tensor:
    """Return the states of five tokens from `starts` on as `generate` reads them (Nemotron-H and Zamba 2 bound steps apart)."""
    run, argument = backbone(model), cache_argument(type(backbone(model)))
    rows = []
    for ids_T, start in zip(ids_BT, starts, strict=True):
        stored: dict[str, Any] = {}
        states: list[Tensor] = []
        for part_T in ids_T[: start + 5].split([start, *[1] * 5]):
            output: Any = run(input_ids=part_T.unsqueeze(0), use_cache=True, **stored)
            stored = {argument: output[argument]}
            states.append(output.last_hidden_state)
        rows.append(torch.cat(states[1:], 1))
    return torch.cat(rows)


def _slices(values: Tensor, starts: Sequence[int], length: int) -> Tensor:
    return torch.stack([row[start : start + length] for row, start in zip(values, starts, strict=True)])


def _documents_error(model: PreTrainedModel) -> float:
    ids_BT = probe_ids(model, len(DOCUMENTS), sum(DOCUMENTS[0]))
    positions_BT = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS]).to(model.device)
    together_BTD = read_documents(model, ids_BT, positions_BT)
    parts = [part.unsqueeze(0) for row, lengths in zip(ids_BT, DOCUMENTS, strict=True) for part in row.split(lengths)]
    alone = torch.cat([read_documents(model, part, None)[0] for part in parts])
    return relative_error(together_BTD.flatten(0, 1), alone)
