"""The output head of a draft is the target's: borrowed, or a copy of some of its rows, in which case it can be trained."""

import pytest
import torch
from torch.nn import functional

from heads.inference.causal_lm import head_logits
from heads.modules.output_head import DraftHead
from heads.vocabulary import DraftVocabulary
from tests.support import family_checks as checks

IDS_W = torch.tensor([2, 5, 6, 40, 63])
SOME_TOKENS = DraftVocabulary(token_ids_W=IDS_W, target_vocab_size=checks.VOCAB_SIZE)
WAYS = [(None, False), (None, True), (SOME_TOKENS, False), (SOME_TOKENS, True)]
WAY = pytest.mark.parametrize(("vocabulary", "trainable"), WAYS, ids=["borrowed", "trained", "some rows", "some rows, trained"])


@pytest.mark.parametrize("name", sorted(checks.CONFIGS))
@WAY
def test_its_logits_start_as_the_targets(name, vocabulary, trainable):
    model = checks.tiny_target(name)
    states_BD = torch.randn(3, 32, dtype=torch.float64)
    expected_BV = head_logits(model, states_BD)  # soft-capped by Gemma
    head = DraftHead(model, vocabulary, trainable=trainable)
    logits_BW = head.logits(states_BD).double()
    torch.testing.assert_close(logits_BW, expected_BV if vocabulary is None else expected_BV[:, IDS_W], atol=1e-4, rtol=1e-4)
    if vocabulary is None:
        assert (head.vocabulary, head.token_ids) == (None, None)
    else:
        assert head.vocabulary.token_ids_W.tolist() == IDS_W.tolist()


def test_a_trained_copy_is_kept_in_float32_and_leaves_the_target_alone(tiny_llama):
    model = tiny_llama(dtype=torch.bfloat16)
    before_VD = model.lm_head.weight.clone()
    head = DraftHead(model, None, trainable=True)
    assert head.weight.dtype == torch.float32
    with torch.no_grad():
        head.weight += 1
    assert torch.equal(model.lm_head.weight, before_VD)
    frozen = DraftHead(model, SOME_TOKENS, trainable=False)
    assert frozen.weight.dtype == torch.bfloat16
    assert frozen.logits(torch.zeros(1, 32)).dtype == torch.bfloat16


def test_a_frozen_weight_is_cast_for_autocast_once_and_anew_where_it_changed(tiny_llama):
    head = DraftHead(tiny_llama(), SOME_TOKENS, trainable=False).float()
    states_ND = torch.randn(3, 32)

    def logits():
        with torch.autocast("cpu", torch.bfloat16):
            return head.logits(states_ND)

    plain = functional.linear(states_ND.bfloat16(), head.weight.bfloat16())
    assert torch.equal(logits(), plain)
    kept = head._cast
    assert torch.equal(logits(), plain)
    with torch.inference_mode():
        assert torch.equal(logits(), plain)
    assert head._cast is kept
    head.weight.mul_(2)
    assert torch.equal(logits(), 2 * plain)
    assert head.logits(states_ND).dtype == torch.float32  # without autocast
