"""FLOPs of a training step by part, and the seconds they take.

Target and draft are counted by running them without weights (`train.plan.step`). Of the output heads only the rows are known
then, and a row of W logits of a D-wide state costs 2 W D forward, as much again for its gradient, and for the weights' where
they are trained. Norms, softmax and the divergence's elementwise work are left out; the optimiser's is counted in bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from transformers import PreTrainedModel

from configs.schema.commands.planning import PlanConfig, PlanHeadsConfig
from train.plan.data import Workload
from train.plan.models import PlannedModels, count
from train.plan.step import draft_step, forward_flops

TERA, GIGA = 1e12, 1e9
# AdamW reads weight, gradient and two averages, and writes all but the gradient: seven float32 numbers.
OPTIMIZER_BYTES_MOVED = 28


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs a token of the batch, by part."""

    target_forward: float
    target_logits: float
    draft_forward: float
    draft_backward: float
    draft_logits: float  # forward and backward: the chunked loss does both at once

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one optimiser step on each accelerator, communication apart, by part."""

    products: float
    optimizer: float
    cache: float

    @property
    def total(self) -> float:
        """All parts, none of them at the same time as another."""
        return self.products + self.optimizer + self.cache


def flops_of(config: PlanConfig, models: PlannedModels, work: Workload) -> Flops:
    """Return the FLOPs of training, a token."""
    step = draft_step(config, models, length=work.mean_tokens, label_share=work.label_share)
    text, cached = models.target.config.get_text_config(), config.data.cache is not None
    columns = target_columns(config, models)
    target_logits = 2.0 * step.judged_rows * text.hidden_size * columns
    if columns < text.vocab_size and not cached:  # the sums over the whole vocabulary, once a position
        target_logits += 2.0 * work.label_share * text.hidden_size * text.vocab_size
    return Flops(
        target_forward=0.0 if cached else forward_flops(models.target, work.mean_tokens),
        target_logits=target_logits,
        draft_forward=step.forward_flops,
        draft_backward=step.backward_flops,
        draft_logits=step.judged_rows
        * models.draft_width
        * draft_columns(config, models)
        * (6.0 if _trains_head(config, models) else 4.0),
    )


def draft_columns(config: PlanConfig, models: PlannedModels) -> int:
    section = config.head if isinstance(config, PlanHeadsConfig) else config.student
    return section.draft_vocab_size or int(models.target.config.get_text_config().vocab_size)


def target_columns(config: PlanConfig, models: PlannedModels) -> int:
    """Return how many of the target's logits the loss makes a depth.

    All of them, unless the sums over the whole vocabulary are computed once a position (`distill.loss.pairs`).
    """
    loss = config.loss
    sums_once = isinstance(config, PlanHeadsConfig) and loss.temperature == 1 and "cross_entropy" not in loss.weights
    return draft_columns(config, models) if sums_once else int(models.target.config.get_text_config().vocab_size)


def step_times(
    config: PlanConfig, models: PlannedModels, flops: Flops, *, tokens_per_step: float, cache_bytes_per_token: float = 0.0
) -> Times:
    """Return the seconds of a step on one accelerator, without communication.

    Args:
        config: brings the machine and its utilisation.
        flops: a token.
        tokens_per_step: on one accelerator, padding left out.
        cache_bytes_per_token: read from disk where the recipe learns from a cache.
    """
    machine = config.hardware.machine
    return Times(
        products=flops.total * tokens_per_step / (machine.tflops * TERA * config.hardware.utilisation),
        optimizer=count(models.draft, trained=True) * OPTIMIZER_BYTES_MOVED / (machine.memory_gb_per_second * GIGA),
        cache=cache_bytes_per_token * tokens_per_step / (machine.disk_gb_per_second * GIGA),
    )


def _trains_head(config: PlanConfig, models: PlannedModels) -> bool:
    if isinstance(config, PlanHeadsConfig):
        return config.head.train_head
    assert isinstance(models.draft, PreTrainedModel)
    return any(each.requires_grad for each in models.draft.get_output_embeddings().parameters())
