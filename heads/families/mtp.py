"""MTP: the next token's embedding and the target's final state, joined and passed through a block of the target's architecture.

DeepSeek-AI 2024, arXiv 2412.19437, section 2.2. At position j the module reads norm(embedding of x_{j+1}) and norm(state at j),
projects the two to one, and runs one decoder block and a norm; the target's head then gives the logits of x_{j+2}. One module
is applied to its own normed states (FastMTP), with the keys it will have when it drafts: of the depths before only those of its
own chain.

The block is a copy of one of the target's, and so has the target's norm order, head norms, attention scale and experts without
this project knowing any of them. A probe proves it: the target's own block, run apart with keys of our choosing, gives what the
target got from it. While the module is unrolled in training, depths lie side by side as keys, each a square of its mask.

Tensor names are those that transformers reads under `mtp.`. vLLM's zeroed embedding at position 0 is left out.
B batch, T positions, S keys, E = D width, F width of a feature, M key-value heads, H head width, K depths, W draft vocabulary.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.heads import MtpSettings
from heads.frozen.hidden_states import TargetStates, blocks, final_norm, num_blocks, tapped
from heads.frozen.mtp_checkpoint import NativeMtp
from heads.frozen.placement import own_copy
from heads.inference.kv_cache import RowCache
from heads.inference.model_checks import check_on_probe, probe_ids, relative_error, rounding
from heads.inference.runner import backbone, runner_of
from heads.modules.autoregressive import ChainHead, FeatureChain
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins, shifted_left
from heads.modules.layers import HeadLayer, shape_like
from heads.modules.output_head import DraftHead
from heads.vocabulary import DraftVocabulary

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "indexed_attention"}
CHOOSING = ("e_score_correction_bias", "expert_bias", ".indexer.")  # parameters that choose experts or keys, without gradients


class Mtp(ChainHead):
    """An MTP module on a frozen target (`heads.modules.output_head.HeadModule`, `heads.modules.autoregressive.ChainHead`)."""

    settings: MtpSettings
    num_caches = 1

    def __init__(self, settings: MtpSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(target)
        self.settings = settings
        last = num_blocks(target)
        self.taps: tuple[int, ...] = (last,) if settings.reads == "pre_norm" else ()
        kinds = getattr(target.config.get_text_config(), "layer_types", None) or ()
        known = [number for number, kind in enumerate(kinds) if kind in KNOWN_LAYER_TYPES]  # else the target is refused
        number = (known[-1] if known else last - 1) if settings.init_block is None else settings.init_block
        self._context = BlockContext(target, number)
        self.layers = nn.ModuleList([MtpLayer(target, number)])  # a list: engines know the tensors by `layers.0`
        self.lm_head = DraftHead(target, vocabulary, trainable=settings.train_head)

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        is_causal = self._context.is_causal and batch.conversations_BC.shape[1] == 1  # not packed: rows are texts, and padding
        visible_B1TT: Tensor | None = None
        chain = ChainKeys()
        states_BTD = self.features(states)
        depths = []
        for depth in range(self.settings.num_depths):
            if visible_B1TT is None and (depth > 0 or not is_causal):
                visible_B1TT = _causal_in_documents(batch.document_ids_BT)
            states_BTD = self.layers[0](
                self.embed(shifted_left(batch.input_ids_BT, depth + 1)),
                states_BTD,
                self._context,
                batch.position_ids_BT + depth,
                None if visible_B1TT is None else unrolled_mask(visible_B1TT, depth, self._context.window),
                chain,
            )
            chain = chain.next()
            origins_N = labelled_origins(batch, depth)
            depths.append(self.at_depth(depth, flat(states_BTD, origins_N), origins_N))
        return depths

    def features(self, states: TargetStates) -> Tensor:
        last_BTE = states.final_BTE if self.settings.reads == "post_norm" else states.taps_ABTE[0]
        return last_BTE.to(self.dtype)

    def read(self, features_BTF: Tensor, ids_BT: Tensor, positions_BT: Tensor, cache: RowCache, depth: int) -> Tensor:
        hides = not (self._context.is_causal and cache.is_causal)
        visible_B1TS = cache.visible(positions_BT, self._context.window).unsqueeze(1) if hides else None
        keys = CacheLayer(cache, 0)
        return self.layers[0](self.embed(ids_BT), features_BTF, self._context, positions_BT, visible_B1TS, keys)


def _causal_in_documents(documents_BT: Tensor) -> Tensor:
    T = documents_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=documents_BT.device).tril()
    return (causal_TT & (documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1))).unsqueeze(1)


class MtpLayer(HeadLayer):
    """The module: two norms, a projection, a block of the target's family, a norm that starts as the target's final one."""

    def __init__(self, target: PreTrainedModel, number: int) -> None:
        super().__init__()
        shape, last = shape_like(target), final_norm(target)
        kind: Any = type(last)
        if list(last.parameters()):
            self.enorm, self.hnorm = (kind(shape.width, eps=shape.norm_epsilon) for _ in range(2))
        else:  # a norm without weights (OLMo)
            self.enorm, self.hnorm = own_copy(last), own_copy(last)
        self.eh_proj = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.mtp_block = copy_block(target, number)
        self.post_norm = own_copy(last).requires_grad_(True)

    def forward(
        self,
        embedded_BTD: Tensor,
        states_BTD: Tensor,
        context: BlockContext,
        positions_BT: Tensor,
        visible_B1TS: Tensor | None,
        keys: Keys,
    ) -> Tensor:
        """Return the normed states `[B, T, D]`; see `BlockContext.run`."""
        joined_BTD = self.eh_proj(torch.cat([self.enorm(embedded_BTD), self.hnorm(states_BTD)], -1))
        return self.post_norm(context.run(self.mtp_block, joined_BTD, positions_BT, visible_B1TS, keys))


def start_from_checkpoint(head: Mtp, target: PreTrainedModel) -> None:
    """Give a new head the weights in the target's own folder, with `init: checkpoint`."""
    if head.settings.init == "scratch":
        return
    if not target.name_or_path:
        raise InputError("head.init checkpoint: the target was not loaded from a folder, where its MTP weights would be")
    native = NativeMtp(Path(target.name_or_path))
    like = {f"layers.{name}": value for name, value in head.layers.state_dict().items()}
    head.load_state_dict(native.read(like), strict=False)


# --- a block of the target's, run apart ----------------------------------------------------------------------------


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


FAMILY = Family(settings=MtpSettings, build=Mtp, propose=FeatureChain, start=start_from_checkpoint)
