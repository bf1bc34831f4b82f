"""How alike target and draft are, from their distributions: overlap, agreement, divergence, and the draft's calibration.

Measured at the drafted positions that the decoder compared (`eval.decoder.distribution_comparison`), up to and including the
first rejected one of each round. `eval.cost.draft_length` calibrates a stopping rule with the sums by class of confidence.
N compared drafts, F numbers of a comparison or rows of sums, K draft positions, C classes of confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from eval.metrics.round_table import RoundTable

NUM_CLASSES = 10  # of confidence, equally wide
FIELDS = {"overlap": "overlap_alpha", "agrees": "top1_agreement", "kl": "kl_divergence", "uncovered": "uncovered_mass"}


class Sums(Metric):
    """A metric of sums. Processes agree by `merge_state`: to wait for others at `compute` would be for ever in the main one.

    Args:
        zeros: the states, which start from these.
    """

    full_state_update = False

    def __init__(self, **zeros: Tensor) -> None:
        super().__init__(sync_on_compute=False, compute_with_cache=False)
        for name, zero in zeros.items():
            self.add_state(name, zero, dist_reduce_fx="sum")


class DistributionAgreement(Sums):
    """Means over compared drafts, all and by draft position: overlap (alpha), top-1 agreement, KL(p || q), uncovered mass."""

    sum_FK: Tensor
    count_FK: Tensor

    def __init__(self, num_positions: int) -> None:
        sum_FK = torch.zeros((len(FIELDS), num_positions), dtype=torch.float64)
        super().__init__(sum_FK=sum_FK, count_FK=sum_FK.long())
        self.num_positions = num_positions

    def update(self, table: RoundTable) -> None:
        """Add the comparisons of some prompts' rounds; a number that was not recorded is not counted."""
        for row, name in enumerate(FIELDS):
            values_N = table.number_of(name)
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


class Calibration(Sums):
    """Calibration of a confidence in drafts against what became of them, by classes of the confidence.

    The reliability curve sets beside the mean confidence of a class the means of the outcomes. The error is that of Guo et al.
    (1706.04599), equation 3, by the first outcome. The area under the ROC curve (`auroc`) is the chance that of a draft that
    stays and one that does not the first has the higher confidence, equal ones counted half; of classes as narrow as `FINE`.

    Args:
        confidence: a number of `round_table.COMPARED`.
        outcomes: others of them, or `accepted`.
        prefix: of the names of the numbers.
    """

    FINE = 1000
    sums_FC: Tensor
    fine_FC: Tensor

    def __init__(self, confidence: str, outcomes: Sequence[str] = ("accepted",), prefix: str = "") -> None:
        sums_FC = torch.zeros((2 + len(outcomes), NUM_CLASSES), dtype=torch.float64)
        super().__init__(sums_FC=sums_FC, fine_FC=torch.zeros((3, self.FINE), dtype=torch.float64))
        self.confidence, self.outcomes, self.prefix = confidence, outcomes, prefix

    def update(self, table: RoundTable) -> None:
        confidence_N, *values = map(table.number_of, (self.confidence, *self.outcomes))
        known_N = ~torch.stack([confidence_N, *values]).isnan().any(0)
        confidence_N, values = confidence_N[known_N], [each[known_N] for each in values]
        self.sums_FC += class_sums(confidence_N, *values).to(self.sums_FC)
        self.fine_FC += class_sums(confidence_N, table.kept_N[known_N], num_classes=self.FINE).to(self.fine_FC)

    def compute(self) -> dict[str, Any]:
        """Return `calibration_error`, `reliability`, one dict a class (a class without drafts has `None` for its means), and
        of an estimate `auroc`; each with the prefix.
        """
        found: dict[str, Any] = {"calibration_error": mean_gap(self.sums_FC, 2)}
        found["reliability"] = describe_classes(self.sums_FC, self.outcomes)
        if self.confidence == "estimate":
            kept_C = self.fine_FC[2]
            refused_C = self.fine_FC[0] - kept_C
            below_C = refused_C.cumsum(0) - refused_C / 2
            found["auroc"] = ratio((kept_C * below_C).sum(), kept_C.sum() * refused_C.sum())
            found["reliability"] = found["reliability"] if self.sums_FC[0].any() else []
        return {f"{self.prefix}{name}": value for name, value in found.items()}


# What is calibrated: the draft's probability of its drafted token against the target's, exact in place of an outcome (0 for a
# draft equal to the target); the distribution's largest probability, which stopping rules read; the draft's own estimate.
CALIBRATIONS: dict[str, dict[str, Any]] = {
    "confidence": {"confidence": "confidence", "outcomes": ("target_probability", "accepted")},
    "stopping": {"confidence": "distribution_confidence", "prefix": "stopping_"},
    "estimate": {"confidence": "estimate", "prefix": "estimate_"},
}


# --- sums by class of confidence ----------------------------------------------------------------------------------


def ratio(numerator: Tensor, denominator: Tensor) -> float | None:
    """Return a quotient as a number, `None` where there is nothing to divide by."""
    return numerator.item() / denominator.item() if denominator.item() else None


def class_sums(confidence_N: Tensor, *values: Tensor, num_classes: int = NUM_CLASSES) -> Tensor:
    """Return sums by class, float64 `[2 + F, C]`: how many drafts, their confidences, and each of the `values` `[N]`.

    Classes of [0, 1] are equally wide; 1 falls into the last one.
    """
    confidence_N = confidence_N.double()
    class_N = (confidence_N * num_classes).long().clamp(0, num_classes - 1)
    columns = [torch.ones_like(confidence_N), confidence_N, *values]
    return torch.stack([torch.bincount(class_N, each.double(), minlength=num_classes) for each in columns])


def describe_classes(sums_FC: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one dict a class of `class_sums`: its bounds, `num_drafts`, the mean `confidence` and those of the named values.

    The means of a class without drafts are `None`.
    """
    num_classes = sums_FC.shape[1]
    return [
        {
            "confidence_from": number / num_classes,
            "confidence_to": (number + 1) / num_classes,
            "num_drafts": int(count),
            **{name: ratio(each, count) for name, each in zip(("confidence", *names), others, strict=True)},
        }
        for number, (count, *others) in enumerate(sums_FC.unbind(1))
    ]


def mean_gap(sums_FC: Tensor, row: int) -> float | None:
    """Return sum over classes of n/N |mean confidence - mean of a row's value| (Guo et al., 1706.04599, equation 3).

    Args:
        sums_FC: of `class_sums`.
        row: 2 for the first of its `values`.
    """
    return ratio((sums_FC[1] - sums_FC[row]).abs().sum(), sums_FC[0].sum())
