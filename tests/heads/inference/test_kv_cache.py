"""Whatever was cached, taken back or written over: hidden states are those of one forward over the whole text."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from heads.inference.causal_lm import forward_rows, new_cache
from heads.inference.runner import backbone

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "mistral_sliding": MistralConfig(**GROUPED, sliding_window=5),
    "gemma3_mixed": Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gpt_neox": GPTNeoXConfig(**SMALL, intermediate_size=48),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float64).eval()


def whole(model, ids):
    return backbone(model)(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("lengths", [[4, 9, 6], [6, 6, 6]], ids=["ragged", "alike"])
@torch.no_grad()
def test_rows_with_rejected_tokens_equal_one_forward_over_each_text_and_so_do_those_that_stay(model, lengths):
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 64, (20,), generator=generator).tolist() for _ in range(3)]
    cache = new_cache(model, 24)
    first = forward_rows(model, cache, torch.tensor([text[:9] for text in texts]), [0, 0, 0])
    for row, text in enumerate(texts):
        torch.testing.assert_close(first[row], whole(model, text[:9]))
    wrong = torch.randint(1, 64, (3, 4), generator=generator)
    forward_rows(model, cache, wrong, lengths)  # drafts that are then rejected
    for advance in (1, 3, 2):
        if advance == 2:
            cache.keep_rows([2, 0])
            texts, lengths = [texts[2], texts[0]], [lengths[2], lengths[0]]
        ids = torch.tensor([text[length : length + advance] for text, length in zip(texts, lengths, strict=True)])
        hidden = forward_rows(model, cache, ids, lengths)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            torch.testing.assert_close(hidden[row], whole(model, text[: length + advance])[length:])
        lengths = [length + advance for length in lengths]


@torch.no_grad()
def test_padding_of_a_row_may_stand_beyond_the_context_of_a_model_with_learned_positions():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=12, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    texts = [list(range(1, 13)), list(range(30, 42))]
    cache = new_cache(model, 16)
    forward_rows(model, cache, torch.tensor([text[:11] for text in texts]), [0, 0])
    hidden = forward_rows(model, cache, torch.tensor([[texts[0][11], 0, 0, 0], texts[1][5:9]]), [11, 5])
    torch.testing.assert_close(hidden[0, 0], whole(model, texts[0])[11])
    torch.testing.assert_close(hidden[1], whole(model, texts[1][:9])[5:])
