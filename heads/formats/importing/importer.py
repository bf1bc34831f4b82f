"""Turning another program's draft into an artifact: it must fit the target, to the last tensor, or it is refused.

Sizes of its layers may be its own, and so may the embedding of an EAGLE head; whatever else has no place in our heads is
refused, with the reason. The width is the target's: a layer's input is the target's state and embedding. Tensors are streamed
from file to file.
B batch, W draft vocabulary, V target vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from configs.runtime.errors import InputError, first_finding, first_line
from configs.runtime.files import new_folder
from configs.schema.heads import LayerSettings
from heads.artifact import write_rest
from heads.families.registry import FAMILIES
from heads.formats.importing.reading import ExternalDraft
from heads.formats.layout import check_names
from heads.frozen.loading import Target
from heads.frozen.weights import Weights, write_weights
from heads.inference.causal_lm import head_rows
from heads.metadata import WEIGHTS_FILE, head_metadata
from heads.modules.layers import LayerShape, layer_shape, shape_like
from heads.modules.output_head import HeadModule
from heads.vocabulary import DraftVocabulary

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
NO_SIZES = ("architectures", "dtype", "torch_dtype", "model_type")  # keys of a layer's config
DEFAULT_TOKENS = 3
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """An external draft that fits a target."""

    settings: Any  # of its family, nothing left open
    taps: tuple[int, ...]  # of the target's states, those it reads
    weights: Weights  # exactly the tensors of our head
    vocabulary: DraftVocabulary | None  # the tokens it can propose; None: all of the target's


def fit(external: ExternalDraft, target: PreTrainedModel) -> Fitted:
    """Fit an imported draft to the target it was trained for; an InputError names all that has no place in our heads."""
    layer = {} if external.layer is None else _own_layer(external.layer, external.kind, target)
    weights = external.optional | external.weights
    vocabulary = _take_vocabulary(weights, target)
    embedding = _settle_embedding(external, weights, target)
    trained_head = _settle_head(external, weights, vocabulary, target)
    size = None if vocabulary is None else len(vocabulary)
    fitted = {"kind": external.kind, "draft_vocab_size": size, **trained_head, **layer, **embedding}
    try:
        settings: Any = FAMILIES[external.kind].settings.model_validate(dict(external.settings) | fitted)
    except ValidationError as error:
        raise InputError(f"{first_finding(error)}, got {error.errors()[0]['input']!r}") from error
    head = FAMILIES[external.kind].build(settings, target, vocabulary)
    own = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    if external.placed is not None:
        weights |= external.placed(own)
    if "mask_hidden" in weights and weights["mask_hidden"].numel() == math.prod(own.get("mask_hidden", (0,))):
        weights["mask_hidden"] = weights["mask_hidden"].reshape(own["mask_hidden"])
    check_names(weights, head)
    if integers := sorted(name for name, stored in weights.items() if stored.dtype not in FLOATS):
        raise InputError(
            f"expected floating numbers, and {', '.join(integers)} hold others (quantised weights have no place here)"
        )
    taps = tuple(cast(HeadModule, head).taps)
    return Fitted(settings=cast(Any, head).settings, taps=taps, weights=weights, vocabulary=vocabulary)


def write_artifact(
    fitted: Fitted, out: Path, target: Target, *, num_speculative_tokens: int, provenance: dict[str, Any]
) -> None:
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    metadata = head_metadata(
        fitted.settings,
        fitted.taps,
        target.identity,
        fitted.vocabulary,
        target.vocab_size,
        num_speculative_tokens=num_speculative_tokens,
        training={},
        provenance=provenance,
    )
    with new_folder(out) as scratch:
        write_weights(scratch / WEIGHTS_FILE, fitted.weights)
        write_rest(scratch, metadata, fitted.vocabulary)


def _own_layer(layer: Mapping[str, Any], kind: str, target: PreTrainedModel) -> dict[str, Any]:
    """Return a head's settings of its layers' sizes, `{}` where they are those of the target's blocks."""
    try:
        config = AutoConfig.for_model(
            layer["model_type"], **{key: value for key, value in layer.items() if key not in NO_SIZES}
        )
    except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
        raise InputError(f"the config of its layers cannot be read: {first_line(error)}") from error
    shape, own = _shape_of(config), asdict(shape_like(target))
    differences = {
        name: value
        for name, value in asdict(shape).items()
        if value != own[name] and (name != "max_positions" or shape.rope_scaling is not None)
    }
    _check_kind(config)
    window = _window_of(config, kind)
    if shape.width != own["width"]:
        raise InputError(
            f"its layers are {shape.width} wide and the target's states {own['width']}; heads are as wide as those"
        )
    if not differences:
        return window
    layer_shape(target, LayerSettings.model_validate(differences))
    return {"layer": differences, **window}


