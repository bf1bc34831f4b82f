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

from eval.reliability import NUM_CLASSES, class_sums, describe_classes, mean_gap, ratio
from eval.round_table import LAWS, RoundTable

FIELDS = {"overlap": "overlap_alpha", "agrees": "top1_agreement", "kl": "kl_divergence", "uncovered": "uncovered_mass"}


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
    sums_FC: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("sums_FC", torch.zeros((4, NUM_CLASSES), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, table: RoundTable) -> None:
        """Add the compared drafts of some prompts' rounds."""
        confidence_N, target_N = (table.laws_FN[LAWS.index(name)] for name in ("confidence", "target_probability"))
        known_N = ~(confidence_N.isnan() | target_N.isnan())
        self.sums_FC += class_sums(confidence_N[known_N], target_N[known_N], table.kept_N[known_N]).to(self.sums_FC)

    def compute(self) -> dict[str, Any]:
        """Return `calibration_error` and `reliability`, one dict a class; a class without drafts has `None` for its means."""
        return {
            "calibration_error": mean_gap(self.sums_FC, 2),
            "reliability": describe_classes(self.sums_FC, ("target_probability", "accepted")),
        }


class StoppingCalibration(Metric):
    """What the confidence that stopping rules read is worth: the largest probability of a draft's law, against acceptance.

    Of drafts before which all others of their round were kept (`heads.stopping`). The error is the expected calibration error
    of Guo et al. with acceptance as the outcome; `eval.draft_lengths` makes a rule's settings of the curve.
    """

    full_state_update = False
    sums_FC: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("sums_FC", torch.zeros((3, NUM_CLASSES), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, table: RoundTable) -> None:
        """Add the compared drafts of some prompts' rounds."""
        confidence_N = table.laws_FN[LAWS.index("law_confidence")]
        known_N = ~confidence_N.isnan()
        self.sums_FC += class_sums(confidence_N[known_N], table.kept_N[known_N]).to(self.sums_FC)

    def compute(self) -> dict[str, Any]:
        """Return `stopping_calibration_error` and `stopping_reliability`, one dict a class."""
        return {
            "stopping_calibration_error": mean_gap(self.sums_FC, 2),
            "stopping_reliability": describe_classes(self.sums_FC, ("accepted",)),
        }
