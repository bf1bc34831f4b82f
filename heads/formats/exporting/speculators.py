"""The form of the speculators library, which vLLM loads: EAGLE-3, P-EAGLE, block drafters, and MTP for the library itself.

Config keys and tensor names are those of speculators 0.9, read by vLLM 0.32. Ids of hidden states are ours: i is the residual
stream after block i. Our EAGLE and DFlash tensors have these names already; added are the offsets of a reduced
vocabulary. The embedding is left out, and so is a head that is the target's whole: vLLM shares the target's. speculators
itself does so for DFlash and MTP only, so for it EAGLE drafts are written with copies of both (`eagle_complete`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from configs.runtime.errors import InputError
from configs.schema.heads import DFlashSettings, EagleSettings
from heads.formats.exporting import blocks
from heads.formats.exporting.source import Source
from heads.formats.layout import ExportLayout, Shapes, decoder_layer, layer_config, renamed
from heads.formats.names import MTP_PARTS

VERSION = "0.9.0"
VLLM_METHODS = {"dflash2": "dflash"}  # the others bear the family's name
ARCHITECTURES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
    "xpress": "XPressSpeculator",
    "mtp": "MTPDraftModel",
}


def eagle(source: Source) -> ExportLayout:
    """Return EAGLE-3 or P-EAGLE."""
    source.target.check_plain()
    settings: EagleSettings = source.settings
    kind, taps, shape = source.metadata.kind, list(settings.taps or ()), source.shape
    layers = layer_config(shape, "llama", settings.num_layers, source.target.vocab_size)
    if len(taps) != 3:  # vLLM counts a Llama draft's taps by this key, not by their list
        layers["num_aux_hidden_states"] = len(taps)
    config = _config(source, kind, layers) | {
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
        expected=eagle_shapes(source) | _vocabulary_shapes(source),
        serve=vllm_command(source, "eagle3", **more),
        notes=(
            "Compare tokens with plain decoding in float32: bfloat16 flips near ties when several rows are scored at once.",
        ),
    )


def eagle_complete(source: Source) -> ExportLayout:
    """Return EAGLE-3 or P-EAGLE with copies of the target's embedding and head, which speculators looks for in the file."""
    layout, shape, vocab_size = eagle(source), source.shape, source.target.vocab_size
    targets = {"embed_tokens.weight": source.target.embedding, "lm_head.weight": source.target.head}
    copies = {name: read().cast(source.dtype) for name, read in targets.items() if name not in layout.weights}
    expected = layout.expected | dict.fromkeys(copies, (vocab_size, shape.width))
    return replace(layout, weights=layout.weights | copies, expected=expected)


def eagle_shapes(source: Source) -> Shapes:
    """Return the shapes of an EAGLE body: projection, layers, norms, and an embedding of its own."""
    settings: EagleSettings = source.settings
    shape, num_taps = source.shape, len(settings.taps or ())
    shapes: Shapes = {
        "fc.weight": (shape.width, num_taps * shape.width),
        "norm.weight": (shape.width,),
        "layers.0.hidden_norm.weight": (shape.width,),
    }
    for number in range(settings.num_layers):
        read_width = 2 * shape.width if number == 0 else None
        shapes |= decoder_layer(f"layers.{number}.", shape, read_width=read_width)
    if settings.norm_taps:
        shapes |= {f"fc_norm.{number}.weight": (shape.width,) for number in range(num_taps)}
    if settings.norm_joined_taps:
        shapes["input_norm.weight"] = (num_taps * shape.width,)
    if settings.own_embedding:
        shapes["embed_tokens.weight"] = (source.target.vocab_size, shape.width)
    if source.metadata.kind == "peagle":
        shapes["mask_hidden"] = (1, 1, num_taps * shape.width)
    return shapes


def block_drafter(source: Source) -> ExportLayout:
    """Return DFlash, or a family made of it."""
    source.target.check_plain()
    settings: DFlashSettings = source.settings
    kind = source.metadata.kind
    layers = layer_config(source.shape, "qwen3", settings.num_layers, source.target.vocab_size)
    layers |= {"layer_types": ["full_attention"] * settings.num_layers, "use_sliding_window": False, "sliding_window": None}
    config = _config(source, kind, layers) | {
        "block_size": settings.block_size,
        "aux_hidden_state_layer_ids": list(settings.taps or ()),
        "mask_token_id": settings.mask_token_id,
        "sample_from_anchor": settings.sample_from_anchor,
        "sliding_window_non_causal": True,
    }
    options, shapes = blocks.PARTS[kind](source)
    return ExportLayout(
        config=config | options,
        weights=source.weights | source.offsets(),
        expected=dflash_shapes(source) | shapes | _vocabulary_shapes(source),
        serve=_load if kind == "xpress" else vllm_command(source, VLLM_METHODS.get(kind, kind)),
        notes=(
            f"A block was trained with {source.num_speculative_tokens} drafts; another number changes what each slot says.",
        ),
    )


