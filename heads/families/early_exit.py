"""Early exit: the target's first blocks draft, with a small adapter trained for the exit, and its other blocks verify.

Kangaroo (Liu et al. 2024, arXiv 2404.18911): at every position the state h_k after block k goes through an attention layer over
the states before it, a norm, and an output head. Every draft of a round is the same function of the text before it, so training
compares one depth alone. Its second exit, to stop drafting where the draft is unsure, is `decode.stopping` by confidence.

Blocks 1 to k draft into the target's cache and verification runs the other blocks only (`SharedBlocks`, as in LayerSkip, arXiv
2404.16710): a round of G drafts takes G + 1 rows through the first blocks in place of 2 G + 1. A target whose blocks do not run
in two parts, or not here, is refused. Departures: the attention's output projection starts at 0 and the norm as the target's
final one, so that an untrained exit gives what the blocks give with the target's own norm and head.
B batch, T positions, E = D width, N rows of a depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as chained
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.runtime.errors import InputError, first_line
from configs.schema.heads import EarlyExitSettings
from heads.device import RowInts
from heads.frozen.hidden_states import (
    TargetStates,
    block_list,
    blocks,
    causal_config,
    config_of_blocks,
    final_norm,
    forward_states,
    num_blocks,
    tapped,
)
from heads.frozen.placement import own_copy
from heads.inference.causal_lm import MediaInputs, forward_rows, new_cache, read_documents
from heads.inference.kv_cache import RowCache
from heads.inference.model_checks import check_on_probe, probe_ids, relative_error
from heads.inference.runner import runner_of
from heads.modules.attention import CachedKeys, RowKeys, causal_ranges, visible_slots
from heads.modules.autoregressive import FeatureProposer
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins
from heads.modules.layers import DraftAttention, HeadLayer, LayerKeys, LayerShape, Rotary, Rotation, layer_shape, norm
from heads.modules.output_head import DraftHead, HeadModule
from heads.proposers.builders import ChainBuilder
from heads.proposers.protocol import RoundInputs
from heads.sampling.token_tree import TreeAttention
from heads.vocabulary import DraftVocabulary


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
        self._blocks = SharedBlocks(module.target, module.taps[0])
        self.forward_states = self._blocks.forward_states

    def draft(self, inputs: RoundInputs, chain: ChainBuilder, num_tokens: int) -> None:
        head, window = self.module.lm_head, self._pending.read(inputs)
        self._adapt(window.features_BTF, window.first)
        self._blocks.keep_states_from(window.ends.host)
        exits_B1E = self._blocks.read(inputs.pending_B1, window.ends)
        for depth in range(num_tokens):
            states_B1D = self._adapt(exits_B1E, window.ends + depth)
            drafted_B = chain.add(head.logits(self.module.norm(states_B1D[:, 0])))
            if depth + 1 == num_tokens or chain.finished:
                break
            exits_B1E = self._blocks.read(drafted_B.unsqueeze(1), window.ends + (depth + 1))

    def discard_drafts(self, rows: Sequence[int]) -> None:
        self._blocks.discard()

    def _adapt(self, exits_BTE: Tensor, starts: RowInts) -> Tensor:
        """Return the adapter's states `[B, T, D]` at the next positions, whose keys and values are added."""
        positions_BT = self._place(starts, exits_BTE.shape[1])
        exits_BTE = exits_BTE.to(self.module.dtype)
        keys = CachedKeys(self._cache, 0, visible_slots(self._cache, positions_BT))
        states_BTD: Tensor = self.module.layer(exits_BTE, self.module.rotary.drafting(positions_BT), keys)
        return states_BTD


