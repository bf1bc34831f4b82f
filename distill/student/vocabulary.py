"""The choice of a reduced draft vocabulary: by how often tokens stand in the answers, or by the target's own probabilities.

Counts know only the tokens that were chosen; `target_mass` adds up the target's probabilities over the positions before answer
tokens, so a token counts by how likely it was wherever it could have come. Mass is kept by kind of prompt (`category`).
C rows of a chunk, E width of the target, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.runtime.errors import ConfigError
from distill.dataset.batches import ConversationDataset, collate
from distill.dataset.conversations import Conversation, index_of
from heads.frozen.hidden_states import num_blocks
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits
from heads.modules.interface import Batch, before_labels
from heads.vocabulary import DraftVocabulary

log = logging.getLogger("draftsmith")

BATCH_SIZE = 8  # conversations a forward
CHUNK_SIZE = 128  # positions whose logits live at one time
TYPICAL_ACCEPTANCE = 0.5  # of a token that the draft vocabulary has, where the size of the vocabulary is to be chosen
WARN_ABOVE = 0.2

Mass = Mapping[str, Tensor]  # by kind of prompt: probabilities summed over positions, float64 [V], on the CPU


@dataclass(frozen=True, kw_only=True)
class MassChoice:
    """A vocabulary chosen by mass; None: the whole one. `report` holds JSON values, for the artifact and the log."""

    vocabulary: DraftVocabulary | None
    report: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        """What a run reports with its held-out scores."""
        return {"uncovered_mass": self.report["uncovered_mass"]} if self.report else {}


def most_frequent_answer_tokens(conversations: Sequence[Conversation], size: int, target: Target) -> DraftVocabulary:
    """Return the `size` most frequent answer tokens, ties by the lower id; those that end an answer are always among them."""
    _check_size(size, target)
    counts = index_of(conversations).answer_counts
    counts_V = torch.zeros(target.vocab_size, dtype=torch.int64)
    counts_V[: len(counts)] = torch.from_numpy(counts)
    ids_W = _in_order(counts_V, target)[:size].sort().values
    covered = int(counts_V[ids_W].sum()) / int(counts_V.sum())
    log.info("draft vocabulary: %d of %d tokens, %.2f %% of all answer tokens", size, target.vocab_size, 100 * covered)
    return DraftVocabulary(token_ids_W=ids_W, target_vocab_size=target.vocab_size)


@torch.no_grad()
def target_mass(
    target: Target, dataset: ConversationDataset, indices: Iterable[int], hidden_of: Callable[[Batch], Tensor]
) -> dict[str, Tensor]:
    """Add up the target's next-token probabilities over the positions before answer tokens of some conversations, by kind.

    `hidden_of` gives the target's final states `[B, T, E]` of a batch: a forward, or a cache.
    """
    by_kind: dict[str, list[int]] = {}
    for index in sorted(indices, key=lambda index: int(dataset.lengths[index])):
        kind = dataset.conversations[int(dataset.numbers[index])].category
        by_kind.setdefault(kind, []).append(index)
    mass = {kind: torch.zeros(target.vocab_size, dtype=torch.float64) for kind in sorted(by_kind)}
    for kind, mass_V in mass.items():
        places = by_kind[kind]
        for start in range(0, len(places), BATCH_SIZE):
            batch = collate([dataset[index] for index in places[start : start + BATCH_SIZE]]).to(target.device)
            for hidden_CE in hidden_of(batch)[before_labels(batch)].split(CHUNK_SIZE):
                logits_CV = head_logits(target.model, hidden_CE)
                logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
                mass_V += logits_CV.softmax(-1).sum(0).cpu()
    return mass


def uncovered_curve(order_V: Tensor, mass_V: Tensor) -> Tensor:
    """Return the share of a mass that the first W tokens of an order leave out, for each W: float64 `[V + 1]`."""
    covered_V = mass_V[order_V].cumsum(0) / mass_V.sum()
    return torch.cat([torch.ones(1, dtype=torch.float64), (1 - covered_V).clamp(min=0)])


def fastest_size(curve: Tensor, target: Target, num_speculative_tokens: int) -> int:
    """Return the size of draft vocabulary at which a typical draft is expected to decode fastest.

    A draft of one block, and of a row of the output head for each of its tokens, takes as much of a plain step as it has of the
    weights that the target's step reads, experts counted whole. It is accepted with probability `TYPICAL_ACCEPTANCE` times the
    mass that the vocabulary covers, by the `uncovered_curve` of held-out conversations. Ties go to the smallest.
    """
    model = target.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weights = sum(each.numel() for each in model.parameters())
    if embedding.weight is not head.weight:
        weights -= sum(each.numel() for each in embedding.parameters())  # a step reads few of its rows
    rows_share = torch.arange(len(curve), dtype=torch.float64) * head.weight.shape[1] / weights
    draft_cost = 1 / num_blocks(model) + rows_share
    acceptance = TYPICAL_ACCEPTANCE * (1 - curve)
    tau = sum(acceptance**drafts for drafts in range(num_speculative_tokens + 1))
    return int((tau / (1 + num_speculative_tokens * draft_cost)).argmax())


def choose_by_mass(
    chosen_from: Mass, measured_on: Mass, size: int | None, target: Target, num_speculative_tokens: int
) -> MassChoice:
    """Choose the tokens of most mass, those that end an answer among them; measure what they leave out on other conversations.

    A size of None is `fastest_size`, or the whole vocabulary where that is half of it or more.
    """
    order_V = _in_order(torch.stack(list(chosen_from.values())).sum(0), target)
    curve = uncovered_curve(order_V, torch.stack(list(measured_on.values())).sum(0))
    V, ends = target.vocab_size, len(target.eos_token_ids)
    if size is None:
        fastest = max(1, ends, fastest_size(curve, target, num_speculative_tokens))
        size = fastest if fastest < V / 2 else V
    _check_size(size, target)
    kinds = {kind: float(uncovered_curve(order_V, mass_V)[size]) for kind, mass_V in measured_on.items()}
    report = {
        "chosen_by": "mass",
        "size": size,
        "uncovered_mass": float(curve[size]),
        "uncovered_mass_by_kind": kinds,
    }
    ids_W = order_V[:size].sort().values
    vocabulary = None if size == V else DraftVocabulary(token_ids_W=ids_W, target_vocab_size=V)
    return MassChoice(vocabulary=vocabulary, report=report)


def log_choice(report: Mapping[str, Any]) -> None:
    """Log how a vocabulary was chosen, and warn where it leaves much of the target's mass out."""
    share, kinds = report["uncovered_mass"], report["uncovered_mass_by_kind"]
    log.info("draft vocabulary: %d tokens; uncovered mass on held-out prompts: %.2f %%", report["size"], 100 * share)
    worst = max(kinds, key=kinds.__getitem__)
    if share > WARN_ABOVE or kinds[worst] > WARN_ABOVE:
        log.warning(
            f"the draft vocabulary of {report['size']} tokens leaves out {100 * share:.1f} % of the target's mass on held-out "
            f"prompts (most: {worst} {100 * kinds[worst]:.1f} %), which no draft can win: raise draft_vocab_size, set it to "
            "null, or train on more prompts of these kinds"
        )


def _in_order(weights_V: Tensor, target: Target) -> Tensor:
    """Return all tokens, those that end an answer first, then by falling weight, ties by the lower id."""
    priority_V = weights_V.clone()
    priority_V[list(target.eos_token_ids)] = weights_V.sum() + 1
    return priority_V.argsort(descending=True, stable=True)


def _check_size(size: int, target: Target) -> None:
    ends = len(target.eos_token_ids)
    if not ends <= size <= target.vocab_size:
        limits = f"{max(1, ends)} (tokens that end an answer) to {target.vocab_size} (the target's vocabulary)"
        raise ConfigError(f"draft_vocab_size: expected {limits}, got {size}")
