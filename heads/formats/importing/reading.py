"""Read drafts that other programs wrote: settings, tensors under our names, draft vocabulary.

`KNOWN` lists the forms. A feature that our families lack is refused here; whether the tensors fit the target is checked in
`heads.formats.importing.importer`.

The MTP module of a checkpoint is that of the target's own, or of one in MiMo's layout that lies beside a target, as the
export for vLLM is. Names, the order of the projection and experts kept one by one are known to `heads.frozen.mtp_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.runtime.errors import InputError
from configs.runtime.files import read_object
from configs.schema.commands.release import TAP_OF_ID, LayerIds
from heads.formats.layout import (
    DFLASH2_KEYS,
    DOMINO_KEYS,
    XPRESS_KEYS,
    Shapes,
    has_mtp_modules,
    renamed,
)
from heads.frozen.mtp_checkpoint import NativeMtp
from heads.frozen.weights import Weights, read_weights

KNOWN = (
    "speculators eagle3, peagle, dflash, dspark, dflash2 and xpress; flat EAGLE-3 (architecture ...Eagle3); Medusa "
    "(medusa_num_heads); DFlash (architecture DFlashDraftModel); Domino (architecture DominoDraftModel); a checkpoint with MTP "
    "modules"
)
BLOCK_KEYS = {"dflash": (), "dspark": (), "dflash2": DFLASH2_KEYS, "xpress": XPRESS_KEYS}  # settings of each kind of block
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
BACKBONE = "model.layers.0."  # of a checkpoint's first block


@dataclass(frozen=True, kw_only=True)
class ExternalDraft:
    """A draft as another program wrote it."""

    form: str
    kind: str
    settings: Mapping[str, Any]  # of our family `kind`, checked later
    layer: Mapping[str, Any] | None  # the config of its layers; None: they have no sizes of their own
    weights: Weights  # its tensors under our names, and `embed_tokens.weight`, `d2t`, `t2d` where they are in the file
    num_speculative_tokens: int | None = None  # what its config says; None: nothing
    optional: Weights = field(default_factory=dict)  # what to add where the file leaves it out
    layer_ids: LayerIds | None = None  # what the ids of hidden states in its config were taken to mean; None: it has none
    placed: Callable[[Shapes], Weights] | None = None  # tensors that only the shapes of ours identify, given these


def read_external(folder: Path, *, layer_ids: LayerIds | None = None, reads: str | None = None) -> ExternalDraft:
    """Read a draft's config, and where its tensors are; `layer_ids` and `reads` are those of `ImportConfig`."""
    config = read_object(folder / "config.json", "config of the draft")
    weights = read_weights(folder)
    architectures = " ".join(config.get("architectures") or ())
    try:
        if "speculators_model_type" in config:
            return _speculators(config, weights, layer_ids or "h")
        if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
            return _medusa(config, weights)
        options = config | (config.get("dflash_config") or {})
        if "DominoDraftModel" in architectures:
            return _domino(config, options, weights, layer_ids or "block_output")
        if "DFlashDraftModel" in architectures:
            return _dflash(config, options, weights, layer_ids or "block_output", "z-lab DFlash")
        if "Eagle3" in architectures or "PEagle" in architectures:
            return _flat_eagle(config, weights, layer_ids or "block_output")
    except (KeyError, TypeError, IndexError) as error:
        raise InputError(f"{folder / 'config.json'} lacks or garbles a key of its format: {error!r}") from error
    except InputError as error:
        raise InputError(f"{folder} cannot be imported: {error}") from error
    if has_mtp_modules(weights):
        return _modules_of_a_checkpoint(folder, weights, reads)
    raise InputError(f"{folder} is in no form that draftsmith reads ({KNOWN}); its architectures: {architectures or 'none'}")


def _speculators(config: dict[str, Any], weights: Weights, layer_ids: LayerIds) -> ExternalDraft:
    kind, layer = config["speculators_model_type"], config["transformer_layer_config"]
    if not isinstance(layer, dict):
        raise InputError(f"expected transformer_layer_config to be a section, got {layer!r}")
    if kind == "eagle3":
        settings = _eagle_settings(config, layer, weights, layer_ids, normed_by_default=True)
        settings["norm_feedback"] = config.get("norm_output", False)
    elif kind == "peagle":
        settings = _eagle_settings(config, layer, weights, layer_ids, normed_by_default=False)
        settings["mask_token_id"] = config["mask_token_id"]
    elif kind in BLOCK_KEYS:
        settings = _dflash_settings(config, layer, _taps(config["aux_hidden_state_layer_ids"], layer_ids))
        settings |= _markov_settings(config) if kind == "dspark" else _known(config, BLOCK_KEYS[kind])
    else:
        raise InputError(f"speculators_model_type {kind!r} is none of eagle3, peagle, {', '.join(BLOCK_KEYS)}")
    tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    if type(tokens) is not int or tokens < 1:
        raise InputError(f"expected speculative_tokens to be a number of at least 1, got {tokens!r}")
    if kind in ("eagle3", "peagle"):
        settings["num_depths"] = tokens
    return ExternalDraft(
        form=f"speculators {kind}",
        kind=kind,
        settings=settings,
        layer=layer,
        weights=weights,
        num_speculative_tokens=tokens,
        layer_ids=layer_ids,
    )


