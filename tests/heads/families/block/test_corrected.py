"""Families that correct a block's logits: the logits before are trained beside those after, and no correction is learnt yet."""

import pytest
import torch

from configs.schema.learning import LossConfig
from distill.loss.head_objective import HeadObjective
from heads.inference.causal_lm import head_logits
from heads.modules.interface import flat
from tests.support.family_checks import PROMPTS, SETTINGS, build, inputs_of, tiny_target


@pytest.mark.parametrize(("kind", "weight", "first"), [("dflash2", "unary_weight", 0), ("domino", "base_weight", 1)])
def test_the_logits_without_correction_are_trained_beside_those_with_it(kind, weight, first, as_target):
    target = as_target(tiny_target("llama"))
    head, alone = (build(SETTINGS[kind].model_copy(update={weight: each}), target.model).train() for each in (0.5, 0.0))
    batch, states = inputs_of(target.model, PROMPTS, head.taps)
    both, without = (HeadObjective(each, target, LossConfig())(batch, states, torch.tensor(9), 1) for each in (head, alone))
    depths, expected = head(batch, states), 0.0
    for depth in depths[first:]:
        p_NV = head_logits(target.model, flat(states.final_BTE, depth.target_places_N)).log_softmax(-1)
        u_NV = head.lm_head.logits(depth.hidden_ND[:, :32]).log_softmax(-1)
        expected = expected + depth.weight * (p_NV.exp() * (p_NV - u_NV)).sum()
    expected = 0.5 * expected / (9 * sum(depth.weight for depth in depths))
    torch.testing.assert_close(both.loss - without.loss, expected, check_dtype=False)
    torch.testing.assert_close(both.values_K, without.values_K)


@pytest.mark.parametrize("kind", ["dspark", "domino"])
@torch.no_grad()
def test_an_untrained_correction_leaves_the_blocks_logits_as_they_are(kind):
    model = tiny_target("llama")
    head = build(SETTINGS[kind], model, stir=0.0)
    for depth in head(*inputs_of(model, PROMPTS, head.taps)):
        torch.testing.assert_close(depth.logits_of(depth.hidden_ND), head.lm_head.logits(depth.hidden_ND[:, :32]))
