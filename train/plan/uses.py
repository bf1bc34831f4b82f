"""How often a training step uses each weight of a draft, by family: what FLOPs and activations are counted from.

All numbers are a token of the batch, padding left out: a linear layer that runs once over every position has 1 use, one that
runs at labels only has the labels' share of the tokens. Checked against torch's FLOP counter on real steps
(tests/train/test_plan_work.py).

Left out on purpose: mixtures of experts, whose weights are no linear layers and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from configs.schema.heads import (
    DFlashSettings,
    Eagle3Settings,
    EagleSettings,
    HeadSettings,
    HydraSettings,
    MedusaSettings,
    MtpSettings,
    PEagleSettings,
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training data as a plan sees it.

    num_conversations: in an epoch.
    mean_tokens: of a conversation.
    label_share: of those tokens, the ones that are learnt.
    """

    num_conversations: int
    mean_tokens: float
    label_share: float

    @property
    def num_tokens(self) -> float:
        """Tokens in an epoch."""
        return self.num_conversations * self.mean_tokens


@dataclass(frozen=True, kw_only=True)
class Uses:
    """How often things happen, a token of the batch.

    of_layer: by a linear layer's name in the draft, how often it is used.
    judged_rows: rows that become logits.
    attended_keys: pairs of a query and a key of one layer, over all its attention.
    kept_scores: those of them whose softmax stands in memory for the backward, for want of a fused kernel.
    """

    of_layer: Callable[[str], float]
    judged_rows: float
    attended_keys: float
    kept_scores: float = 0.0


def draft_lm_uses(work: Workload) -> Uses:
    """Return the uses of a draft LM: every block once at every position, logits at labels."""
    return Uses(of_layer=lambda name: 1.0, judged_rows=work.label_share, attended_keys=work.mean_tokens)


def head_uses(head: HeadSettings, work: Workload) -> Uses:
    """Return the uses of a head.

    Raises:
        ValueError: the family is not known here.
    """
    length, labels = work.mean_tokens, work.label_share
    if isinstance(head, MedusaSettings):
        return Uses(of_layer=lambda name: labels, judged_rows=head.num_depths * labels, attended_keys=0.0)
    if isinstance(head, HydraSettings):
        return Uses(
            of_layer=lambda name: 1.0 if name.startswith("prefix_layer") else labels,
            judged_rows=head.num_depths * labels,
            attended_keys=length if head.prefix_attention else 0.0,
        )
    if isinstance(head, Eagle3Settings):
        depths = head.num_depths
        return Uses(
            of_layer=lambda name: 1.0 if name == "fc" else depths,
            judged_rows=depths * labels,
            attended_keys=depths * length,
            kept_scores=(depths - 1) * length,
        )
    if isinstance(head, MtpSettings):
        # A module applied again sees the keys of all depths before; modules of their own see their own.
        depths = head.num_depths
        squares = depths * (depths + 1) / 2 if head.shared_depths else depths
        return Uses(
            of_layer=lambda name: depths if head.shared_depths else 1.0,
            judged_rows=depths * labels,
            attended_keys=squares * length,
        )
    if isinstance(head, DFlashSettings):
        return _block_uses(head, length, labels)
    if isinstance(head, EagleSettings):
        return _parallel_uses(head, length, labels)
    raise ValueError(f"no count for a head of {type(head).__name__}")


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of a draft or target by name, their output heads apart."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not name.startswith("lm_head"):
            yield name, layer


def norms(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the norms of a draft by name, and how many numbers each reads."""
    for name, layer in module.named_modules():
        weight = getattr(layer, "weight", None) if "Norm" in type(layer).__name__ else None
        if weight is not None:
            yield name, weight.numel()


def _block_uses(head: DFlashSettings, length: float, labels: float) -> Uses:
    """Count the slots of blocks at anchors; of the context only keys and values are made."""
    anchors = min(head.num_anchors, labels * length) / length
    slots = anchors * head.block_size
    judged = anchors * (head.block_size - 1)

    def of_layer(name: str) -> float:
        if name == "fc":
            return 1.0
        if name.startswith(("markov", "confidence")):
            return judged
        return slots + 1.0 if name.endswith(("k_proj", "v_proj")) else slots

    pairs = slots * (length + head.block_size)
    return Uses(of_layer=of_layer, judged_rows=judged, attended_keys=pairs, kept_scores=pairs)


def _parallel_uses(head: EagleSettings, length: float, labels: float) -> Uses:
    """Count P-EAGLE's elements: one at every position, and further ones for the origins that are kept."""
    assert isinstance(head, PEagleSettings)
    further = labels * sum(max(head.keep_share**depth, head.min_keep_share) for depth in range(1, head.num_depths))
    return Uses(
        of_layer=lambda name: 1.0 if name == "fc" else 1.0 + further,
        judged_rows=labels + further,
        attended_keys=(1.0 + further) * length,
        kept_scores=further * length,
    )
