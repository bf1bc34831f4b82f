"""Target and draft of a recipe on torch's meta device, without weights, and what a step of the draft keeps.

They are the classes that training builds. Of the target only its config is needed: a folder with a `config.json`, that file
itself, or a Hub id, of which only the config is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import find_shipped
from configs.schema.commands.planning import PlanConfig, PlanDistillConfig, PlanHeadsConfig
from configs.schema.heads import DFlashSettings, HeadConfig
from configs.schema.target import TargetConfig
from configs.schema.training import StudentConfig
from distill.dataset.conversations import open_conversations
from distill.student.init import choose_trained, keep_layers, overridden_config
from heads.families.registry import FAMILIES
from heads.frozen.hidden_states import num_blocks
from heads.frozen.identity import PREFIX, locate
from heads.frozen.weights import UNREADABLE, auto_class
from heads.modules.layers import HeadLayer, shape_like
from heads.modules.output_head import DraftHead, HeadModule
from heads.vocabulary import DraftVocabulary
from train.resolve import resolve

META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class PlannedModels:
    """A recipe's target and draft."""

    config: PlanConfig  # with what it leaves to target and data
    target: PreTrainedModel  # in the recipe's dtype
    draft: nn.Module  # a head's module or a draft LM, in float32 and frozen where training freezes it
    taps: tuple[int, ...] | None  # states of the target that a head reads besides the final one; None for a draft LM

    @property
    def draft_width(self) -> int:
        """The width of the states that the draft's logits are made of."""
        model = self.draft if isinstance(self.draft, PreTrainedModel) else self.target
        return int(model.config.get_text_config().hidden_size)


def count(module: nn.Module, *, trained: bool = False) -> int:
    """Return the number of a module's parameters, all or trained only; shared ones count once."""
    return sum(each.numel() for each in module.parameters() if each.requires_grad or not trained)


def frozen_copies(module: nn.Module) -> int:
    """Return how many numbers a draft holds that are not trained: frozen weights, copied rows of the target's head."""
    buffers = sum(each.numel() for each in module.buffers() if each.is_floating_point())
    return count(module) - count(module, trained=True) + buffers


@dataclass(frozen=True, kw_only=True)
class DraftWork:
    """What a step of the draft keeps, all a token of the batch; its output head is apart."""

    kept_bytes: float  # for the backward
    judged_rows: float  # that become logits of the draft's
    columns: int  # of a row of the draft's logits
    target_columns: int  # of the target's that the loss makes a depth: the draft's where sums are made once a position


def draft_work(config: PlanConfig, models: PlannedModels, *, length: float, label_share: float) -> DraftWork:
    """Estimate a step of the draft over conversations of `length` tokens.

    For its backward a layer keeps about eight states and four vectors of the MLP's inner width at each position that it runs
    at, or its input alone where it is computed anew; other weights keep what they read.
    """
    vocab_size = int(models.target.config.get_text_config().vocab_size)
    section: HeadConfig | StudentConfig
    if isinstance(config, PlanDistillConfig):
        assert isinstance(models.draft, PreTrainedModel)
        shape, num_layers, section = shape_like(models.draft), num_blocks(models.draft), config.student
        layer_runs, other_runs, judged, beside = 1.0, 1.0, label_share, 0.0
    else:
        shape, section = shape_like(models.target), config.head
        without_attention = config.head.kind in ("medusa", "hydra")
        layers = [each for each in models.draft.modules() if isinstance(each, HeadLayer) and not without_attention]
        num_layers = len(layers)
        layer_runs, other_runs, judged = _runs(config.head, length, label_share)
        beside = _matrices(models.draft) - sum(map(_matrices, layers))
    columns = section.draft_vocab_size or vocab_size
    size = 4 if config.schedule.mixed_precision == "no" else 2  # bytes of a number that a product gives; states are float32
    kept = 4 * shape.width if config.schedule.activation_checkpointing else 8 * 4 * shape.width + 4 * size * shape.mlp_width
    return DraftWork(
        kept_bytes=kept * num_layers * layer_runs + size * beside / shape.width * other_runs,
        judged_rows=judged,
        columns=columns,
        target_columns=vocab_size if isinstance(config, PlanDistillConfig) or config.loss.temperature != 1 else columns,
    )


