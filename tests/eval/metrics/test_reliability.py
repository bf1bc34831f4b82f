"""Reliability curves: the error is torchmetrics', the classes are a count by hand, and any split adds up to the same."""

import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from eval.metrics.distributions import class_sums, describe_classes, mean_gap


def random_pairs(number=500):
    generator = torch.Generator().manual_seed(0)
    sure_N = torch.rand(number, generator=generator, dtype=torch.float64)
    kept_N = torch.rand(number, generator=generator, dtype=torch.float64) < sure_N**2
    return torch.cat([sure_N, torch.tensor([1.0, 0.0])]), torch.cat([kept_N, torch.tensor([True, False])])


@pytest.mark.parametrize("num_classes", [1, 10, 15])
def test_the_error_is_that_of_torchmetrics_in_one_piece_or_several(num_classes):
    sure_N, kept_N = random_pairs()
    parts = [slice(0, 100), slice(0, 0), slice(100, None)]
    sums_FC = sum(class_sums(sure_N[part], kept_N[part], num_classes=num_classes) for part in parts)
    expected = binary_calibration_error(sure_N, kept_N.long(), n_bins=num_classes, norm="l1")
    assert mean_gap(sums_FC, 2) == pytest.approx(float(expected), abs=1e-9)


def test_each_draft_counts_in_the_class_of_its_confidence():
    sure_N = torch.tensor([0.0, 0.2, 0.6, 0.7, 0.62, 1.0], dtype=torch.float64)
    sums_FC = class_sums(sure_N, torch.tensor([0, 1, 1, 0, 1, 1]), num_classes=4)
    classes = describe_classes(sums_FC, ["accepted"])
    assert [each["confidence_from"] for each in classes] == [0.0, 0.25, 0.5, 0.75]
    assert [each["confidence_to"] for each in classes] == [0.25, 0.5, 0.75, 1.0]
    assert [each["num_drafts"] for each in classes] == [2, 0, 3, 1]
    assert [each["accepted"] for each in classes] == [0.5, None, pytest.approx(2 / 3), 1.0]
    assert [each["confidence"] for each in classes] == [0.1, None, pytest.approx(0.64), 1.0]
    assert mean_gap(sums_FC, 2) == pytest.approx((2 * 0.4 + 3 * (2 / 3 - 0.64)) / 6)
