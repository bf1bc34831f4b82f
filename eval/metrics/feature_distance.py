"""The Fréchet distance of two sets of answers in a space of features, as of pictures by a classifier's hidden units.

Both sets are taken for normal distributions (Heusel et al., 1706.08500), by torchmetrics' own computation. It falls with the
number of answers, so only distances of sets of the same sizes can be compared.
N answers, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from configs.runtime.errors import InputError, first_line

Featurise = Callable[[str], Sequence[float]]


class _AsGiven(nn.Module):
    """The network of torchmetrics' distance where the features have been computed already."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features_NF: Tensor) -> Tensor:
        return features_NF


def frechet_distance(one_NF: Tensor, other_NF: Tensor) -> float:
    """Return the distance of two sets of at least two answers each; 0 where means and covariances are the same."""
    metric: Any = FrechetInceptionDistance(feature=_AsGiven(one_NF.shape[1]))
    metric.set_dtype(torch.float64)
    metric.update(one_NF, real=True)
    metric.update(other_NF, real=False)
    return max(0.0, float(metric.compute()))


def featurised(name: str, function: Featurise, answers: Sequence[str]) -> Tensor:
    """Return the features of answers, `[N, F]`.

    Raises:
        InputError: the user's function failed, or gave no finite numbers or not as many each time.
    """
    try:
        features_NF = torch.tensor([list(function(answer)) for answer in answers], dtype=torch.float64)
    except Exception as error:  # the user's function, which may fail in any way
        raise InputError(f"quality.features: {name} failed: {type(error).__name__}: {first_line(error)}") from error
    if features_NF.ndim != 2 or not torch.isfinite(features_NF).all():
        raise InputError(f"quality.features: {name} must return a list of finite numbers, as many for each answer")
    return features_NF
