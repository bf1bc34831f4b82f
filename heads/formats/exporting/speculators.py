"""The form of the speculators library, which vLLM loads: EAGLE-3, P-EAGLE and block drafters.

Config keys and tensor names are those of speculators 0.9, read by vLLM 0.32; our EAGLE and DFlash tensors have these names
already. Ids of hidden states are ours: i is the residual stream after block i. A reduced vocabulary adds its offsets. The
embedding is left out, and so is a head that is the target's whole: vLLM shares the target's. speculators does so for DFlash
only, so for it EAGLE drafts are written with copies of both (`eagle_complete`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from configs.runtime.errors import InputError
from configs.schema.heads import DFlashSettings, EagleSettings
from heads.formats.exporting.source import APART, Source, speculators_line, vllm_command
from heads.formats.layout import DFLASH2_KEYS, XPRESS_KEYS, ExportLayout, layer_config

VERSION = "0.9.0"
VLLM_METHODS = {"dflash2": "dflash"}  # the others bear the family's name
ARCHITECTURES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
    "xpress": "XPressSpeculator",
}


def eagle(source: Source) -> ExportLayout:
    source.target.check_plain()
    settings: EagleSettings = source.settings
    kind, taps = source.metadata.kind, list(settings.taps or ())
    model_type = "qwen3" if settings.qk_norm else "llama"
    layers = layer_config(source.shape, model_type, settings.num_layers, source.target.vocab_size)
    options: tuple[str, ...] = ()
    if (window := getattr(settings, "window", None)) is not None:
        layers |= {"layer_types": ["sliding_attention"] * settings.num_layers}
        layers |= {"use_sliding_window": True, "sliding_window": window}
        options = (APART,)
    if len(taps) != 3:  # vLLM counts a Llama draft's taps by this key, not by their list
        layers["num_aux_hidden_states"] = len(taps)
    config = _config(source, layers) | {
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": bool(settings.norm_joined_taps),
        "fc_norm": settings.norm_taps,
        "norm_output": getattr(settings, "norm_feedback", False),
        "embed_requires_grad": bool(settings.own_embedding),
        "eagle_aux_hidden_state_layer_ids": taps,
    }
    more = {}
    if kind == "peagle":
        config["mask_token_id"], more = source.settings.mask_token_id, {"parallel_drafting": True}
    return ExportLayout(
        config=config,
        weights=source.weights | source.offsets(),
        serve=vllm_command(source, "eagle3", *options, **more),
        notes=(
            "Compare tokens with plain decoding in float32: bfloat16 flips near ties when several rows are scored at once.",
        ),
    )


def eagle_complete(source: Source) -> ExportLayout:
    """Return EAGLE-3 or P-EAGLE with copies of the target's embedding and head, which speculators looks for in the file."""
    layout = eagle(source)
    targets = {"embed_tokens.weight": source.target.embedding, "lm_head.weight": source.target.head}
    copies = {name: read().to(source.dtype) for name, read in targets.items() if name not in layout.weights}
    return replace(layout, weights=layout.weights | copies)


def block_drafter(source: Source) -> ExportLayout:
    source.target.check_plain()
    settings: DFlashSettings = source.settings
    kind = source.metadata.kind
    layers = layer_config(source.shape, "qwen3", settings.num_layers, source.target.vocab_size)
    layers |= {"layer_types": ["full_attention"] * settings.num_layers, "use_sliding_window": False, "sliding_window": None}
    config = _config(source, layers) | {
        "block_size": settings.block_size,
        "aux_hidden_state_layer_ids": list(settings.taps or ()),
        "mask_token_id": settings.mask_token_id,
        "sample_from_anchor": settings.sample_from_anchor,
        "sliding_window_non_causal": True,
    }
    return ExportLayout(
        config=config | _block_options(source),
        weights=source.weights | source.offsets(),
        serve=speculators_line if kind == "xpress" else vllm_command(source, VLLM_METHODS.get(kind, kind)),
        notes=(
            f"A block was trained with {source.num_speculative_tokens} drafts; another number changes what each slot says.",
        ),
    )


def _block_options(source: Source) -> dict[str, Any]:
    settings, kind = source.settings, source.metadata.kind
    if kind == "dspark":
        heads = {"enable_confidence_head": True, "confidence_head_with_markov": True}
        return {"markov_rank": settings.markov_rank, "markov_head_type": "vanilla", **heads}
    if kind == "dflash2" and source.vocabulary is not None:
        raise InputError("its draft vocabulary is reduced, and the form's selector has a code for every token of the target's")
    return {key: getattr(settings, key) for key in {"dflash2": DFLASH2_KEYS, "xpress": XPRESS_KEYS}.get(kind, ())}


def vllm_dflash(source: Source) -> ExportLayout:
    """Return DFlash for vLLM, whose first model runner drafts nothing from the pending token's slot."""
    source.require("vLLM", sample_from_anchor=False)
    return block_drafter(source)


def untried_in_vllm(source: Source) -> ExportLayout:
    """Return a family that vLLM decodes with its second model runner."""
    layout = block_drafter(source)
    note = "Format-checked only: vLLM 0.32 decodes it with its second model runner, which needs Triton; it was not run."
    return replace(layout, notes=(note, *layout.notes))


def _config(source: Source, layers: dict[str, Any]) -> dict[str, Any]:
    kind, tokens = source.metadata.kind, source.num_speculative_tokens
    return {
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "architectures": [ARCHITECTURES[kind]],
        "dtype": source.dtype_name,
        "tie_word_embeddings": False,
        "draft_vocab_size": source.draft_vocab_size,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {
                "name_or_path": source.target.name,
                "architectures": list(source.target.model.config.architectures or []),
            },
        },
    }
