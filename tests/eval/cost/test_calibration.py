"""Confidences are paired with what became of their drafts."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from eval.cost.draft_length import ConfidenceProbe, DraftedRound
from eval.decoder.decode import Request, decode
from heads.proposers.draft_lm import DraftLM
from heads.proposers.prompt_lookup import PromptLookup

PROMPTS = [[7, 12, 3], [20, 9, 9, 31, 5, 6], [40], [11, 12, 13, 11, 12, 13, 11, 12]]


def requests_for(prompts):
    return [Request(prompt_id=f"p{n}", category="c", tokens=tuple(prompt)) for n, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


def test_drafts_behind_the_first_refused_one_are_not_judged():
    assert DraftedRound(confidences=(0.9, 0.8, 0.7), num_accepted=1).pairs == [(0.9, True), (0.8, False)]
    assert DraftedRound(confidences=(0.9, 0.8), num_accepted=2).pairs == [(0.9, True), (0.8, True)]


def drafted_rounds(generation):
    """Rounds in which there was room for drafts, without the last of them."""
    return [round_ for round_ in generation.rounds if round_.drafted][:-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_probe_notes_the_rounds_that_the_records_hold_and_changes_none(target, tiny_llama, temperature):
    draft = DraftLM(tiny_llama(seed=2), 64)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16, temperature=temperature)
    probe = ConfidenceProbe(draft)
    assert decode(target, requests_for(PROMPTS), config, probe)[0] == decode(target, requests_for(PROMPTS), config, draft)[0]
    together, num_recorded = probe.rounds, 0
    for request in requests_for(PROMPTS):
        probe = ConfidenceProbe(draft)
        (generation,), _ = decode(target, [request], config, probe)
        num_recorded += len(generation.rounds) - 1
        recorded = [(len(round_.drafted), round_.num_accepted) for round_ in drafted_rounds(generation)]
        assert [(len(round_.confidences), round_.num_accepted) for round_ in probe.rounds] == recorded
        assert {round_.num_accepted for round_ in probe.rounds} <= {round_.num_accepted for round_ in together}
    assert num_recorded - len(PROMPTS) <= len(together) <= num_recorded


def test_a_confidence_is_the_largest_probability_that_the_draft_gave_any_token(target, tiny_llama):
    model = tiny_llama(seed=2)
    probe = ConfidenceProbe(DraftLM(model, 64))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12)
    (generation,), _ = decode(target, requests_for(PROMPTS[:1]), config, probe)
    text = [*PROMPTS[0], generation.tokens[0]]
    for round_, noted in zip(drafted_rounds(generation), probe.rounds, strict=True):
        ids_BT = torch.tensor([[*text, *round_.drafted]])
        probs_TV = model(input_ids=ids_BT, use_cache=False).logits[0].softmax(-1)
        assert noted.confidences == pytest.approx(probs_TV[len(text) - 1 : -1].amax(-1).tolist(), abs=1e-5)
        text += round_.committed


def test_lookups_have_no_distribution_and_leave_nothing_to_note(target):
    probe = ConfidenceProbe(PromptLookup(target.device))
    decode(target, requests_for(PROMPTS), DecodeConfig(num_speculative_tokens=3, max_new_tokens=16), probe)
    assert probe.rounds == []
