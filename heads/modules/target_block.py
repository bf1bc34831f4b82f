"""One block of the target's own family, run apart from the target, with keys of our choosing.

An MTP module is built around a copy of such a block, so that it has the target's norm order, head norms, attention scale and
experts without this project knowing any of them. A probe proves it: the target's own block, run this way, gives what the target
got from it. While a module is unrolled in training, depths lie side by side as keys, each a square of its mask.
B batch, T positions, S keys, D width, M key-value heads, H head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from heads.frozen.hidden_states import blocks, num_blocks, tapped
from heads.frozen.placement import own_copy
from heads.inference.kv_cache import RowCache
from heads.inference.model_checks import check_on_probe, probe_ids, relative_error, rounding
from heads.inference.runner import backbone, runner_of

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "indexed_attention"}
CHOOSING = ("e_score_correction_bias", "expert_bias", ".indexer.")  # parameters that choose experts or keys, without gradients


class ChainKeys:
    """In place of a transformers cache: keys and values of a depth after those of the depths before, with their gradients."""

    def __init__(self, *earlier: ChainKeys) -> None:
        self.earlier = earlier

    def next(self) -> ChainKeys:
        return ChainKeys(*self.earlier, self)

    def update(self, keys_BMTH: Tensor, values_BMTH: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self._keys, self._values = keys_BMTH, values_BMTH
        depths = *self.earlier, self
        return torch.cat([each._keys for each in depths], 2), torch.cat([each._values for each in depths], 2)

    def update_indexer(self, index_keys_BTH: Tensor, layer: int) -> Tensor:
        """Do the same with the keys by which an indexer chooses those that are seen (DeepSeek-V3.2)."""
        self._index_keys = index_keys_BTH
        return torch.cat([each._index_keys for each in (*self.earlier, self)], 1)


class CacheLayer:
    """In place of a transformers cache: one layer of ours, whatever number the block has in the target."""

    def __init__(self, cache: RowCache, number: int) -> None:
        self.cache, self.number = cache, number

    def update(self, keys_BMTH: Tensor, values_BMTH: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        return self.cache.update(keys_BMTH, values_BMTH, self.number)

    def update_indexer(self, index_keys_BTH: Tensor, layer: int) -> Tensor:
        return self.cache.update_indexer(index_keys_BTH, self.number)


Keys = ChainKeys | CacheLayer | None


class BlockContext:
    """What one of the target's blocks needs to run apart: its rotary embedding, its kind of attention and its window.

    The block's number, from 0, decides the kind of attention where there are several. A block that gives something else when
    run apart is refused.
    """

    def __init__(self, target: PreTrainedModel, number: int) -> None:
        if not 0 <= number < num_blocks(target):
            raise InputError(f"head.init_block {number}: the target's blocks are 0 to {num_blocks(target) - 1}")
        config = target.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        self.kind = None if kinds is None else kinds[number]
        if self.kind not in (None, *KNOWN_LAYER_TYPES):
            raise InputError(
                f"head.init_block: block {number} of {type(target).__name__} is of type {self.kind}; an MTP module has one "
                f"of {', '.join(sorted(KNOWN_LAYER_TYPES))}: name such a block, or take another head.kind, eagle3 perhaps"
            )
        self.window = None if self.kind == "full_attention" else getattr(config, "sliding_window", None)
        # In a tuple, like every module of the target's. None: its blocks have one each, or positions in the embedding.
        parts = dict(backbone(target).named_children())
        self._rotary = (parts.get("rotary_emb", parts.get("pos_emb")),)
        by_kind = isinstance((getattr(config, "rope_parameters", None) or {}).get(self.kind), dict)
        self._rotary_arguments = {"layer_type": self.kind} if by_kind else {}
        parameters = inspect.signature(type(blocks(target)[number]).forward).parameters
        self._cache_argument = "layer_past" if "layer_past" in parameters else "past_key_values"
        # Falcon's blocks ask for it where they have none, too.
        self._without = {"alibi": None} if "alibi" in parameters and not getattr(config, "alibi", True) else {}
        self._additive_masks = config._attn_implementation == "eager"
        if target.device.type != "meta":  # a plan builds heads without any values to compare
            needs_more = f"block {number} of {type(target).__name__} needs more around it than draftsmith knows to give it"
            check_on_probe(
                target,
                partial(self._error, number=number),
                fails=f"{needs_more}: it does not run apart from the target ({{}}); take another head.kind than mtp",
                differs=f"{needs_more}: run apart from the target its states differ by {{:.2g}} of them",
                # Once: one process makes a module again to write it, and alone it runs no shared target.
                name=f"block {number} runs apart",
            )

        # Where the block masks by causality itself, a text needs no mask of all its pairs.
        known = self.window is None and self.kind != "indexed_attention"
        self.is_causal = known and f"block {number} is causal" in runner_of(target).passed

    def run(
        self, block: nn.Module, states_BTD: Tensor, positions_BT: Tensor, visible_B1TS: Tensor | None, keys: Keys
    ) -> Tensor:
        """Return the states `[B, T, D]` after a block, the target's or a copy.

        `visible_B1TS` says which keys each position sees, in the order in which `keys` gives them; without `keys` these are
        those of the states. None, with `is_causal`: those up to its own.
        """
        (rotary,) = self._rotary
        given: dict[str, Any] = {self._cache_argument: keys, **self._without}
        if rotary is not None:
            given["position_embeddings"] = rotary(states_BTD, positions_BT, **self._rotary_arguments)
        mask = visible_B1TS
        if self._additive_masks and mask is not None:
            lowest = torch.finfo(states_BTD.dtype).min
            mask = torch.zeros_like(mask, dtype=states_BTD.dtype).masked_fill(~mask, lowest)
        output: Any = block(states_BTD, attention_mask=mask, position_ids=positions_BT, **given)
        return cast(Tensor, output[0] if isinstance(output, tuple) else output)

    def _error(self, target: PreTrainedModel, number: int) -> float:
        """Run a block on what it read in a probe, and compare what it gives with what it gave there."""
        ids_1T = probe_ids(target)
        with tapped(target, [number, number + 1]) as seen:
            target(input_ids=ids_1T, use_cache=False)
        T, width = ids_1T.shape[1], target.config.get_text_config().hidden_size
        if seen[number].shape[-1] != width:
            raise ValueError(f"it reads states of width {seen[number].shape[-1]}, and the model's are of {width}")
        causal_11TT = torch.ones(1, 1, T, T, dtype=torch.bool, device=target.device).tril()
        visible_11TT = unrolled_mask(causal_11TT, 0, self.window)
        positions_1T = torch.arange(T, device=target.device).unsqueeze(0)
        run = partial(self.run, blocks(target)[number], seen[number], positions_1T)
        with suppress(ValueError, TypeError, AttributeError, RuntimeError):
            if relative_error(run(None, ChainKeys()).to(target.device), seen[number + 1]) <= rounding(target):
                runner_of(target).passed.add(f"block {number} is causal")
        return relative_error(run(visible_11TT, ChainKeys()).to(target.device), seen[number + 1])


def copy_block(target: PreTrainedModel, number: int) -> nn.Module:
    """Return a trainable copy of a block of the target's, on the target's device and in its dtype."""
    block = own_copy(blocks(target)[number]).to(target.device)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(not any(part in name for part in CHOOSING))
    return block


def wide_tensors(head: nn.Module, target: PreTrainedModel) -> set[int]:
    """Return the `id` of each tensor in a head's copies of the target's blocks that the target keeps wider than its dtype."""
    kept = {
        (type(block), name)
        for block in blocks(target)
        for name, tensor in _tensors(block)
        if tensor.is_floating_point() and tensor.dtype != target.dtype
    }
    if not kept:
        return set()
    return {id(tensor) for part in head.modules() for name, tensor in _tensors(part) if (type(part), name) in kept}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def unrolled_mask(visible_B1TT: Tensor, depth: int, window: int | None) -> Tensor:
    """Return which keys the chains see at a depth, bool `[B, 1, T, (depth + 1) * T]`: one square for each depth so far.

    `visible_B1TT` says which depth-0 keys each origin sees at depth 0. The query of origin j stands at position j + depth, the
    keys of depth d of origin i at i + d; a window counts the query's own position.
    """
    T = visible_B1TT.shape[-1]
    places_T = torch.arange(T, device=visible_B1TT.device)
    if window is not None:
        visible_B1TT = visible_B1TT & (places_T.unsqueeze(1) + depth - places_T < window)
    own_TT = places_T.unsqueeze(1) == places_T
    unseen_TT = torch.zeros_like(own_TT)
    squares = [own_TT if window is None or depth - key_depth < window else unseen_TT for key_depth in range(1, depth + 1)]
    return torch.cat([visible_B1TT, *(square.expand_as(visible_B1TT) for square in squares)], -1)