def _window_of(config: Any, kind: str) -> dict[str, Any]:
    """Return the setting of a head whose layers all slide, `{}` where none does."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" not in kinds:
        return {}
    if kinds != {"sliding_attention"} or "window" not in FAMILIES[kind].settings.model_fields:
        raise InputError(f"it has layers of {' and '.join(sorted(kinds))}; an eagle3 head's all slide or none, others' do not")
    return {"window": config.sliding_window}


def _shape_of(config: Any) -> LayerShape:
    shape = shape_like(cast(PreTrainedModel, SimpleNamespace(config=config)))  # it reads nothing else of a model
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "type") and value is not None}
    plain = scaling.get("rope_type", "default") == "default"
    return shape if plain else LayerShape(**(asdict(shape) | {"rope_scaling": scaling}))


def _check_kind(config: Any) -> None:
    """Refuse differences other than sizes and a window: another activation, partial rotary embeddings."""
    if (activation := getattr(config, "hidden_act", "silu")) not in ("silu", "swish"):
        raise InputError(f"its MLP has the activation {activation}, draftsmith's heads have silu")
    rope = getattr(config, "rope_parameters", None) or {}
    if (share := rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise InputError(f"it turns {share:g} of each head (partial_rotary_factor), draftsmith's heads turn all of it")


def _take_vocabulary(weights: Weights, target: PreTrainedModel) -> DraftVocabulary | None:
    """Take `d2t` and `t2d` out of the tensors; return the draft vocabulary that they describe."""
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if d2t is None:
        return None
    if d2t.dtype.is_floating_point or d2t.dtype == torch.bool or len(d2t.shape) != 1:
        raise InputError(f"d2t: expected a list of whole numbers, got {d2t.dtype} of shape {list(d2t.shape)}")
    V = target.config.get_text_config().vocab_size
    ids_W = d2t.long() + torch.arange(d2t.shape[0])
    try:
        vocabulary = DraftVocabulary(token_ids_W=ids_W, target_vocab_size=V)
    except ValueError as error:
        raise InputError(f"d2t, read as offsets: {error}") from error
    if t2d is not None and t2d.nonzero().squeeze(1).tolist() != ids_W.tolist():
        raise InputError("t2d marks other tokens than d2t names; d2t must hold offsets (the target's id less the draft's)")
    return None if len(vocabulary) == V else vocabulary


def _settle_embedding(external: ExternalDraft, weights: Weights, target: PreTrainedModel) -> dict[str, bool]:
    """Take a copy of the target's embedding out of the tensors; return whether the head has one of its own."""
    stored = weights.get(EMBEDDING)
    if stored is None:
        return {}
    if _same(stored, cast(Tensor, target.get_input_embeddings().weight)):
        del weights[EMBEDDING]
        return {}
    if "own_embedding" not in FAMILIES[external.kind].settings.model_fields:
        raise InputError(f"{EMBEDDING} is not the target's embedding, and {external.kind} heads here have none of their own")
    return {"own_embedding": True}


def _settle_head(
    external: ExternalDraft, weights: Weights, vocabulary: DraftVocabulary | None, target: PreTrainedModel
) -> dict[str, bool]:
    """Return whether the output head counts as trained; drop a whole one that is the target's."""
    if external.settings.get("own_output_heads"):
        return {}
    stored = weights.get(HEAD)
    if stored is None:
        return {"train_head": False}
    V = target.config.get_text_config().vocab_size
    ids_W = torch.arange(V, device=target.device) if vocabulary is None else vocabulary.token_ids_W.to(target.device)
    is_targets = _same(stored, head_rows(target, ids_W)[0])
    if is_targets and vocabulary is None:
        del weights[HEAD]
    return {"train_head": not is_targets}


def _same(stored: Tensor, own: Tensor) -> bool:
    """Whether a tensor is the target's, in the coarser of the two dtypes."""
    if stored.shape != own.shape or not stored.dtype.is_floating_point:
        return False
    coarser = min(stored.dtype, own.dtype, key=lambda dtype: -torch.finfo(dtype).eps)
    return torch.equal(stored.to(own.device, coarser), own.detach().to(coarser))


def drafts_a_round(external: ExternalDraft, asked: int | None, settings: Any) -> int:
    """Return how many tokens to draft a round: as asked (an InputError where it cannot), else by its config, else 3 at most."""
    longest = settings.longest_draft
    if asked is not None and longest is not None and asked > longest:
        raise InputError(f"num_speculative_tokens {asked}: the draft proposes at most {longest} tokens a round")
    wanted = asked or external.num_speculative_tokens or DEFAULT_TOKENS
    return wanted if longest is None else min(wanted, longest)
