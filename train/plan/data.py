"""The amount of training data, and what a target cache of it takes: counted in the data file, or as a plan's config says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.commands.planning import PlanConfig
from configs.schema.data import CacheConfig
from distill.cache.format import RowLayout
from distill.cache.writer import layout_of
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import open_conversations
from train.plan.models import PlannedModels


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training data as a plan sees it.

    num_conversations: in an epoch.
    mean_tokens: of a conversation.
    label_share: of those tokens, the labels.
    """

    num_conversations: int
    mean_tokens: float
    label_share: float

    @property
    def num_tokens(self) -> float:
        return self.num_conversations * self.mean_tokens


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """What a target cache for a recipe takes on disk, apart from the files' headers and some bytes a conversation.

    bytes_per_row: as in `scripts/make_cache.py`.
    rows: counted where the data exist, else estimated.
    """

    bytes_per_row: int
    rows: int

    @property
    def num_bytes(self) -> int:
        return self.bytes_per_row * self.rows


def open_dataset(config: PlanConfig) -> ConversationDataset | None:
    """Return the training data; None where there are none yet, or where the config has all that is counted in them.

    Raises:
        InputError: the file is not one of conversations.
    """
    path = Path(config.data.train)
    if not path.is_file() or None not in config.workload.model_dump().values():
        return None
    return ConversationDataset(open_conversations(path), config.data.max_length)


def measure_workload(config: PlanConfig, dataset: ConversationDataset | None) -> Workload:
    """Return the amount of data of an epoch.

    Args:
        config: its section workload takes precedence over the data.

    Raises:
        InputError: neither the config nor the data give it.
    """
    given = config.workload
    if given.num_conversations is not None and given.mean_tokens is not None and given.label_share is not None:
        return Workload(
            num_conversations=given.num_conversations,
            mean_tokens=min(given.mean_tokens, config.data.max_length),
            label_share=given.label_share,
        )
    if dataset is None:
        raise InputError(
            f"data.train: {config.data.train} does not exist; make it, or give workload.num_conversations, "
            "workload.mean_tokens and workload.label_share"
        )
    num_tokens = int(dataset.lengths.sum())
    return Workload(
        num_conversations=given.num_conversations or len(dataset),
        mean_tokens=given.mean_tokens or num_tokens / len(dataset),
        label_share=given.label_share or dataset.num_labels / num_tokens,
    )


def cache_size(config: PlanConfig, models: PlannedModels, work: Workload, dataset: ConversationDataset | None) -> CacheSize:
    """Return the size of the last_hidden cache that the recipe can learn from, made in the cache's default dtype.

    Counted in `dataset`, that of `open_dataset`, unless the config says anything of the data itself.

    Raises:
        ConfigError: the head taps a state that the target does not have.
    """
    layout = cache_layout(config, models.target, models.taps)
    if dataset is None or config.workload != type(config.workload)():
        rows = round(work.num_tokens * (1.0 if layout.every_position else work.label_share))
    else:
        rows = sum(
            layout.num_rows(*pair) for pair in zip(dataset.lengths.tolist(), dataset.answer_starts.tolist(), strict=True)
        )
    return CacheSize(bytes_per_row=layout.bytes_per_row, rows=rows)


def cache_layout(config: PlanConfig, target: PreTrainedModel, taps: tuple[int, ...] | None) -> RowLayout:
    cache = CacheConfig(
        target=config.target,
        data=config.data.train,
        max_length=config.data.max_length,
        taps=None if taps is None else sorted(taps),
    )
    return layout_of(cache, target, target.config.get_text_config().vocab_size)