def vllm_dflash(source: Source) -> ExportLayout:
    """Return DFlash for vLLM, whose first model runner drafts nothing from the pending token's slot."""
    source.check_drafts_after_the_anchor("vLLM")
    return block_drafter(source)


def untried_in_vllm(source: Source) -> ExportLayout:
    """Return a family that vLLM decodes with its second model runner."""
    layout = block_drafter(source)
    note = "Format-checked only: vLLM 0.32 decodes it with its second model runner, which needs Triton; it was not run."
    return replace(layout, notes=(note, *layout.notes))


def dflash_shapes(source: Source) -> Shapes:
    """Return the shapes of a DFlash body, without head."""
    settings: DFlashSettings = source.settings
    shape = source.shape
    shapes: Shapes = {
        "fc.weight": (shape.width, len(settings.taps or ()) * shape.width),
        "hidden_norm.weight": (shape.width,),
        "norm.weight": (shape.width,),
    }
    for number in range(settings.num_layers):
        shapes |= decoder_layer(f"layers.{number}.", shape, norm_heads=True)
    return shapes


def mtp(source: Source) -> ExportLayout:
    """Return MTP as speculators trains it: one module, applied again and again, on a Qwen3 target; others are refused."""
    if source.target.config.model_type != "qwen3":
        raise InputError(f"speculators knows MTP for Qwen3 and later targets, got {source.target.config.model_type}")
    if not source.settings.shared_depths:
        raise InputError("speculators has one MTP module for all depths; head.shared_depths is false here")
    source.check_head_is_the_targets("speculators")
    shape, weights = source.target.shape, source.body()
    if source.settings.concat_order == "hidden_first":
        weights = weights | {"layers.0.eh_proj.weight": weights["layers.0.eh_proj.weight"].halves_swapped()}
    layers = source.target.config.to_diff_dict()
    config = _config(source, "mtp", layers) | {"num_nextn_predict_layers": 1}
    del config["draft_vocab_size"]
    expected = mtp_shapes("mtp_layers.0.", source) | decoder_layer("mtp_layers.0.", shape, norm_heads=True)
    return ExportLayout(
        config=config,
        weights=renamed(weights, MTP_PARTS),
        expected=expected,
        serve=_load,
        notes=(
            "vLLM does not load this form; for it, stitch into the target (scripts/exchange/stitch_mtp.py).",
            f"The head was trained on states of the kind {source.settings.reads}.",
            "From the second depth on, speculators attends to that depth's states, draftsmith and vLLM to the first depth's.",
        ),
    )


def mtp_shapes(prefix: str, source: Source) -> Shapes:
    """Return the shapes of an MTP module's own parts under the names that MiMo and speculators share."""
    width = source.target.shape.width
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    return {f"{prefix}input_proj.weight": (width, 2 * width)} | {f"{prefix}{name}.weight": (width,) for name in norms}


def _load(out: str) -> str:
    return shlex.join(
        ["python", "-c", f"from speculators import SpeculatorModel; SpeculatorModel.from_pretrained({json.dumps(out)})"]
    )


def vllm_command(source: Source, method: str, *options: str, stitched: bool = False, **more: Any) -> Callable[[str], str]:
    """Return what gives the line that serves a target with a draft in vLLM, by the folder that was written.

    Args:
        source: names the target.
        method: vLLM's name of how the draft works; `more` goes beside it, `options` into the line.
        stitched: the folder is the target, with the draft in it.
    """

    def line(out: str) -> str:
        beside = {} if stitched else {"model": out}
        config = {"method": method, **beside, "num_speculative_tokens": source.num_speculative_tokens, **more}
        target = out if stitched else source.target.name
        config_words = ["--speculative-config", json.dumps(config, ensure_ascii=False)]
        return shlex.join(["vllm", "serve", target, *options, *config_words])

    return line


def _config(source: Source, kind: str, layers: dict[str, Any]) -> dict[str, Any]:
    tokens = source.num_speculative_tokens
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


def _vocabulary_shapes(source: Source) -> Shapes:
    """Return the shapes of head and offsets; a whole frozen head is the target's and left out."""
    head: Shapes = {"lm_head.weight": (source.draft_vocab_size, source.target.shape.width)}
    if source.vocabulary is not None:
        return head | {"d2t": (source.draft_vocab_size,), "t2d": (source.target.vocab_size,)}
    return head if source.settings.train_head else {}
