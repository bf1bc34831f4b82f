"""FLOPs of a training step by part, and the seconds they take.

A multiplication and an addition are two FLOPs. A linear layer of P weights costs 2 P a use forward, 2 P backward for its input
and, where it is trained, 2 P for its weights (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Attention costs 4 N H a pair
of query and key forward, for scores and mixing, and twice that backward. Everything else is left out: norms, softmax, the
divergence's elementwise work and the optimiser's, which moves memory and is counted in bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from transformers import PreTrainedModel

from configs.schema.planning import HardwareConfig, PlanConfig, PlanHeadsConfig
from train.plan.models import Models, count
from train.plan.uses import Uses, Workload, draft_lm_uses, head_uses, linear_layers

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
# AdamW reads weight, gradient and two averages, and writes all but the gradient: seven numbers of four bytes.
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
        """All parts."""
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


def uses_of(config: PlanConfig, work: Workload) -> Uses:
    """Return how often the parts of a recipe's draft are used."""
    return head_uses(config.head, work) if isinstance(config, PlanHeadsConfig) else draft_lm_uses(work)


def flops_of(config: PlanConfig, models: Models, work: Workload) -> Flops:
    """Return the FLOPs of training on a token."""
    uses = uses_of(config, work)
    sizes = Sizes.of(config, models)
    layers = list(linear_layers(models.body))
    weights = sum(uses.of_layer(name) * layer.weight.numel() for name, layer in layers)
    trained = sum(uses.of_layer(name) * layer.weight.numel() for name, layer in layers if layer.weight.requires_grad)
    attention = 4.0 * uses.attended_keys * sizes.draft_attention
    return Flops(
        target_forward=0.0 if config.data.cache is not None else forward_flops(models.target, work.mean_tokens),
        target_logits=_target_logits(config, sizes, uses, work),
        draft_forward=2.0 * weights + attention,
        draft_backward=2.0 * weights + 2.0 * trained + 2.0 * attention,
        draft_logits=uses.judged_rows * sizes.draft_width * sizes.draft_vocab * (6.0 if sizes.trains_head else 4.0),
    )


def forward_flops(model: PreTrainedModel, length: float) -> float:
    """Return the FLOPs a token of a causal LM's backbone over rows of `length` tokens; attention skips what is hidden."""
    config = model.config.get_text_config()
    weights = sum(layer.weight.numel() for _, layer in linear_layers(model.base_model))
    return 2.0 * weights + 4.0 * (length / 2) * config.num_hidden_layers * attention_width(model)


def attention_width(model: PreTrainedModel) -> int:
    """Return heads times head width of a model's attention."""
    config = model.config.get_text_config()
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_attention_heads * head_width)


def step_times(
    config: PlanConfig, models: Models, flops: Flops, *, tokens_per_step: float, cache_bytes_per_token: float = 0.0
) -> Times:
    """Return the seconds of a step, with no other accelerator to talk to.

    Args:
        config: brings the machine and its utilisation.
        models: of the recipe.
        flops: a token.
        tokens_per_step: on one accelerator, padding left out.
        cache_bytes_per_token: read from disk where the recipe learns from a cache.
    """
    machine = config.hardware.machine
    return Times(
        products=flops.total * tokens_per_step / effective_flops(config.hardware),
        optimizer=count(models.draft, trained=True) * OPTIMIZER_BYTES_MOVED / (machine.memory_gb_per_second * GIGA),
        cache=cache_bytes_per_token * tokens_per_step / (machine.disk_gb_per_second * GIGA),
    )


def effective_flops(hardware: HardwareConfig) -> float:
    """Return the FLOP/s that an accelerator is reckoned to reach in a step."""
    return hardware.machine.tflops * TERA * hardware.utilisation


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Widths and vocabularies of a recipe's models.

    draft_attention: heads times head width, times the draft's layers that attend.
    target_columns: of the target's logits that the loss makes a depth.
    """

    draft_width: int
    draft_vocab: int
    trains_head: bool
    draft_attention: int
    target_width: int
    target_vocab: int
    target_columns: int

    @classmethod
    def of(cls, config: PlanConfig, models: Models) -> Sizes:
        """Return a recipe's."""
        target = models.target.config.get_text_config()
        section = config.head if isinstance(config, PlanHeadsConfig) else config.student
        size, vocab = section.draft_vocab_size, target.vocab_size
        return cls(
            draft_width=models.draft_width,
            draft_vocab=vocab if size is None else size,
            trains_head=_trains_head(config, models),
            draft_attention=_draft_attention(config, models),
            target_width=target.hidden_size,
            target_vocab=vocab,
            target_columns=size if size is not None and _knows_sums(config) else vocab,
        )


def _knows_sums(config: PlanConfig) -> bool:
    """Whether the sums over the target's whole vocabulary are computed once a position (`distill.loss.target_logits`)."""
    loss = config.loss
    return isinstance(config, PlanHeadsConfig) and loss.temperature == 1 and "cross_entropy" not in loss.weights


def _target_logits(config: PlanConfig, sizes: Sizes, uses: Uses, work: Workload) -> float:
    """Count the target's logits: those of each depth, and, where only some columns are made of them, the sums once."""
    each_depth = 2.0 * uses.judged_rows * sizes.target_width * sizes.target_columns
    once = sizes.target_columns < sizes.target_vocab and config.data.cache is None
    return each_depth + (2.0 * work.label_share * sizes.target_width * sizes.target_vocab if once else 0.0)


def _trains_head(config: PlanConfig, models: Models) -> bool:
    if isinstance(config, PlanHeadsConfig):
        return config.head.train_head
    assert isinstance(models.draft, PreTrainedModel)
    return any(each.requires_grad for each in models.draft.get_output_embeddings().parameters())


def _draft_attention(config: PlanConfig, models: Models) -> int:
    if isinstance(models.draft, PreTrainedModel):
        # Causal attention skips what is hidden: half of all pairs.
        return attention_width(models.draft) * models.draft.config.get_text_config().num_hidden_layers // 2
    attending = sum(name.endswith("q_proj") for name, _ in linear_layers(models.draft))
    several = isinstance(config, PlanHeadsConfig) and config.head.kind == "mtp" and attending > 1
    return attention_width(models.target) * (1 if several else attending)


def communication_seconds(num_bytes: float, hardware: HardwareConfig, num_messages: int) -> float:
    """Return the seconds that an accelerator takes to send so many bytes in so many messages, one after another.

    Within a node at the interconnect's rate; over several nodes at that of each accelerator's share of the network.
    """
    within = hardware.num_accelerators <= hardware.accelerators_per_node
    machine = hardware.machine
    rate = machine.interconnect_gb_per_second if within else machine.network_gb_per_second
    return num_bytes / (rate * GIGA) + num_messages * hardware.latency_microseconds * MICRO
