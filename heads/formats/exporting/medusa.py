"""Medusa as vLLM reads it: residual blocks, and output heads of the target's whole vocabulary.

vLLM 0.32 loads no reduced vocabulary for Medusa (tried). The heads of such a draft are therefore widened to all tokens, with
rows for the others that never have the largest logit (`LazyTensor.full_vocabulary_head`): a draft that proposes tokens it was
not trained for is accepted less.
"""

from __future__ import annotations

from configs.schema.heads import MedusaSettings
from heads.formats.exporting.serving import vllm_command
from heads.formats.exporting.source import Source
from heads.formats.layout import ExportLayout


def vllm(source: Source) -> ExportLayout:
    """Return Medusa for vLLM."""
    settings: MedusaSettings = source.settings
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": source.target.shape.width,
        "vocab_size": source.target.vocab_size,
        # No other key may hold both "num" and "heads": vLLM would take it for this one.
        "medusa_num_heads": settings.num_depths,
        "medusa_num_layers": settings.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not settings.own_output_heads,
        "dtype": source.dtype_name,
    }
    heads = {name: source.whole_head(stored) for name, stored in source.own_head().items()}
    return ExportLayout(
        config=config,
        weights=source.body() | (heads or {"lm_head.weight": source.target.head().cast(source.dtype)}),
        serve=vllm_command(source, "medusa"),
        notes=("vLLM takes each head's likeliest token; no tree.",),
    )
