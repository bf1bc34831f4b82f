"""Target and draft of a recipe on torch's meta device, without weights: what a plan counts.

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
from configs.schema.commands.planning import PlanConfig, PlanHeadsConfig
from configs.schema.target import TargetConfig
from configs.schema.training import StudentConfig
from distill.dataset.conversations import open_conversations
from distill.student.init import add_adapters, overridden_config
from distill.student.kept_blocks import keep_layers
from heads.families.registry import FAMILIES
from heads.frozen.checkpoint_files import UNREADABLE
from heads.frozen.identity import PREFIX, locate
from heads.frozen.model_config import auto_class
from heads.modules.output_head import HeadModule
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


def draft_columns(config: PlanConfig, models: PlannedModels) -> int:
    section = config.head if isinstance(config, PlanHeadsConfig) else config.student
    return section.draft_vocab_size or int(models.target.config.get_text_config().vocab_size)


def target_columns(config: PlanConfig, models: PlannedModels) -> int:
    """Return how many of the target's logits the loss makes a depth: the draft's where sums are made once a position."""
    loss = config.loss
    sums_once = isinstance(config, PlanHeadsConfig) and loss.temperature == 1 and "cross_entropy" not in loss.weights
    return draft_columns(config, models) if sums_once else int(models.target.config.get_text_config().vocab_size)


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
    draft.float()
    if student.lora is not None:
        add_adapters(draft, student.lora)
    train_embeddings = student.train_embeddings or student.init == "fresh"
    for each in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        each.requires_grad_(train_embeddings)
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
    if size is None:
        return None
    vocab_size = target.config.get_text_config().vocab_size
    if size > vocab_size:
        raise InputError(f"draft_vocab_size must be at most {vocab_size}, the target's vocabulary, got {size}")
    return DraftVocabulary(token_ids_W=torch.arange(size), target_vocab_size=vocab_size)
