"""Reliability curves: the error is torchmetrics', the classes are a count by hand, and any split adds up to the same."""

import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from configs.schema.decoding import DecodeConfig
from eval.cost.draft_length import ConfidenceProbe
from eval.decoder.decode import decode
from eval.metrics.distributions import StoppingCalibration, class_sums, describe_classes, mean_gap
from eval.metrics.round_table import tabulate
from heads.proposers.draft_lm import DraftLM
from tests.support.decoding import PROMPTS, requests_for


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


def test_the_reports_curve_is_made_of_the_pairs_that_the_probe_notes(tiny_llama, as_target):
    """Two ways to the same pairs: the probe's, from proposals, and the decoder's comparison of distributions, from its
    records."""
    target = as_target(tiny_llama(seed=1))
    probe = ConfidenceProbe(DraftLM(tiny_llama(seed=2), 64))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, temperature=1.0)
    recorded, noted = StoppingCalibration(), torch.zeros(3, 10, dtype=torch.float64)
    last = torch.zeros(3, 10, dtype=torch.float64)
    for request in requests_for(PROMPTS):
        (generation,), _ = decode(target, [request], config, probe, measure_overlap=True)
        recorded.update(tabulate([generation]))
        final = [round_ for round_ in generation.rounds if round_.drafted][-1]  # which the probe leaves out
        judged = min(final.num_accepted + 1, len(final.drafted))
        kept = [place < final.num_accepted for place in range(judged)]
        last += class_sums(torch.tensor(final.distributions.distribution_confidence), torch.tensor(kept))
    pairs = torch.tensor([pair for round_ in probe.rounds for pair in round_.pairs], dtype=torch.float64)
    noted += class_sums(pairs[:, 0], pairs[:, 1])
    torch.testing.assert_close(recorded.sums_FC, noted + last, atol=1e-4, rtol=0)
    assert recorded.compute()["stopping_calibration_error"] == pytest.approx(mean_gap(noted + last, 2), abs=1e-5)
