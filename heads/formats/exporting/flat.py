"""Flat forms: EAGLE-3 as SGLang and SpecForge read it, Medusa for vLLM, DFlash as z-lab and as transformers have it.

Flat means that the draft's own sizes stand at the config's top level. Ids of hidden states count blocks from 0 and mean the
output of that block, so each is ours less one: h_0, the embedding, has no id there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from configs.runtime.errors import InputError
from configs.schema.heads import MedusaSettings
from heads.formats.exporting.source import UNTRIED, Source, sglang_command, transformers_lines, vllm_command
from heads.formats.layout import DOMINO_KEYS, ExportLayout, layer_config, renamed
from heads.frozen.hidden_states import num_blocks

NORMED = "Needs SGLang 0.5.12 or later: earlier ones pass over the draft's norms without a word, and accept fewer drafts."
MIDLAYER = (("layers.0.", "midlayer."),)
TRANSFORMERS_DFLASH = (("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc."))  # ours, and its own class's


def block_ids(source: Source) -> list[int]:
    """Return the taps as ids of blocks whose output they are; an InputError where one of them is the embedding."""
    taps: list[int] = list(source.settings.taps or ())
    if 0 in taps:
        raise InputError("it reads h_0, the embedding output, and this form names only what comes out of a block")
    return [tap - 1 for tap in taps]


def sglang_eagle(source: Source) -> ExportLayout:
    source.target.check_plain()
    settings = source.settings
    source.require("SGLang's form", norm_before_residual=False, num_layers=1, norm_joined_taps=False, own_embedding=False)
    source.require("SGLang's form", qk_norm=False)  # of Llama's layers
    source.require_three_taps("SGLang's form")
    shape, vocab_size = source.shape, source.target.vocab_size
    config = layer_config(shape, "llama", 1, vocab_size) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": source.draft_vocab_size,
        # Readers of before transformers 5 know these two only.
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "dtype": source.dtype_name,
        "torch_dtype": source.dtype_name,
        "fc_norm": settings.norm_taps,
        "norm_output": settings.norm_feedback,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": block_ids(source), "use_aux_hidden_state": True},
    }
    head = {} if source.own_head() else {"lm_head.weight": source.target.head().to(source.dtype)}
    offsets = source.offsets() or {
        "d2t": torch.zeros(vocab_size, dtype=torch.int64),
        "t2d": torch.ones(vocab_size, dtype=torch.bool),
    }
    return ExportLayout(
        config=config,
        weights=renamed(source.weights | head | offsets, MIDLAYER),
        serve=sglang_command(source, "EAGLE3", source.num_speculative_tokens),
        notes=(
            UNTRIED,
            *([NORMED] if settings.norm_taps or settings.norm_feedback else []),
            "Not for vLLM: it takes the ids of hidden states as they stand, one further than meant here; export for vllm.",
            *source.window_note("SGLang"),
        ),
    )


def vllm_medusa(source: Source) -> ExportLayout:
    """Return Medusa for vLLM, which loads no reduced vocabulary for it (0.32: tried).

    The heads of such a draft are widened to all tokens, by rows for the others that never have the largest logit.
    """
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
        weights=source.body() | (heads or {"lm_head.weight": source.target.head().to(source.dtype)}),
        serve=vllm_command(source, "medusa"),
        notes=("vLLM takes each head's likeliest token; no tree.",),
    )


def sglang_dflash(source: Source) -> ExportLayout:
    source.require("SGLang", sample_from_anchor=False)
    return _sglang_block(source)


def _sglang_block(source: Source) -> ExportLayout:
    settings = source.settings
    config = _dflash_config(source, "qwen3") | {
        "architectures": ["DFlashDraftModel"],
        "num_target_layers": num_blocks(source.target.model),
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": source.shape.rope_theta,
        "block_size": settings.block_size,
        "dflash_config": {"mask_token_id": settings.mask_token_id, "target_layer_ids": block_ids(source)},
    }
    return ExportLayout(
        config=config,
        weights=source.body(),
        serve=sglang_command(source, "DFLASH", None),  # a block has its own length
        notes=(UNTRIED, *_whole_vocabulary(source, "SGLang")),
    )


def sglang_domino(source: Source) -> ExportLayout:
    """Return Domino in SpecForge's form for SGLang, whose correction has a row for every token of the target's."""
    if source.vocabulary is not None:
        raise InputError("its draft vocabulary is reduced, and the form's correction has a row for every token of the target's")
    layout, settings = _sglang_block(source), source.settings
    more = {"projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": settings.sample_from_anchor}
    more |= {key: getattr(settings, key) for key in DOMINO_KEYS}
    config = {**layout.config, "architectures": ["DominoDraftModel"]}
    return replace(layout, config=config | {"dflash_config": config["dflash_config"] | more})


def transformers_dflash(source: Source) -> ExportLayout:
    """Return DFlash as transformers 5.23 decodes it natively."""
    source.require("transformers", sample_from_anchor=False)
    settings, last = source.settings, num_blocks(source.target.model)
    if last in (settings.taps or ()):
        raise InputError(f"it reads h_{last}, the last block's state, and transformers hands that out after the final norm")
    config = _dflash_config(source, "muse_glimmer_assistant") | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "block_size": settings.block_size,
        "mask_token_id": settings.mask_token_id,
        "target_layer_ids": block_ids(source),
        # Otherwise the class takes those of the model it was written for, which are no ids here.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "sliding_window": source.shape.max_positions,  # no layer slides, but the class wants a number
    }
    return ExportLayout(
        config=config,
        weights=renamed(source.body(), TRANSFORMERS_DFLASH),
        serve=transformers_lines(source, "AutoModel", ', speculation_type="dflash", do_sample=False'),
        notes=(
            f"One prompt at a time; {source.num_speculative_tokens} drafts a round, whatever num_assistant_tokens says.",
            "Draft and target must have the same dtype.",
            *_whole_vocabulary(source, "transformers"),
        ),
    )


def _dflash_config(source: Source, model_type: str) -> dict[str, Any]:
    source.target.check_plain()
    settings = source.settings
    layers = layer_config(source.shape, model_type, settings.num_layers, source.target.vocab_size)
    return layers | {"layer_types": ["full_attention"] * settings.num_layers, "dtype": source.dtype_name}


def _whole_vocabulary(source: Source, engine: str) -> tuple[str, ...]:
    source.require(engine, train_head=False)
    return source.whole_vocabulary_note(engine)
