"""The target's own first blocks as a draft: early exit, as in LayerSkip (arXiv 2404.16710). Nothing is trained or copied.

`early_exit` returns a causal LM of them, with the target's final norm and head, for `heads.proposers.draft_lm.DraftLM`.
`SharedBlocks` write into the target's cache, and verification continues from what drafting has computed: a round of G drafts
takes G + 1 rows through the first blocks in place of 2 G + 1. What is trained for the exit is `heads.families.early_exit`.
B batch, T tokens, E width of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.device import RowInts
from heads.frozen.hidden_states import TargetStates, block_list, blocks, forward_states, num_blocks, tapped
from heads.frozen.model_config import causal_config, config_of_blocks
from heads.inference.causal_lm import MediaInputs, forward_rows, new_cache, read_documents
from heads.inference.kv_cache import RowCache
from heads.inference.model_checks import check_on_probe, probe_ids, relative_error
from heads.sampling.token_tree import TreeAttention


def early_exit(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return a causal LM of the target's first blocks, its embeddings, final norm and head: the very modules, no copies."""
    if not 1 <= num_layers < num_blocks(model):
        raise InputError(
            f"self-speculation needs 1 to {num_blocks(model) - 1} of the target's {num_blocks(model)} blocks, got {num_layers}"
        )
    return _part(model, 0, num_layers)


class SharedBlocks:
    """The target in two parts on its own cache: `num_layers` blocks draft, verification goes on from the states after them.

    Raises:
        InputError: the two parts, one after the other, are not the model, or are no models.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        self.model, self.num_layers = model, num_layers
        self.early = early_exit(model, num_layers)
        self.late = _part(model, num_layers, num_blocks(model))
        self.late.set_input_embeddings(nn.Identity())  # its inputs are states already
        self._cache: ref[RowCache] | None = None  # the target's, of this batch; the decoder owns it
        self._exits: list[Tensor] = []  # `[B, 1, E]`: states after the first blocks, of the pending token and the drafts
        check_on_probe(
            model,
            partial(_parts_error, parts=self),
            fails=f"{type(model).__name__} cannot draft for itself: its blocks do not run in two parts ({{}})",
            differs=f"{type(model).__name__} cannot draft for itself: in two parts its states differ by {{:.2g}} of them",
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

    @property
    def has_cache(self) -> bool:
        """Whether the batch whose prompts were read last is still under way."""
        return self._cache is not None and self._cache() is not None

    def keep_states_from(self, starts: Sequence[int]) -> None:
        """Keep what rows need to go back to where drafting starts; comes before the first `read` of a round."""
        if self._cache is not None and (cache := self._cache()) is not None:
            cache.keep_states_from(starts)

    def read(self, ids_BT: Tensor, starts: RowInts) -> Tensor:
        """Run the first blocks on the next drafted tokens; return the states after them, `[B, T, E]`."""
        cache = None if self._cache is None else self._cache()
        assert cache is not None, "the prompts are read by forward_states first"
        with tapped(self.early, [self.num_layers]) as seen:
            forward_rows(self.early, cache, ids_BT, starts)
        self._exits.append(seen[self.num_layers])
        return self._exits[-1]


def _part(model: PreTrainedModel, first: int, end: int) -> PreTrainedModel:
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
    tensors = chain(part.named_parameters(), part.named_buffers())
    left = [name for name, tensor in tensors if tensor.is_meta and id(tensor) not in lent]
    if left:
        raise InputError(f"{type(model).__name__} cannot draft for itself: its {left[0]} lies outside the modules known here")
    return part


def _parts_error(model: PreTrainedModel, parts: SharedBlocks) -> float:
    """Compare the model's states on a probe, read in two pieces, with those of its two parts, one after the other."""
    ids_1T = probe_ids(model)
    half = ids_1T.shape[1] // 2
    cache = new_cache(model, ids_1T.shape[1])
    parts._cache = ref(cache)
    states = []
    for start in (0, half):
        starts = RowInts.full(start, 1, ids_1T.device)
        exits_1TE = parts.read(ids_1T[:, start : start + half], starts)
        states.append(forward_rows(parts.late, cache, exits_1TE, starts))
    return relative_error(torch.cat(states, 1), read_documents(model, ids_1T, None))
