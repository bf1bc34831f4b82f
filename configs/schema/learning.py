"""How a draft learns: initialisation, divergence from the target, optimiser and on-policy rows. Imports no torch."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from configs.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Settings,
    Share,
    Temperature,
    check_rising,
)


class LoraSettings(Settings):
    """Low-rank adapters on the initial draft, trained in place of its weights and merged into them in the artifact."""

    rank: PositiveInt = 16  # of the adapters
    alpha: PositiveInt = 32  # the adapters' output is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # on the input of the adapters


def _default_layers(student: dict[str, Any]) -> list[int] | None:
    """Keep the first four blocks by default; on SmolLM2 they draft better than the first and last two."""
    return [0, 1, 2, 3] if student.get("init") == "target_layers" else None


class StudentConfig(Settings):
    """The draft before training: some of the target's layers, any smaller model, or a new one."""

    init: Literal["target_layers", "model", "fresh"] = "target_layers"  # what the draft starts from
    # target_layers: the target's blocks to keep, from 0, in order; by default the first four
    layers: list[NonNegativeInt] | None = Field(default_factory=_default_layers)
    path: str | None = None  # model: folder or Hub id
    # fresh: what differs from the target's own config, e.g. {num_hidden_layers: 4, hidden_size: 256}
    overrides: dict[str, bool | int | float | str] | None = None
    # A tied embedding is the largest part of a small draft: frozen by default, unless random (fresh).
    train_embeddings: bool = False
    # tokens the draft can propose, the most frequent in answers; None: all, or with draft_vocab_by mass as many as are
    # expected to decode fastest
    draft_vocab_size: PositiveInt | None = None
    # mass: the tokens of most probability by the target over a sample of the answers, in place of the most frequent ones
    draft_vocab_by: Literal["mass"] | None = None
    lora: LoraSettings | None = None  # None: train the weights themselves

    @model_validator(mode="after")
    def _fields_go_with_init(self) -> Self:
        if (self.init == "target_layers") != (self.layers is not None):
            raise ValueError("layers is needed for init 'target_layers', and only there")
        if (self.init == "model") != (self.path is not None):
            raise ValueError("path is needed for init 'model', and only there")
        if (self.init == "fresh") != (self.overrides is not None):
            raise ValueError("overrides is needed for init 'fresh', and only there")
        if self.lora is not None and self.init == "fresh":
            raise ValueError("lora adapts trained weights; init 'fresh' makes random ones")
        return self

    @model_validator(mode="after")
    def _layers_rise(self) -> Self:
        check_rising("layers", self.layers, "block")
        if self.layers == []:
            raise ValueError("layers must keep at least one block")
        return self


DivergenceName = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "total_variation",
    "negative_log_acceptance",
    "kl_tv_blend",
    "cross_entropy",
]


class JsdSettings(Settings):
    """The Jensen-Shannon divergence, rescaled so that its ends are the two KLs."""

    beta: Share = 0.5  # 0 is the forward KL, 1 the reverse KL


class BlendSettings(Settings):
    """KL that gives way to total variation as a position's acceptance grows: the KL's weight is exp(-eta acceptance)."""

    eta: NonNegativeFloat = 3.0  # 0 is the forward KL


class DivergenceSettings(Settings):
    """Settings of single divergences, read where the divergence is used."""

    jsd: JsdSettings = JsdSettings()
    kl_tv_blend: BlendSettings = BlendSettings()


def _default_divergence(loss: dict[str, Any]) -> DivergenceName | None:
    return None if loss.get("mix") is not None else "forward_kl"


class LossConfig(Settings):
    """The divergence between the target's and the draft's distribution of the next token: a single one, or a mix."""

    mix: dict[str, NonNegativeFloat] | None = None  # weight by name, used as given, e.g. {forward_kl: 1.0, cross_entropy: 0.1}
    # between the target's and the draft's distribution; null with mix
    divergence: DivergenceName | None = Field(default_factory=_default_divergence)
    settings: DivergenceSettings = DivergenceSettings()
    temperature: PositiveFloat = 1.0  # divides both sides' logits; cross-entropy stays at 1
    chunk_size: PositiveInt = 128  # positions whose logits live at one time

    @model_validator(mode="after")
    def _one_divergence_or_a_mix(self) -> Self:
        known = get_args(DivergenceName)
        for name in self.mix or {}:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise ValueError(f"mix has the unknown divergence {name!r}; the nearest known one is {nearest!r}")
        if self.mix is not None and not any(self.mix.values()):
            raise ValueError(f"at least one weight of mix must be above 0, got {self.mix}")
        if (self.divergence is None) == (self.mix is None):
            raise ValueError("give divergence or mix, and null for the other one")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each divergence in use."""
        single = {} if self.divergence is None else {str(self.divergence): 1.0}
        return single if self.mix is None else {name: weight for name, weight in self.mix.items() if weight}


class OptimizerConfig(Settings):
    """AdamW with linear warm-up and a cosine to `final_share` of the learning rate."""

    learning_rate: PositiveFloat = 1e-3  # at its highest
    weight_decay: NonNegativeFloat = 0.0  # of AdamW, on matrices
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of AdamW
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95  # of AdamW
    max_grad_norm: PositiveFloat = 1.0  # larger gradients are scaled down to this norm
    warmup_share: Share = 0.05  # of the steps, in which the learning rate rises
    final_share: Share = 0.1  # of the learning rate, where the cosine ends: after the last step


class PolicyConfig(Settings):
    """On-policy rows: answers that the draft writes during training, and that the target supervises (GKD)."""

    on_policy: PositiveShare | None = None  # of each batch: the draft writes the answer anew; None: of no row
    temperature: Temperature = 1.0  # of the draft's draws; 0 is greedy
    max_new_tokens: PositiveInt | None = None  # longest answer; None: as long as the one in the data
