"""The cross-section of the families of `make models` that the suite repeats, in its tiny models.

`HYBRIDS` are those that carry states: recurrent, linear-attention and convolutional blocks, some of them beside attention.
"""

from functools import cache

from tests.support import architectures

VOCAB_SIZE = architectures.VOCAB_SIZE
STATELESS = (
    *("llama", "olmo", "llama4_text", "smollm3", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "opt", "falcon", "mpt"),
    *("gemma3_text", "gemma4_text", "cohere2_moe", "qwen2_moe", "deepseek_v3", "mellum", "diffllama", "minicpm3"),
)
HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "granitemoehybrid", "bamba", "falcon_h1", "nemotron_h"),
    *("jamba", "lfm2", "lfm2_moe", "mamba", "mamba2"),
)
tiny_model = cache(architectures.tiny_model)  # only for reading