class SharedBlocks:
    """The target in two parts on its own cache: `num_layers` blocks draft, verification goes on from the states after them.

    Raises:
        InputError: the two parts, one after the other, are not the model, or are no models; or servers run the blocks.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        if runner_of(model).runs_elsewhere:
            raise InputError("head.kind early_exit runs the target's own blocks, and servers run them; take another head.kind")
        self.model, self.num_layers = model, num_layers
        self.early, self.late = part_of(model, 0, num_layers), part_of(model, num_layers, num_blocks(model))
        self.late.set_input_embeddings(nn.Identity())  # its inputs are states already
        self._cache: ref[RowCache] | None = None  # the target's, of this batch; the decoder owns it
        self._exits: list[Tensor] = []  # `[B, 1, E]`: states after the first blocks, of the pending token and the drafts
        name = f"{type(model).__name__} cannot draft for itself"
        remedy = "take another one of head.taps, or another head.kind"
        check_on_probe(
            model,
            self._error,
            fails=f"{name}: its blocks do not run in two parts ({{}}); {remedy}",
            differs=f"{name}: in two parts its states differ by {{:.2g}} of them; {remedy}",
        )

    def forward_states(
        self,
        cache: RowCache,
        ids_BT: Tensor,
        starts: RowInts,
        taps: Sequence[int],
        attention: TreeAttention | None = None,
        media: MediaInputs | None = None,
    ) -> TargetStates:
        """Run the target (`heads.frozen.hidden_states.forward_states`), in a round from where drafting has left it.

        Only chains are drafted, and no state is tapped but that after the first blocks.
        """
        assert attention is None
        assert list(taps) in ([], [self.num_layers])
        if self._cache is None or cache is not self._cache():
            self._cache, self._exits = ref(cache), []  # another batch; one that was interrupted may have left states
        exits = self._exits[: ids_BT.shape[1]]
        if not exits:
            return forward_states(self.model, cache, ids_BT, starts, taps, media=media)
        if len(exits) < ids_BT.shape[1]:  # the last draft, which drafting had no need to read
            exits.append(self.read(ids_BT[:, len(exits) :], starts + len(exits)))
        self._exits = []
        exits_BTE = torch.cat(exits, 1)
        return TargetStates(final_BTE=forward_rows(self.late, cache, exits_BTE, starts), taps_ABTE=(exits_BTE,) * len(taps))

    def keep_states_from(self, starts: Sequence[int]) -> None:
        """Keep what rows need to go back to where drafting starts; comes before the first `read` of a round."""
        self._current().keep_states_from(starts)

    def read(self, ids_BT: Tensor, starts: RowInts) -> Tensor:
        """Run the first blocks on the next drafted tokens; return the states after them, `[B, T, E]`."""
        with tapped(self.early, [self.num_layers]) as seen:
            forward_rows(self.early, self._current(), ids_BT, starts)
        self._exits.append(seen[self.num_layers])
        return self._exits[-1]

    def discard(self) -> None:
        """Forget the states of this round's drafts, in place of which others are verified."""
        self._exits = []

    def _current(self) -> RowCache:
        cache = None if self._cache is None else self._cache()
        assert cache is not None, "the prompts are read by forward_states first"
        return cache

    def _error(self, model: PreTrainedModel) -> float:
        """Compare the model's states on a probe, read in two pieces, with those of its two parts, one after the other."""
        ids_1T = probe_ids(model)
        half = ids_1T.shape[1] // 2
        cache, states = new_cache(model, ids_1T.shape[1]), []
        self._cache = ref(cache)
        for start in (0, half):
            starts = RowInts.full(start, 1, ids_1T.device)
            exits_1TE = self.read(ids_1T[:, start : start + half], starts)
            states.append(forward_rows(self.late, cache, exits_1TE, starts))
        return relative_error(torch.cat(states, 1), read_documents(model, ids_1T, None))


def part_of(model: PreTrainedModel, first: int, end: int) -> PreTrainedModel:
    """Return a causal LM of the model's own blocks `first` to `end - 1` and all else that it has, the very modules."""
    try:
        config = config_of_blocks(model.config.get_text_config(), range(first, end))
        if type(causal_config(config)) is not type(config):
            raise InputError("transformers has no causal LM with the blocks that it has")
        with torch.device("meta"):
            part = AutoModelForCausalLM.from_config(
                config, dtype=model.dtype, attn_implementation=model.config._attn_implementation
            ).eval()
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        blocks_kept = f"blocks {first} to {end - 1}, counted from 0, are no model by themselves"
        reason = first_line(error.__cause__ or error)
        raise InputError(f"{type(model).__name__} cannot draft for itself: its {blocks_kept}: {reason}") from error
    (holder, name), (own, _) = block_list(model), block_list(part)
    for child_name, child in holder.named_children():
        own.add_module(child_name, child)
    own.add_module(name, nn.ModuleList(list(blocks(model))[first:end]))
    part.set_output_embeddings(model.get_output_embeddings())
    lent = {id(each) for each in blocks(part).parameters()}  # a spread target's may lie elsewhere until they run
    tensors = chained(part.named_parameters(), part.named_buffers())
    left = [name for name, tensor in tensors if tensor.is_meta and id(tensor) not in lent]
    if left:
        raise InputError(f"{type(model).__name__} cannot draft for itself: its {left[0]} lies outside the modules known here")
    return part


def check_parts(head: EarlyExit, model: PreTrainedModel) -> None:
    """Refuse to train on a target that cannot draft for itself (`SharedBlocks`)."""
    if model.device.type != "meta":  # a plan builds heads without any values to compare
        SharedBlocks(model, head.taps[0])


FAMILY = Family(settings=EarlyExitSettings, build=EarlyExit, propose=EarlyExitChain, start=check_parts)
