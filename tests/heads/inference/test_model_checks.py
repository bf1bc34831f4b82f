"""Documents in one row of a model: states are those of each alone, or the model is refused with the reason."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, MptConfig, Qwen3NextConfig, RwkvConfig

from configs.runtime.errors import InputError
from heads.inference.model_checks import check_keeps_apart, read_documents
from tests.support import family_checks as checks

LENGTHS = ((9, 1, 4), (7, 7, 0))
SMALL = {"vocab_size": 64, "hidden_size": 32, "bos_token_id": None, "eos_token_id": None}


def rows():
    """Two rows of three and two documents, the shortest of a single token; their ids and positions."""
    ids_BT = torch.randint(1, 64, (2, 14), generator=torch.Generator().manual_seed(0))
    return ids_BT, torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_documents_do_not_see_each_other(family, attention):
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(checks.CONFIGS[family]), dtype=torch.float64, attn_implementation=attention
    ).eval()
    check_keeps_apart(model)
    ids_BT, positions_BT = rows()
    with torch.no_grad():
        together_BTD = read_documents(model, ids_BT, positions_BT)
        for row, lengths in enumerate(LENGTHS):
            alone = [read_documents(model, part.unsqueeze(0), None)[0] for part in ids_BT[row].split(lengths) if len(part)]
            torch.testing.assert_close(together_BTD[row], torch.cat(alone), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (MambaConfig(**SMALL, num_hidden_layers=1, state_size=4), "layers of type linear_attention, which would run on"),
        (
            Qwen3NextConfig(**SMALL, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=2),
            "layers of type linear_attention",
        ),
        (RwkvConfig(**SMALL, num_hidden_layers=2, context_length=32), "a recurrent state, which would run on"),
        (BloomConfig(**SMALL, n_layer=1, n_head=2), "positions of several|see each other"),
        (MptConfig(**SMALL, d_model=32, n_layers=1, n_heads=2), "positions of several|see each other"),
    ],
    ids=["mamba", "qwen3-next", "rwkv", "bloom", "mpt"],
)
def test_a_model_that_cannot_keep_them_apart_is_refused_with_the_reason(config, complaint):
    torch.manual_seed(0)
    with pytest.raises(InputError, match=complaint) as raised:
        check_keeps_apart(AutoModelForCausalLM.from_config(config).eval())
    assert "set data.packing to null" in str(raised.value)


def test_the_probe_leaves_the_model_in_its_mode(tiny_llama):
    model = tiny_llama().train()
    check_keeps_apart(model)
    assert model.training