def _eagle_settings(
    config: Mapping[str, Any], layer: Mapping[str, Any], weights: Weights, layer_ids: LayerIds, *, normed_by_default: bool
) -> dict[str, Any]:
    return {
        "qk_norm": any(name.endswith(".self_attn.q_norm.weight") for name in weights) or None,
        "taps": _taps(config.get("eagle_aux_hidden_state_layer_ids"), layer_ids),
        "num_layers": layer.get("num_hidden_layers", 1),
        "norm_taps": config.get("fc_norm") or False,
        "norm_joined_taps": config.get("norm_before_fc") or None,
        # Where it is missing, what vLLM 0.32 takes.
        "norm_before_residual": config.get("norm_before_residual", normed_by_default),
    }


def _flat_eagle(config: dict[str, Any], weights: Weights, layer_ids: LayerIds) -> ExternalDraft:
    options = (config.get("eagle_config") or {}) | config
    settings = _eagle_settings(options, config, weights, layer_ids, normed_by_default=False)
    parallel = "mask_hidden" in weights
    if parallel:
        settings["mask_token_id"] = next((options[key] for key in MASK_KEYS if key in options), None)
    else:
        settings["norm_feedback"] = options.get("norm_output", False)
    return ExternalDraft(
        form="flat P-EAGLE" if parallel else "flat EAGLE-3",
        kind="peagle" if parallel else "eagle3",
        settings=settings,
        layer=config,
        weights=renamed(weights, [("midlayer.", "layers.0.")]),
        layer_ids=layer_ids,
    )


def _dflash(config: dict[str, Any], options: dict[str, Any], weights: Weights, layer_ids: LayerIds, form: str) -> ExternalDraft:
    if options.get("causal"):
        raise InputError("its slots see earlier slots only (causal), draftsmith's see the whole block")
    settings = _dflash_settings(options, config, _taps(options["target_layer_ids"], layer_ids))
    return ExternalDraft(
        form=form,
        kind="dflash",
        settings=settings,
        layer=config,
        weights=weights,
        num_speculative_tokens=options["block_size"] - 1,
        layer_ids=layer_ids,
    )


def _known(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: config[key] for key in keys}


def _markov_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise InputError(f"its bias is of the kind {kind} (markov_head_type), draftsmith's DSpark has the vanilla one")
    from_anchor = config.get("sample_from_anchor", True)  # where it is missing, what speculators takes
    return {"markov_rank": config.get("markov_rank", 256), "sample_from_anchor": from_anchor}


def _domino(config: dict[str, Any], options: dict[str, Any], weights: Weights, layer_ids: LayerIds) -> ExternalDraft:
    if (prefix := options.get("pure_draft_prefix_len", 0)) != 1:
        raise InputError(f"it leaves {prefix} drafts uncorrected (pure_draft_prefix_len), draftsmith's Domino the first alone")
    draft = _dflash(config, options, weights, layer_ids, "flat Domino")
    own = {"sample_from_anchor": options.get("shift_label", False)} | _known(options, DOMINO_KEYS)
    return replace(draft, kind="domino", settings=dict(draft.settings) | own)


def _dflash_settings(options: Mapping[str, Any], layer: Mapping[str, Any], taps: list[int] | None) -> dict[str, Any]:
    return {
        "taps": taps,
        "num_layers": layer["num_hidden_layers"],
        "block_size": options["block_size"],
        "mask_token_id": options["mask_token_id"],
        "sample_from_anchor": options.get("sample_from_anchor") or False,
    }


def _medusa(config: dict[str, Any], weights: Weights) -> ExternalDraft:
    num_heads, num_layers = config["medusa_num_heads"], config["medusa_num_layers"]
    own = any(name.startswith("lm_heads.") for name in weights)
    # A block without bias is one with a bias of 0.
    added = {
        f"{name.removesuffix('weight')}bias": stored.new_zeros(stored.shape[:1])
        for name, stored in weights.items()
        if name.startswith("blocks.") and name.endswith(".weight")
    }
    settings = {"num_depths": num_heads, "num_layers": num_layers, "own_output_heads": own, "train_head": own}
    return ExternalDraft(
        form="Medusa",
        kind="medusa",
        settings=settings,
        layer=None,
        weights=weights,
        num_speculative_tokens=num_heads,
        optional=added,
    )


def _taps(ids: list[int] | None, layer_ids: LayerIds) -> list[int] | None:
    """Return ids as engines take them, sorted and each once, counted as in artifacts; None stays open."""
    return None if ids is None else sorted({number + TAP_OF_ID[layer_ids] for number in ids})


def _modules_of_a_checkpoint(folder: Path, weights: Weights, reads: str | None) -> ExternalDraft:
    """Return a checkpoint's MTP module under our names; the block is the target's kind, and so are its tensors."""
    native = NativeMtp(folder)
    if reads is None:
        # A module that stands alone is written by `heads.formats.exporting.mtp.mimo`, whatever their naming.
        reads = native.naming.reads if any(name.startswith(BACKBONE) for name in weights) else "post_norm"
    return ExternalDraft(
        form=f"MTP of a checkpoint, named as in {native.naming.families}",
        kind="mtp",
        settings={"reads": reads},
        layer=None,
        weights={},
        placed=partial(_placed, native, weights),
    )


def _placed(native: NativeMtp, weights: Weights, own: Shapes) -> Weights:
    """Return the tensors by our names and shapes; MiMo's layout has biases of zeros where a Llama block has none."""
    like = {name: torch.empty(shape, device="meta") for name, shape in own.items() if name.startswith("layers.")}
    biases = [name for name in weights if "mtp" in name and name.endswith("_proj.bias")]
    return native.read(like, without={name for name in biases if not weights[name].any()})
