"""Reliability curves: the error is torchmetrics', the classes are a count by hand, and any split adds up to the same."""

import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import decode
from eval.metrics.distributions import CALIBRATIONS, Calibration, class_sums, describe_classes, mean_gap
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


def test_the_reports_curve_is_made_of_every_judged_draft(tiny_llama, as_target):
    """The distribution's largest probability, by a forward over the whole text, and whether the draft was accepted."""
    target, model = as_target(tiny_llama(seed=1)), tiny_llama(seed=2)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, temperature=1.0)
    generations, _ = decode(target, requests_for(PROMPTS), config, DraftLM(model, 64), measure_overlap=True)
    recorded, pairs = Calibration(**CALIBRATIONS["stopping"]), []
    recorded.update(tabulate(generations))
    for generation in generations:
        text = [*generation.prompt_tokens, generation.tokens[0]]
        for round_ in generation.rounds:
            probs_TV = model(input_ids=torch.tensor([[*text, *round_.drafted]]), use_cache=False).logits[0].softmax(-1)
            judged = min(round_.num_accepted + 1, len(round_.drafted))
            sure = probs_TV[len(text) - 1 :][:judged].amax(-1).tolist()
            pairs += [(each, place < round_.num_accepted) for place, each in enumerate(sure)]
            text += round_.committed
    sure_N, kept_N = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    torch.testing.assert_close(recorded.sums_FC, class_sums(sure_N, kept_N), atol=1e-4, rtol=0)
