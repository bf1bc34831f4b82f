"""How alike target and draft are, from their laws: overlap, agreement, divergence, and what the draft's confidence is worth.

All of it is measured at the drafted positions that the decoder compared (`eval.law_comparison`), up to and with the first
rejected one of each round. States are sums and counts, as in `eval.metrics`.
N compared drafts, F numbers of a comparison, K draft positions, C classes of confidence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from eval.round_table import LAWS, RoundTable

NUM_CLASSES = 10  # of confidence, equally wide
FIELDS = {"overlap": "overlap_alpha", "agrees": "top1_agreement", "kl": "kl_divergence", "uncovered": "uncovered_mass"}


def ratio(numerator: Tensor, denominator: Tensor) -> float | None:
    """Return a quotient as a number, `None` where there is nothing to divide by."""
    return numerator.item() / denominator.item() if denominator.item() else None


class LawAgreement(Metric):
    """Means over compared drafts, all and by draft position: overlap (alpha), top-1 agreement, KL(p || q), uncovered mass."""

    full_state_update = False
    sum_FK: Tensor
    count_FK: Tensor

    def __init__(self, num_positions: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_positions = num_positions
        shape = (len(FIELDS), num_positions)
        self.add_state("sum_FK", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count_FK", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, table: RoundTable) -> None:
        """Add the comparisons of some prompts' rounds; a number that was not recorded is not counted."""
        for row, name in enumerate(FIELDS):
            values_N = table.laws_FN[LAWS.index(name)]
            known_N = ~values_N.isnan()
            positions = table.position_N[known_N]
            self.sum_FK[row] += torch.bincount(positions, values_N[known_N], minlength=self.num_positions).to(self.sum_FK)
            self.count_FK[row] += torch.bincount(positions, minlength=self.num_positions).to(self.count_FK)

    def compute(self) -> dict[str, float | list[float | None] | None]:
        """Return each mean over all compared drafts, and by position under its name with `_by_position`."""
        found: dict[str, float | list[float | None] | None] = {}
        for row, field in enumerate(FIELDS.values()):
            sum_K, count_K = self.sum_FK[row], self.count_FK[row]
            found[field] = ratio(sum_K.sum(), count_K.sum())
            found[f"{field}_by_position"] = [ratio(*pair) for pair in zip(sum_K, count_K, strict=True)]
        return found


class Calibration(Metric):
    """What the draft's own probability for its drafted token is worth, by classes of it.

    The reliability curve sets beside the mean confidence of a class what the target says: its probability for the same
    tokens, and the share it kept. The calibration error is that of Guo et al. (1706.04599), equation 3, with the outcome
    that a draw from the target would give replaced by its exact expectation: sum over classes of
    n/N |mean confidence - mean target probability|, which is 0 for a draft equal to the target. The share kept tells where a
    draft had better stop early; it lies above the diagonal even for a perfect draft, since greedy decoding keeps every
    agreeing token and sampling keeps min(1, p/q).
    """

    full_state_update = False
    count_C: Tensor
    confidence_C: Tensor
    target_C: Tensor
    kept_C: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("count_C", torch.zeros(NUM_CLASSES, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("kept_C", torch.zeros(NUM_CLASSES, dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("confidence_C", "target_C"):
            self.add_state(name, torch.zeros(NUM_CLASSES, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, table: RoundTable) -> None:
        """Add the compared drafts of some prompts' rounds."""
        confidence_N, target_N = (table.laws_FN[LAWS.index(name)] for name in ("confidence", "target_probability"))
        known_N = ~(confidence_N.isnan() | target_N.isnan())
        confidence_N, target_N, kept_N = confidence_N[known_N], target_N[known_N], table.kept_N[known_N]
        class_N = (confidence_N * NUM_CLASSES).long().clamp(0, NUM_CLASSES - 1)
        self.count_C += torch.bincount(class_N, minlength=NUM_CLASSES).to(self.count_C)
        self.kept_C += torch.bincount(class_N[kept_N], minlength=NUM_CLASSES).to(self.kept_C)
        self.confidence_C += torch.bincount(class_N, confidence_N, minlength=NUM_CLASSES).to(self.confidence_C)
        self.target_C += torch.bincount(class_N, target_N, minlength=NUM_CLASSES).to(self.target_C)

    def compute(self) -> dict[str, Any]:
        """Return `calibration_error` and `reliability`, one dict a class; a class without drafts has `None` for its means."""
        gaps_C = (self.confidence_C - self.target_C).abs()
        columns = zip(self.count_C, self.confidence_C, self.target_C, self.kept_C, strict=True)
        return {
            "calibration_error": ratio(gaps_C.sum(), self.count_C.sum()),
            "reliability": [
                {
                    "confidence_from": number / NUM_CLASSES,
                    "confidence_to": (number + 1) / NUM_CLASSES,
                    "num_drafts": int(count),
                    "confidence": ratio(confidence, count),
                    "target_probability": ratio(target, count),
                    "accepted": ratio(kept, count),
                }
                for number, (count, confidence, target, kept) in enumerate(columns)
            ],
        }
