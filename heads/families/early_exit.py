"""Early exit: the target's first blocks draft, with a small adapter trained for the exit, and its other blocks verify.

Kangaroo (Liu et al. 2024, arXiv 2404.18911): at every position the state h_k after block k goes through an attention layer over
the states before it, a norm, and an output head. Every draft of a round is the same function of the text before it, so training
compares one depth alone. Its second exit, to stop drafting where the draft is unsure, is `decode.stopping` by confidence.

Blocks 1 to k draft into the target's cache and verification runs the other blocks only (`heads.proposers.self_speculation`).
Where another draft stands between (a lookup, merged drafts), or the target's blocks do not run in two parts, the first blocks
have a cache of their own and verification runs the whole target. Departures: the attention's output projection starts at 0 and
the norm as the target's final one, so that an untrained exit gives what the blocks give with the target's own norm and head.
B batch, T positions, E = D width, N rows of a depth.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.heads import EarlyExitSettings
from heads.device import RowInts, Rows, row_ints, row_tensor
from heads.frozen.hidden_states import TargetStates, final_norm, forward_states, num_blocks, read_states
from heads.frozen.placement import ServedForward, own_copy
from heads.inference.causal_lm import MediaInputs, new_cache
from heads.inference.kv_cache import RowCache
from heads.inference.model_checks import check_on_probe, probe_ids, relative_error
from heads.inference.runner import runner_of
from heads.modules.attention import CachedKeys, RowKeys, causal_ranges, visible_slots
from heads.modules.autoregressive import FeatureProposer
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins
from heads.modules.layers import DraftAttention, HeadLayer, LayerKeys, LayerShape, Rotary, Rotation, layer_shape, norm
from heads.modules.output_head import DraftHead, HeadModule
from heads.proposers.chain_builder import ChainBuilder
from heads.proposers.protocol import RoundInputs, Tokens
from heads.proposers.self_speculation import SharedBlocks, early_exit
from heads.sampling.token_tree import TreeAttention
from heads.vocabulary import DraftVocabulary

log = logging.getLogger("draftsmith")


class EarlyExit(HeadModule):
    """An adapter after the target's first blocks (`heads.modules.output_head.HeadModule`)."""

    settings: EarlyExitSettings
    num_caches = 1

    def __init__(self, settings: EarlyExitSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(target)
        last = num_blocks(target)
        self.taps: Sequence[int] = [max(1, last // 4)] if settings.taps is None else list(settings.taps)
        if self.taps[0] >= last:
            raise InputError(
                f"head.taps: an early exit leaves blocks of the target to verify: expected one of 1 to {last - 1}, got "
                f"{self.taps[0]} of its {last} blocks"
            )
        self.settings = settings.model_copy(update={"taps": list(self.taps)})
        shape = layer_shape(target, settings.layer)
        self.layer = ExitLayer(shape)
        self.norm = own_copy(final_norm(target)).requires_grad_(True)
        self.lm_head = DraftHead(target, vocabulary, trainable=settings.train_head)
        self.rotary = Rotary(shape)

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        """Run the adapter over every position. In training the first depth alone is returned: it has all others' rows."""
        states_BTD = self.features(states)
        rotation, keys = self.rotary(states_BTD, batch.position_ids_BT), RowKeys(causal_ranges(batch.position_ids_BT))
        states_BTD = self.layer(states_BTD, rotation, keys)
        depths = []
        for depth in range(1 if self.training else self.settings.num_depths):
            origins_N = labelled_origins(batch, depth)
            hidden_ND = self.norm(flat(states_BTD, origins_N + 1 + depth))
            depths.append(self.at_depth(depth, hidden_ND, origins_N))
        return depths

    def features(self, states: TargetStates) -> Tensor:
        return states.taps_ABTE[0].to(self.dtype)


class ExitLayer(HeadLayer):
    """A decoder layer without its MLP, the identity before training."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = norm(shape)
        self.self_attn = DraftAttention(shape, shape.width)
        nn.init.zeros_(self.self_attn.o_proj.weight)

    def forward(self, states_BTD: Tensor, rotation: Rotation, keys: LayerKeys) -> Tensor:
        return states_BTD + keys.attend(self.self_attn, self.input_layernorm(states_BTD), rotation)


class EarlyExitChain(FeatureProposer):
    """An early exit as a proposer of chains (`heads.proposers.protocol.TargetReader`).

    Pending features are states of committed tokens, of which the adapter has not kept keys; the pending token's state is made
    in the round.
    """

    module: EarlyExit

    def __init__(self, module: EarlyExit, device: torch.device) -> None:
        super().__init__(module, device, beyond=1)
        model, (num_layers,) = module.target, module.taps
        self._reader, self._shared = model, None
        if not reads_whole(model):
            self._reader = early_exit(model, num_layers)
            try:
                self._shared = SharedBlocks(model, num_layers)
            except InputError as error:
                log.info("the first %d blocks draft with a cache of their own: %s", num_layers, error)
        self._lent = False  # the target's cache, for the batch that `start` will begin
        self._own: RowCache | None = None  # of the first blocks, where the target's is not lent

    def forward_states(
        self,
        cache: RowCache,
        ids_BT: Tensor,
        starts: RowInts,
        taps: Sequence[int],
        attention: TreeAttention | None = None,
        media: MediaInputs | None = None,
    ) -> TargetStates:
        if self._shared is None:
            return forward_states(self.module.target, cache, ids_BT, starts, taps, attention, media)
        self._lent = max(starts.host) == 0  # prompts, of the batch that begins
        return self._shared.forward_states(cache, ids_BT, starts, taps, attention, media)

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        super().start(tokens, capacity, states)
        self._own, lent, self._lent = None, self._lent, False
        if self._shared is None or not (lent and self._shared.has_cache):  # a batch may end with its prompts
            self._own = new_cache(self._reader, capacity + self._beyond)
            first_B1 = row_tensor([row[:1] for row in tokens], self.device)
            self._read(first_B1, RowInts.full(0, len(tokens), self.device))  # the others are tokens after a pending feature

    def draft(self, inputs: RoundInputs, chain: ChainBuilder, num_tokens: int) -> None:
        head, window = self.module.lm_head, self._pending.read(inputs)
        self._adapt(window.features_BTF, window.first)
        if self._own is not None:
            self._own.keep_states_from(inputs.lengths.host)
            exits_B1E = window.last(self._read(window.next_BT, window.first + 1)).unsqueeze(1)
        else:
            self._blocks.keep_states_from(window.ends.host)
            exits_B1E = self._read(inputs.pending_B1, window.ends)
        for depth in range(num_tokens):
            states_B1D = self._adapt(exits_B1E, window.ends + depth)
            drafted_B = chain.add(head.logits(self.module.norm(states_B1D[:, 0])))
            if depth + 1 == num_tokens or chain.finished:
                break
            exits_B1E = self._read(drafted_B.unsqueeze(1), window.ends + (depth + 1))

    def keep_rows(self, rows: Rows) -> None:
        rows = row_ints(rows, self.device)
        super().keep_rows(rows)
        if self._own is not None:
            self._own.keep_rows(rows)

    def _adapt(self, exits_BTE: Tensor, starts: RowInts) -> Tensor:
        """Return the adapter's states `[B, T, D]` at the next positions, whose keys and values are added."""
        positions_BT = self._place(starts, exits_BTE.shape[1])
        exits_BTE = exits_BTE.to(self.module.dtype)
        keys = CachedKeys(self._cache, 0, visible_slots(self._cache, positions_BT))
        states_BTD: Tensor = self.module.layer(exits_BTE, self.module.rotary.drafting(positions_BT), keys)
        return states_BTD

    def _read(self, ids_BT: Tensor, starts: RowInts) -> Tensor:
        """Return the states `[B, T, E]` after the first blocks of tokens that are read now."""
        if self._own is not None:
            return forward_states(self._reader, self._own, ids_BT, starts, self.module.taps).taps_ABTE[0]
        return self._blocks.read(ids_BT, starts)

    @property
    def _blocks(self) -> SharedBlocks:
        assert self._shared is not None, "without shared blocks there is a cache of one's own"
        return self._shared


def reads_whole(model: PreTrainedModel) -> bool:
    """Return whether the whole target is asked for states after its first blocks, as they are not here."""
    return isinstance(runner_of(model).forward, ServedForward)


def check_exit(head: EarlyExit, model: PreTrainedModel) -> None:
    """Refuse to train on a target whose first blocks, run without the others, give other states than in the target.

    Some of Gemma 4 do not run, as their last block has to be one of full attention; of Qwen2.5-VL's there is no causal LM.
    """
    if model.device.type == "meta" or reads_whole(model):  # a plan builds heads without any values to compare
        return
    first = f"the first {head.taps[0]} blocks of {type(model).__name__}"
    remedy = "take another one of head.taps, or another head.kind"

    def error(model: PreTrainedModel) -> float:
        ids_1T = probe_ids(model)
        alone, whole = (read_states(each, ids_1T, head.taps) for each in (early_exit(model, head.taps[0]), model))
        return relative_error(alone.taps_ABTE[0], whole.taps_ABTE[0])

    check_on_probe(
        model,
        error,
        fails=f"{first} do not run without the others ({{}}); {remedy}",
        differs=f"{first}, run without the others, give states that differ by {{:.2g}} of them; {remedy}",
    )


FAMILY = Family(settings=EarlyExitSettings, build=EarlyExit, propose=EarlyExitChain, start=check_exit)
