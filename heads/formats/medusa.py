"""Medusa as vLLM reads it: residual blocks, and output heads of the target's whole vocabulary.

vLLM 0.32 cannot load a reduced vocabulary for Medusa. A draft whose rows are the target's own, not trained, is therefore
written with the target's whole head; it then can say more tokens than it was trained for.
"""

from __future__ import annotations

from configs.errors import InputError
from configs.head_families import MedusaSettings
from heads.formats.layout import Layout, Shapes
from heads.formats.source import Source
from heads.formats.speculators import vllm_command
from heads.formats.tensors import Weights


def vllm_medusa(source: Source) -> Layout:
    """Return Medusa for vLLM.

    Raises:
        InputError: its head says some tokens only, and was trained.
    """
    settings: MedusaSettings = source.settings
    width, vocab_size = source.target.shape.width, source.target.vocab_size
    weights, notes = _heads(source)
    expected: Shapes = dict.fromkeys(_head_names(settings), (vocab_size, width))
    for head in range(settings.num_depths):
        for layer in range(settings.num_layers):
            stem = f"blocks.{head}.layers.{layer}"
            expected |= {f"{stem}.weight": (width, width), f"{stem}.bias": (width,)}
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": width,
        "vocab_size": vocab_size,
        # No other key may hold both "num" and "heads": vLLM would take it for this one.
        "medusa_num_heads": settings.num_depths,
        "medusa_num_layers": settings.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not settings.own_output_heads,
        "dtype": source.dtype_name,
    }
    method = {"method": "medusa", "model": "{out}", "num_speculative_tokens": source.num_speculative_tokens}
    return Layout(
        config=config,
        weights=source.body() | weights,
        expected=expected,
        serve=vllm_command(source, method),
        notes=("vLLM takes each head's likeliest token; no tree.", *notes),
    )


def _head_names(settings: MedusaSettings) -> list[str]:
    if not settings.own_output_heads:
        return ["lm_head.weight"]
    return [f"lm_heads.{head}.weight" for head in range(settings.num_depths)]


def _heads(source: Source) -> tuple[Weights, tuple[str, ...]]:
    """Return the output heads to be written, and what has to be said about them."""
    if source.vocabulary is None:
        return source.own_head() or {"lm_head.weight": source.target.head().cast(source.dtype)}, ()
    if source.settings.train_head:
        raise InputError(
            f"its output head was trained for {source.draft_vocab_size} tokens only, and vLLM 0.32 loads Medusa heads of the "
            f"whole vocabulary of {source.target.vocab_size} (train with head.draft_vocab_size null)"
        )
    return {"lm_head.weight": source.target.head().cast(source.dtype)}, source.whole_vocabulary_note("vLLM")
