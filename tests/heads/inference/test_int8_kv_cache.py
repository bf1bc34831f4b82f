"""Eight bits are near the values, and give speculative decoding the answers of plain decoding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import generate
from heads.inference.kv_cache import dequantise, quantise
from heads.inference.lean_forward import make_lean
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup
from tests.support.decoding import PROMPTS


@given(seed=st.integers(0, 10**6), size=st.floats(1e-6, 1e6))
@settings(max_examples=40, deadline=None)
def test_a_value_is_off_by_half_a_step_at_most(seed, size):
    values = size * torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(seed))
    steps, scales = quantise(values)
    error = (dequantise(steps, scales, torch.float64) - values).abs()
    assert (error <= scales * (0.5 + 1e-4)).all()
    largest = values.abs().argmax(-1, keepdim=True)
    assert (steps.gather(-1, largest).abs() == 127).all()
    assert (error.gather(-1, largest) <= 1e-6 * values.abs().amax()).all()


def test_zeros_stay_zeros_and_what_is_no_number_stays_none():
    values = torch.tensor([[0.0, 0.0], [1.0, float("nan")], [float("inf"), 2.0], [3.0, -3.0]])
    back = dequantise(*quantise(values), torch.float32)
    assert torch.equal(back[0], values[0])
    assert torch.equal(back[3], values[3])
    assert not torch.isfinite(back[1:3]).any()


@pytest.mark.parametrize(("forward", "batch_size"), [("transformers", 4), ("lean", 1)])
def test_speculative_answers_are_the_plain_ones_of_the_same_cache(tiny_llama, as_target, forward, batch_size):
    target = as_target(tiny_llama(seed=1, dtype=torch.float32))
    if forward == "lean":
        make_lean(target.model)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, batch_size=batch_size, kv_cache="int8")
    plain = generate(target, PROMPTS, config.model_copy(update={"num_speculative_tokens": 0, "batch_size": 1}))
    for proposer in (DraftLM(tiny_llama(seed=2, dtype=torch.float32), 64), PromptLookup(target.device)):
        assert generate(target, PROMPTS, config, proposer) == plain
