"""Models that cannot be split, rolled back or packed are refused with the reason, and the others pass."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MambaConfig,
    MptConfig,
    OpenAIGPTConfig,
    Qwen3NextConfig,
    RwkvConfig,
    masking_utils,
)

from configs.runtime.errors import InputError
from heads.inference.causal_lm import knowing_packing
from heads.inference.model_checks import check_keeps_apart, check_rolls_back, check_split
from heads.inference.runner import backbone
from tests.support import family_checks as checks

SMALL = {"vocab_size": 64, "hidden_size": 32, "bos_token_id": None, "eos_token_id": None}


def model_from(config, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), **options).eval()


MAMBA = MambaConfig(**SMALL, num_hidden_layers=1, state_size=4)
MIXED = Qwen3NextConfig(**SMALL, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=2)
RWKV = RwkvConfig(**SMALL, num_hidden_layers=2, context_length=32)
OPENAI_GPT = OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4)


@pytest.mark.parametrize(
    ("check", "config", "complaint"),
    [
        (check_keeps_apart, MAMBA, "layers of type linear_attention, which would run on .*set data.packing to null"),
        (check_keeps_apart, MIXED, "layers of type linear_attention.*set data.packing to null"),
        (check_keeps_apart, RWKV, "a recurrent state, which would run on .*set data.packing to null"),
        (check_keeps_apart, OPENAI_GPT, "(positions of several|see each other).*set data.packing to null"),
        (
            check_keeps_apart,
            MptConfig(**SMALL, d_model=32, n_layers=1, n_heads=2),
            "(positions of several|see each other).*set data.packing to null",
        ),
        (check_rolls_back, RWKV, "RwkvForCausalLM has a recurrent state that transformers' cache does not hold"),
        (check_rolls_back, OPENAI_GPT, "OpenAIGPTLMHeadModel does not run on a cache whose rows can be rolled back"),
    ],
)
def test_a_model_that_cannot_keep_documents_apart_or_roll_back_is_refused_with_the_reason(check, config, complaint):
    with pytest.raises(InputError, match=complaint):
        check(model_from(config))


def test_a_model_with_another_memory_than_the_cache_is_refused_by_what_it_computes():
    model, seen = model_from(checks.CONFIGS["llama"]), []
    backbone(model).layers[0].register_forward_hook(lambda *_: seen.append(1) or (_[2] + 0.1 * len(seen)))
    with pytest.raises(InputError, match="computes other states after a rejected draft than without it"):
        check_rolls_back(model)


def test_a_model_whose_logits_are_not_those_of_its_head_is_refused():
    model = model_from(checks.CONFIGS["llama"])
    model.register_forward_hook(lambda _, args, output: output.__class__(logits=output.logits * 1.01))
    with pytest.raises(InputError, match=r"its head applied to its last hidden state differs by 0\.0099"):
        check_split(model)


def test_a_model_with_logits_that_are_not_finite_is_refused():
    model = model_from(checks.CONFIGS["llama"], dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(InputError, match=r"logits that are not finite in torch\.float32"):
        check_split(model)


@pytest.mark.parametrize("family", sorted(checks.CONFIGS))
def test_known_families_pass_in_training_mode_and_stay_in_it(family):
    model = model_from(checks.CONFIGS[family]).train()
    for check in (check_split, check_rolls_back, check_keeps_apart):
        check(model)
        assert model.training


# --- packed rows -------------------------------------------------------------------------------------------------------


POSITIONS_BT = torch.tensor([[0, 1, 2, 0, 1]])
DOCUMENTS_BT = torch.tensor([[0, 0, 0, 1, 1]])


def found():
    return masking_utils.find_packed_sequence_indices(POSITIONS_BT)


def test_threads_that_overlap_are_told_each_its_own_and_afterwards_transformers_looks_itself():
    together = Barrier(2, timeout=30)

    def forward(packed):
        with knowing_packing(packed=packed):
            together.wait()
            seen = found()
            together.wait()
        return seen

    with ThreadPoolExecutor(2) as pool:
        apart_BT, nothing = pool.map(forward, [True, False])
    assert apart_BT.equal(DOCUMENTS_BT)
    assert nothing is None
    assert found().equal(DOCUMENTS_BT)
