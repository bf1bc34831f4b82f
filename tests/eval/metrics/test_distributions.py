"""How alike two distributions are: every number against a naive float64 sum, its identities, and what the metrics make of
many."""

import math
from dataclasses import asdict, replace

import pytest
import torch

from configs.schema.decoding import SamplingConfig
from eval.decoder.distribution_comparison import compare_distributions
from eval.decoder.records import DistributionComparison
from eval.metrics.acceptance import acceptance_metrics
from eval.metrics.distributions import CALIBRATIONS, NUM_CLASSES, Calibration, DistributionAgreement
from eval.metrics.round_table import tabulate

T1 = SamplingConfig(temperature=1.0)


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return 3 * torch.randn(2, 4, 12), 3 * torch.randn(2, 4, 12), torch.randint(12, (2, 4))


def naive_distribution(row, temperature):
    weights = [math.exp(value / temperature) for value in row.double().tolist()]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(("temperature", "measured_at"), [(0.0, 1.0), (1.0, 1.0), (0.6, 0.6)])
def test_every_number_equals_a_naive_sum(logits, temperature, measured_at):
    p_logits, q_logits, tokens = logits
    found = compare_distributions(p_logits, q_logits, tokens, SamplingConfig(temperature=temperature))

    for row in range(2):
        for place in range(4):
            p = naive_distribution(p_logits[row, place], measured_at)
            q = naive_distribution(q_logits[row, place], measured_at)
            token = int(tokens[row, place])
            expected = {
                "overlap_BG": sum(map(min, p, q)) if temperature else float(p.index(max(p)) == q.index(max(q))),
                "kl_BG": sum(one * math.log(one / other) for one, other in zip(p, q, strict=True)),
                "uncovered_BG": 0.0,
                "agrees_BG": float(p.index(max(p)) == q.index(max(q))),
                "confidence_BG": q[token],
                "target_probability_BG": p[token],
            }
            for name, value in expected.items():
                assert float(getattr(found, name)[row, place]) == pytest.approx(value, rel=1e-5, abs=5e-6), name


def test_equal_distributions_overlap_wholly_and_diverge_not_at_all(logits):
    p_logits, _, tokens = logits
    found = compare_distributions(p_logits, p_logits.clone(), tokens, T1)

    torch.testing.assert_close(found.overlap_BG, torch.ones(2, 4))
    assert float(found.kl_BG.max()) < 1e-6
    assert found.agrees_BG.min() == 1
    assert torch.equal(found.confidence_BG, found.target_probability_BG)


