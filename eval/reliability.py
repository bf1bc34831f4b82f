"""Confidence against what came of it, by classes of confidence: the sums behind every reliability curve, and the curve.

One place for what three do: the report's two curves (`eval.law_metrics`) and the settings of cost-optimal draft lengths
(`eval.draft_lengths`). Sums by class add up over any split of the drafts; means are formed once, at the end.
N drafts, C classes of confidence, F rows of a table of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NUM_CLASSES = 10  # of confidence, equally wide


def ratio(numerator: Tensor, denominator: Tensor) -> float | None:
    """Return a quotient as a number, `None` where there is nothing to divide by."""
    return numerator.item() / denominator.item() if denominator.item() else None


def class_sums(confidence_N: Tensor, *values: Tensor, num_classes: int = NUM_CLASSES) -> Tensor:
    """Return sums by class, float64 `[2 + F, C]`: how many drafts, their confidences, and each of the `values`.

    Args:
        confidence_N: in [0, 1]; 1 falls into the last class.
        values: of the same drafts, each `[N]`.
        num_classes: how many, equally wide.
    """
    confidence_N = confidence_N.double()
    class_N = (confidence_N * num_classes).long().clamp(0, num_classes - 1)
    columns = [torch.ones_like(confidence_N), confidence_N, *values]
    return torch.stack([torch.bincount(class_N, each.double(), minlength=num_classes) for each in columns])


def describe_classes(sums_FC: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one dict a class: its bounds, `num_drafts`, and the mean `confidence` and those of `names`.

    The means of a class without drafts are `None`.

    Args:
        sums_FC: of `class_sums`.
        names: of the values that were summed.
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
        row: of the value held against the confidence, 2 for the first of `values`.
    """
    return ratio((sums_FC[1] - sums_FC[row]).abs().sum(), sums_FC[0].sum())
