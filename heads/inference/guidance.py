"""Classifier-free guidance (Ho and Salimans, 2207.12598): the target is read twice, with its condition and without.

The unconditional text is the text with every token of the condition replaced by one that stands for none, so both have the same
positions and a tree's tokens the same ancestors. The rows without it stand behind those with it, in the forward and in the
cache. What leaves the model is uncond + scale (cond - uncond) of the final states: the output head is linear, so these are the
logits mixed alike (a bias stays, since the weights sum to 1).
B batch, T tokens, D width, S cache length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.target import GuidanceConfig

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class Guidance:
    """How a model is guided."""

    config: GuidanceConfig

    @classmethod
    def of(cls, model: PreTrainedModel, config: GuidanceConfig) -> Guidance:
        """Return the guidance of a model (`heads.inference.runner.Runner.guidance`).

        Raises:
            InputError: the model caps its logits, which are then no linear function of its states; or lacks one of the tokens.
        """
        text, highest = model.config.get_text_config(), max(config.null, *config.condition)
        if highest >= text.vocab_size:
            raise InputError(f"target.guidance: token {highest} is not among the target's {text.vocab_size}, counted from 0")
        if any(getattr(text, name, None) is not None for name in CAPS):
            raise InputError(f"target.guidance: {type(model).__name__} caps its logits; set guidance to null")
        return cls(config)

    def doubled_ids(self, ids_BT: Tensor) -> Tensor:
        """Return the texts, and behind them the same without their condition, `[2 B, T]`."""
        first, last = self.config.condition
        return torch.cat([ids_BT, ids_BT.masked_fill((ids_BT >= first) & (ids_BT <= last), self.config.null)])

    def mixed(self, hidden_2BTD: Tensor) -> Tensor:
        """Return the guided final states `[B, T, D]`."""
        with_BTD, without_BTD = hidden_2BTD.chunk(2)
        return without_BTD + self.config.scale * (with_BTD - without_BTD)


def twice(rows: Tensor | dict[str, Tensor | None] | None, num_rows: int) -> Tensor | dict[str, Tensor | None] | None:
    """Return what a forward takes by row for the doubled batch; what is the same for every row stays."""
    if isinstance(rows, dict):
        return {name: each if each is None or len(each) != num_rows else torch.cat([each, each]) for name, each in rows.items()}
    return rows if rows is None or len(rows) != num_rows else torch.cat([rows, rows])