@pytest.mark.parametrize("narrow", [True, False])
def test_tokens_that_the_draft_cannot_say_are_set_apart(logits, narrow):
    p_logits, q_logits, _ = logits
    unknown = torch.arange(12) >= 8
    said = q_logits[..., :8] if narrow else q_logits.masked_fill(unknown, float("-inf"))
    found = compare_distributions(p_logits, said, torch.zeros(2, 4, dtype=torch.int64), T1)

    p = p_logits.double().softmax(-1)
    mass = p[..., :8].sum(-1)
    p_said, q_said = p[..., :8] / mass.unsqueeze(-1), q_logits[..., :8].double().softmax(-1)
    torch.testing.assert_close(found.uncovered_BG, (1 - mass).float(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.kl_BG, (p_said * (p_said / q_said).log()).sum(-1).float(), atol=1e-5, rtol=1e-5)
    assert bool((found.overlap_BG <= mass + 1e-6).all())


def test_divergence_is_finite_where_probabilities_underflow():
    p_logits, q_logits = torch.zeros(1, 1, 3), torch.tensor([[[0.0, 0.0, -400.0]]])
    found = compare_distributions(p_logits, q_logits, torch.zeros(1, 1, dtype=torch.int64), T1)
    expected = math.log(1 / 3) - (2 / 3) * math.log(1 / 2) - (1 / 3) * (math.log(1 / 2) - 400)
    assert float(found.kl_BG) == pytest.approx(expected, rel=1e-5)


def test_a_draft_whose_logits_are_no_numbers_covers_nothing(logits):
    p_logits, q_logits, tokens = logits
    found = compare_distributions(p_logits, torch.full_like(q_logits, float("nan")), tokens, T1)
    assert {float(values.max()) for values in (found.overlap_BG, found.kl_BG, found.confidence_BG)} == {0.0}
    assert float(found.uncovered_BG.min()) == 1.0


# --- the metrics --------------------------------------------------------------------------------------------------


def drafts_of(generations):
    """Return (position, kept, overlap and distributions by name) of every compared draft, by plain loops."""
    rounds = [round_ for generation in generations for round_ in generation.rounds if round_.distributions]
    return [
        (place, place < round_.num_accepted, {name: each[place] for name, each in asdict(round_.distributions).items() if each})
        for round_ in rounds
        for place in range(len(round_.overlap))
    ]


def test_means_equal_counting_in_plain_python(random_generations):
    metric = DistributionAgreement(3)
    metric.update(tabulate(random_generations))
    fields = metric.compute()
    drafts = drafts_of(random_generations)
    for field, name in (("kl_divergence", "kl"), ("top1_agreement", "agrees"), ("uncovered_mass", "uncovered")):
        values = [distributions[name] for _, _, distributions in drafts]
        assert fields[field] == pytest.approx(sum(values) / len(values))
        second = [distributions[name] for place, _, distributions in drafts if place == 1]
        assert fields[f"{field}_by_position"][1] == pytest.approx(sum(second) / len(second))


@pytest.mark.parametrize(
    ("metric", "prefix", "confidence", "outcome"),
    [
        ("confidence", "", "confidence", "target_probability"),
        ("stopping", "stopping_", "distribution_confidence", "accepted"),
    ],
)
def test_a_reliability_curve_equals_counting_in_plain_python(random_generations, metric, prefix, confidence, outcome):
    metric = Calibration(**CALIBRATIONS[metric])
    metric.update(tabulate(random_generations))
    fields = metric.compute()
    drafts, error = [{**numbers, "accepted": kept} for _, kept, numbers in drafts_of(random_generations)], 0.0
    assert sum(each["num_drafts"] for each in fields[f"{prefix}reliability"]) == len(drafts)
    for number, each in enumerate(fields[f"{prefix}reliability"]):
        own = [draft for draft in drafts if int(draft[confidence] * NUM_CLASSES) == number]
        assert each["num_drafts"] == len(own)
        if own:
            means = {name: sum(draft[name] for draft in own) / len(own) for name in (confidence, outcome, "accepted")}
            assert each["confidence"] == pytest.approx(means[confidence])
            assert (each[outcome], each["accepted"]) == pytest.approx((means[outcome], means["accepted"]))
            error += len(own) / len(drafts) * abs(means[confidence] - means[outcome])
    assert fields[f"{prefix}calibration_error"] == pytest.approx(error)


def test_an_estimate_is_judged_by_its_gap_and_by_all_pairs_of_a_kept_and_a_refused_draft(random_generations):
    metric = Calibration(**CALIBRATIONS["estimate"])
    metric.update(tabulate(random_generations))
    assert metric.compute() == {"estimate_calibration_error": None, "estimate_auroc": None, "estimate_reliability": []}
    said = [replace(each, rounds=tuple(map(with_estimate, each.rounds))) for each in random_generations]
    metric.update(tabulate(said))
    drafts, fields = drafts_of(said), metric.compute()
    kept, refused = ([numbers["estimate"] for _, stays, numbers in drafts if stays is wanted] for wanted in (True, False))
    wins = sum((one > other) + (one == other) / 2 for one in kept for other in refused)
    assert fields["estimate_auroc"] == pytest.approx(wins / (len(kept) * len(refused)))
    assert sum(each["num_drafts"] for each in fields["estimate_reliability"]) == len(drafts)
    classes = [each for each in fields["estimate_reliability"] if each["num_drafts"]]
    error = sum(each["num_drafts"] * abs(each["confidence"] - each["accepted"]) for each in classes)
    assert fields["estimate_calibration_error"] == pytest.approx(error / len(drafts))


def with_estimate(round_):
    """Let the draft estimate its acceptance by its own probability, in steps of 0.01."""
    if round_.distributions is None:
        return round_
    estimate = tuple(int(100 * sure) / 100 for sure in round_.distributions.confidence)
    return replace(round_, distributions=replace(round_.distributions, estimate=estimate))


def test_records_of_before_the_distributions_confidence_was_kept_give_no_stopping_curve(make_round, make_generation):
    distributions = DistributionComparison(
        kl=(0.0,), uncovered=(0.0,), agrees=(True,), confidence=(1.0,), target_probability=(1.0,)
    )
    metric = Calibration(**CALIBRATIONS["stopping"])
    metric.update(tabulate([make_generation([make_round(1, 1, overlap=(1.0,), distributions=distributions)])]))
    assert metric.compute()["stopping_calibration_error"] is None


def test_drafts_without_distributions_are_not_counted_and_give_no_numbers(make_round, make_generation):
    metrics = acceptance_metrics(3)
    metrics.update(tabulate([make_generation([make_round(3, 1, overlap=(0.9, 0.5)), make_round(3, 3)])]))
    fields = metrics.compute()
    assert fields["overlap_alpha"] == pytest.approx(0.7)
    assert fields["kl_divergence"] is fields["top1_agreement"] is fields["calibration_error"] is None
    assert all(each["confidence"] is None for each in fields["reliability"])
