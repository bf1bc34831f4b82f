"""Turning another program's draft into an artifact: it must fit the target, to the last tensor, or it is refused.

Sizes of its layers may be its own (`heads.formats.importing.sizes`), and so may the embedding of an EAGLE head; whatever else
has no place in our heads is refused, with the reason. Tensors are streamed from file to file.
B batch, W draft vocabulary, V target vocabulary, D width.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.runtime.files import new_folder
from heads.artifact import write_rest
from heads.families.registry import FAMILIES
from heads.formats.importing.external import ExternalDraft
from heads.formats.importing.sizes import own_layer
from heads.formats.layout import check_names
from heads.frozen.checkpoint_files import LazyTensor, Weights, write_weights
from heads.frozen.identity import TargetIdentity
from heads.frozen.weights import check_counts, no_larger_than
from heads.inference.causal_lm import head_rows
from heads.metadata import WEIGHTS_FILE, head_metadata
from heads.modules.output_head import HeadModule
from heads.vocabulary import DraftVocabulary

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
DEFAULT_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """An external draft that fits a target.

    Args:
        settings: of its family, nothing left open.
        taps: of the target's states, those it reads.
        weights: exactly the tensors of our head.
        vocabulary: the tokens it can propose; None: all of the target's.
    """

    settings: Any
    taps: tuple[int, ...]
    weights: Weights
    vocabulary: DraftVocabulary | None


def fit(external: ExternalDraft, target: PreTrainedModel) -> Fitted:
    """Fit an imported draft (`heads.formats.importing.reading.read_external`) to the target it was trained for.

    Raises:
        InputError: it has layers or an embedding that our heads cannot have, wrong offsets, or tensors that are missing,
            unknown (all of them are named) or of another shape.
    """
    config = target.config.get_text_config().to_dict() if external.layer == "target" else external.layer
    layer = {} if config is None else own_layer(config, external.kind, target)
    weights = external.optional | external.weights
    vocabulary = _take_vocabulary(weights, target)
    embedding = _settle_embedding(external, weights, target)
    trained_head = _settle_head(external, weights, vocabulary, target)
    size = None if vocabulary is None else len(vocabulary)
    settings = external.checked_settings(draft_vocab_size=size, **trained_head, **layer, **embedding)
    shapes = {name: stored.shape for name, stored in weights.items()}
    check_counts(settings.model_dump(), shapes, external.form)
    # Native MTP tensors are found by the shapes of ours; there are as many depths as modules in the file.
    with nullcontext() if external.placed else no_larger_than(shapes, external.form):
        head = FAMILIES[external.kind].build(settings, target, vocabulary)
    own = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    if external.placed is not None:
        weights |= external.placed(own)
    if "mask_hidden" in weights and math.prod(weights["mask_hidden"].shape) == math.prod(own.get("mask_hidden", (0,))):
        weights["mask_hidden"] = weights["mask_hidden"].reshaped(own["mask_hidden"])
    check_names(weights, own)
    if integers := sorted(name for name, stored in weights.items() if not stored.dtype.is_floating_point):
        raise InputError(
            f"expected floating numbers, and {', '.join(integers)} hold others (quantised weights have no place here)"
        )
    taps = tuple(cast(HeadModule, head).taps)
    return Fitted(settings=cast(Any, head).settings, taps=taps, weights=weights, vocabulary=vocabulary)


def write_artifact(
    fitted: Fitted,
    out: Path,
    identity: TargetIdentity,
    *,
    vocab_size: int,
    num_speculative_tokens: int,
    provenance: dict[str, Any],
) -> None:
    """Write a fitted draft as an artifact, in a folder that must not exist; `vocab_size` is V."""
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    metadata = head_metadata(
        fitted.settings,
        fitted.taps,
        identity,
        fitted.vocabulary,
        vocab_size,
        num_speculative_tokens=num_speculative_tokens,
        training={},
        provenance=provenance,
    )
    with new_folder(out) as scratch:
        write_weights(scratch / WEIGHTS_FILE, fitted.weights)
        write_rest(scratch, metadata, fitted.vocabulary)


def _take_vocabulary(weights: Weights, target: PreTrainedModel) -> DraftVocabulary | None:
    """Take `d2t` and `t2d` out of the tensors; return the draft vocabulary that they describe."""
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if d2t is None:
        return None
    if d2t.dtype.is_floating_point or d2t.dtype == torch.bool or len(d2t.shape) != 1:
        raise InputError(f"d2t: expected a list of whole numbers, got {d2t.dtype} of shape {list(d2t.shape)}")
    V = target.config.get_text_config().vocab_size
    ids_W = d2t.load().long() + torch.arange(d2t.shape[0])
    try:
        vocabulary = DraftVocabulary(token_ids_W=ids_W, target_vocab_size=V)
    except ValueError as error:
        raise InputError(f"d2t, read as offsets: {error}") from error
    if t2d is not None and t2d.load().nonzero().squeeze(1).tolist() != ids_W.tolist():
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


def _same(stored: LazyTensor, own: Tensor) -> bool:
    """Whether a tensor is the target's, in the coarser of the two dtypes."""
    if stored.shape != tuple(own.shape) or not stored.dtype.is_floating_point:
        return False
    coarser = min(stored.dtype, own.dtype, key=lambda dtype: -torch.finfo(dtype).eps)
    return torch.equal(stored.load().to(own.device, coarser), own.detach().to(coarser))


def drafts_a_round(external: ExternalDraft, asked: int | None, settings: Any) -> int:
    """Return how many tokens to draft a round: as asked (an InputError where it cannot), else by its config, else 3 at most."""
    longest = settings.longest_draft
    if asked is not None and longest is not None and asked > longest:
        raise InputError(f"num_speculative_tokens {asked}: the draft proposes at most {longest} tokens a round")
    wanted = asked or external.num_speculative_tokens or DEFAULT_TOKENS
    return wanted if longest is None else min(wanted, longest)
