"""How many drafts are expected to stay is summed over positions as written, and states that a draft was not made for show."""

import pytest
import torch

from configs.schema.heads import DFlashSettings, Eagle3Settings, MedusaSettings, MtpSettings
from scripts.exchange.trial import (
    Reading,
    clustered_error,
    compare_readings,
    expected_lengths,
    other_readings,
)
from tests.support import family_checks as checks

TEXT = [7, 12, 3, 44, 9, 31, 5, 6, 2, 50]
START = 4
EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2], num_depths=3)
OWN = Reading(name="own")


@pytest.mark.parametrize("vocabulary", [None, checks.SOME_TOKENS], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    "settings",
    [
        EAGLE,
        MedusaSettings(kind="medusa", num_depths=3),
        DFlashSettings(kind="dflash", taps=[1, 2], block_size=4, mask_token_id=5),
    ],
)
@torch.no_grad()
def test_each_origin_sums_the_products_of_what_the_head_gives_the_text(settings, vocabulary):
    model = checks.tiny_target("llama")
    head = checks.build(settings, model, vocabulary)
    found_N = expected_lengths(head, model, TEXT, START, OWN)
    first = len(TEXT) - 2 - len(found_N)  # the last origin has one token left to say
    assert first == START - (1 if settings.kind == "dflash" else 2)  # a block's pending token lies in the answer too
    for origin, found in enumerate(found_N[:-3].tolist(), start=first):  # the last ones have fewer than three tokens left
        drafted = TEXT[origin + 2 : origin + 5]
        logits_GW = checks.trained_logits(head, model, [TEXT[: origin + 2]], [drafted])[0]
        expected, chain = 0.0, 1.0
        for probs_W, token in zip(logits_GW.softmax(-1), drafted, strict=True):
            ids = list(range(64)) if vocabulary is None else vocabulary.token_ids_W.tolist()
            chain *= probs_W[ids.index(token)].item() if token in ids else 0.0
            expected += chain
        assert found == pytest.approx(expected, abs=1e-9)


@torch.no_grad()
def test_a_reading_takes_other_states():
    model = checks.tiny_target("llama")
    head = checks.build(EAGLE, model)
    shifted = checks.build(EAGLE.model_copy(update={"taps": [2, 3]}), model)
    one_higher_N = expected_lengths(head, model, TEXT, START, Reading(name="", shift=1))
    torch.testing.assert_close(one_higher_N, expected_lengths(shifted, model, TEXT, START, OWN))
    settings = MtpSettings(kind="mtp", num_depths=2)
    head, other = (checks.build(settings.model_copy(update={"reads": reads}), model) for reads in ("post_norm", "pre_norm"))
    otherwise_N = expected_lengths(head, model, TEXT, START, Reading(name="", other_norm=True))
    torch.testing.assert_close(otherwise_N, expected_lengths(other, model, TEXT, START, OWN))
    back_N = expected_lengths(other, model, TEXT, START, Reading(name="", other_norm=True))
    torch.testing.assert_close(back_N, expected_lengths(head, model, TEXT, START, OWN))


def test_the_readings_of_a_draft():
    model = checks.tiny_target("llama")  # 4 blocks
    shifts = {taps: [each.shift for each in other_readings(taps, model, None)] for taps in ((1, 3), (0, 3), (2, 4))}
    assert shifts == {(1, 3): [-1, 1], (0, 3): [1], (2, 4): [-1]}
    assert [each.name for each in other_readings((4,), model, "pre_norm")] == ["reads post_norm"]
    assert other_readings((), model, None) == []


def test_differences_are_taken_position_by_position():
    model = checks.tiny_target("llama")
    head = checks.build(EAGLE, model)
    texts = [(TEXT, START), (TEXT[::-1], START)]
    reading = other_readings(head.taps, model, None)[0]
    (found,) = compare_readings(head, model, texts, [reading])
    own_N, other_N = (torch.cat([expected_lengths(head, model, *text, each) for text in texts]) for each in (OWN, reading))
    gains_N = other_N - own_N
    assert (found.gain, found.expected) == pytest.approx((gains_N.mean().item(), other_N.mean().item()))
    assert found.gain_error == pytest.approx(clustered_error(gains_N.detach().split(len(gains_N) // 2)))


def test_the_error_of_a_gain_is_that_of_texts_and_not_of_origins():
    """Of equally long texts it is the standard error of their means; origins that repeat within a text change nothing."""
    means_C = torch.tensor([0.1, 0.4, -0.2, 0.3, 0.0], dtype=torch.float64)
    expected = (means_C.var() / len(means_C)).sqrt().item()
    for length in (1, 40):
        assert clustered_error([mean.repeat(length) for mean in means_C]) == pytest.approx(expected)
    uneven = [torch.full((length,), value, dtype=torch.float64) for length, value in ((30, 1.0), (10, 0.0), (20, 0.5))]
    residuals = (30 - 30 * 40 / 60, 0 - 10 * 40 / 60, 10 - 20 * 40 / 60)
    assert clustered_error(uneven) == pytest.approx((sum(each**2 for each in residuals) * 3 / 2) ** 0.5 / 60)
    assert clustered_error([torch.ones(50, dtype=torch.float64)]) == float("inf")