def _runs(head: HeadConfig, length: float, label_share: float) -> tuple[float, float, float]:
    """Return at how many positions a token a head's layers and its other weights run, and how many of them become logits."""
    depths = float(getattr(head, "num_depths", 1))
    if head.kind in ("medusa", "hydra"):
        return 1.0, label_share, depths * label_share
    if head.kind in ("eagle3", "mtp"):
        return depths, 1.0 if head.kind == "eagle3" else depths, depths * label_share
    if head.kind == "peagle":
        kept = sum(max(head.keep_share**depth, head.min_keep_share) for depth in range(head.num_depths))
        return kept, 1.0, kept * label_share
    if isinstance(head, DFlashSettings):
        blocks_a_token = min(head.num_anchors, label_share * length) / length
        return blocks_a_token * head.block_size, 1.0, blocks_a_token * head.longest_draft
    return 1.0, 1.0, label_share


def _matrices(module: nn.Module) -> int:
    """Return the numbers of a head's matrices, embeddings and output heads apart."""
    apart = [each for each in module.modules() if isinstance(each, nn.Embedding | DraftHead)]
    left_out = {id(weight) for each in apart for weight in each.parameters()}
    return sum(each.numel() for each in module.parameters() if each.ndim > 1 and id(each) not in left_out)


def plan_models(config: PlanConfig) -> PlannedModels:
    """Build a recipe's target and draft without weights; an InputError says where there is no config, or no model of it."""
    named = config.target
    model_config = read_model_config(named.name, named.revision, trust_remote_code=named.trust_remote_code)
    target = empty_model(model_config, getattr(torch, named.dtype), trust_remote_code=named.trust_remote_code)
    target.requires_grad_(False)
    train = Path(config.data.train)
    config = resolve(config, target, open_conversations(train) if train.is_file() else None)
    if isinstance(config, PlanHeadsConfig):
        family = FAMILIES[config.head.kind]
        vocabulary = _first_tokens(config.head.draft_vocab_size, target)
        with META:
            head = family.build(config.head, target, vocabulary).float()
        return PlannedModels(config=config, target=target, draft=head, taps=tuple(cast(HeadModule, head).taps))
    _first_tokens(config.student.draft_vocab_size, target)
    return PlannedModels(config=config, target=target, draft=_draft_lm(config.student, target), taps=None)


def read_model_config(
    name: str, revision: str | None = None, *, trust_remote_code: bool = False, key: str = "target.name"
) -> PreTrainedConfig:
    """Return the config of a model that a recipe names by `key`, without its weights."""
    if name.startswith(PREFIX):
        name = str(locate(TargetConfig(name=name)))
    path = find_shipped(name)
    arguments = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    try:
        place = str(path.parent) if arguments else str(path) if path.exists() else name
        config = AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=trust_remote_code, **arguments)
    except UNREADABLE as error:
        raise InputError(f"{key}: {name} has no model config that can be read: {first_line(error)}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def _draft_lm(student: StudentConfig, target: PreTrainedModel) -> PreTrainedModel:
    """Build the draft that `distill.student.init.initial_draft` makes, and freeze what it freezes."""
    if student.init == "target_layers":
        with META:
            draft = keep_layers(target, student.layers or [])
    elif student.path is not None:
        draft = empty_model(read_model_config(student.path, key="student.path"), torch.float32, key="student.path")
    else:
        draft = empty_model(overridden_config(student.overrides or {}, target), torch.float32, key="student.overrides")
    choose_trained(draft.float(), student)
    return draft


def empty_model(
    config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False, key: str = "target.name"
) -> PreTrainedModel:
    """Return a causal LM of a config on the meta device."""
    try:
        with META:
            return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (*UNREADABLE, TypeError, ZeroDivisionError) as error:
        raise InputError(f"{key}: {type(config).__name__} makes no causal LM: {first_line(error)}") from error


def _first_tokens(size: int | None, target: PreTrainedModel) -> DraftVocabulary | None:
    """Return a draft vocabulary of the asked size; which tokens it has changes no figure of a plan."""
    vocab_size = target.config.get_text_config().vocab_size
    if size is not None and size > vocab_size:
        raise InputError(f"draft_vocab_size must be at most {vocab_size}, the target's vocabulary, got {size}")
    return None if size is None else DraftVocabulary(token_ids_W=torch.arange(size), target_vocab_size=vocab_size)
