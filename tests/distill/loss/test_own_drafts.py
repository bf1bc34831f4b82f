"""Depths after a head's own drafts: against drafting at one origin after the other, and the steps that are trained so."""

import pytest
import torch
from pydantic import ValidationError

from configs.schema.decoding import SamplingConfig
from configs.schema.learning import LossConfig
from configs.schema.training import HeadsConfig
from distill.loss.head_objective import HeadObjective
from tests.support import family_checks as checks

SETTINGS = checks.SETTINGS["eagle3"]
UNIFORM = 0.37  # in place of what would be drawn
ANSWER_START, LENGTH = 4, 24


def chosen(logits_V, temperature):
    if temperature == 0:
        return int(logits_V.argmax())
    return int((logits_V.softmax(-1).cumsum(-1) <= UNIFORM).sum())


def logits_at(head, model, tokens, origin, depth):
    """Return the head's logits at an origin after these tokens, of which the last is the one before the depth's."""
    depths = head(*checks.inputs_of(model, [[*tokens, 0]], head.taps))
    return depths[depth].logits_of(checks.hidden_at(depths, depth, origin))[0]


@torch.no_grad()
def half_drafted(head, model, temperature):
    """Return a text whose tokens the head drafts at the first, the second, the third depth, or not at all, in turns."""
    text = [7, 12, 3, 44]
    while len(text) < LENGTH:
        depth = (0, 0, 1, 0, 1, 2, 3)[len(text) % 7]
        text.append(9 if depth == 3 else chosen(logits_at(head, model, text, len(text) - 2 - depth, depth), temperature))
    return text


def drafted_loss(head, model, text, temperature):
    """Draft from each origin until a draft is not the text's; return the sum of the depths' weighted losses, and how many."""
    total, counts = 0, [0] * SETTINGS.num_depths
    for origin in range(ANSWER_START - 2, LENGTH - 2):
        tokens = text[: origin + 2]
        for depth in range(min(SETTINGS.num_depths, LENGTH - 2 - origin)):
            log_p = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
            logits_V = logits_at(head, model, tokens, origin, depth)
            total = total + SETTINGS.depth_decay**depth * (log_p.exp() * (log_p - logits_V.log_softmax(-1))).sum()
            counts[depth] += 1
            tokens = [*tokens, chosen(logits_V.detach(), temperature)]
            if tokens != text[: len(tokens)]:
                break
    return total, counts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk_size", [4, 128])
def test_a_depth_counts_where_the_heads_own_drafts_before_it_are_the_text(temperature, chunk_size, as_target, monkeypatch):
    model = checks.tiny_target("llama")
    head = checks.build(SETTINGS, model)
    text = half_drafted(head, model, temperature)
    total, counts = drafted_loss(head, model, text, temperature)
    assert counts[0] > counts[1] > counts[2] > 0
    batch, states = checks.inputs_of(model, [text], head.taps, answer_start=ANSWER_START)
    num_labels = batch.loss_mask_BT.sum()
    expected = total / num_labels / sum(SETTINGS.depth_decay**depth for depth in range(SETTINGS.num_depths))
    objective = HeadObjective(head, as_target(model), LossConfig(chunk_size=chunk_size))
    monkeypatch.setattr(torch, "rand", lambda size, device: torch.full((size,), UNIFORM, device=device))
    result = objective(batch, states, num_labels, 1, drafts=SamplingConfig(temperature=temperature))
    torch.testing.assert_close(result.loss, expected, atol=1e-6, rtol=1e-6)
    assert result.labels_K.tolist() == counts
    gradients = [torch.autograd.grad(loss, head.fc.weight)[0] for loss in (result.loss, expected)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)
    every = objective(batch, states, num_labels, 1)
    assert every.labels_K.tolist() == [LENGTH - ANSWER_START] * SETTINGS.num_depths


def test_it_is_refused_where_it_would_do_nothing_or_cost_what_sampling_saves():
    own = {"policy": {"on_policy": 0.5}}
    with pytest.raises(ValidationError, match=r"policy\.on_policy is for depths after the first, and early_exit trains one"):
        HeadsConfig.model_validate(own | {"head": {"kind": "early_exit"}})
    with pytest.raises(ValidationError, match=r"set loss\.sampled_tokens to null"):
        HeadsConfig.model_validate(own | {"loss": {"sampled_tokens": 64}})
