"""The interface between the training loop and what it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from distill.signals import SignalSource, TargetSignals
from heads.modules.interface import Batch
from train.loop.checkpoints import Progress
from train.telemetry.step_clock import StepClock


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """The loss of one micro-batch, summed over its labels, and sums for the metrics."""

    loss: Tensor  # scalar
    sums: Mapping[str, Tensor]  # by metric, over this batch's labels; the loop adds them up and divides once by all labels
    counts: Mapping[str, Tensor] = field(default_factory=dict)  # to divide by in place of the labels


class Task(Protocol):
    """What is trained: the module, its loss, its evaluation and its artifact; and how its weights may be sharded."""

    module: nn.Module
    clock: StepClock  # started by the loop
    source: SignalSource  # of the target's side of the loss
    drafts_while_training: bool  # whether `prepare` reads the module's weights

    def prepare(self, module: nn.Module, batches: list[Batch], step: int) -> tuple[list[Batch], Mapping[str, Tensor]]:
        """Return a step's micro-batches to train on in place of those of the data, and sums over their labels for the metrics.

        Args:
            module: with full weights where the task drafts with it (`drafts_while_training`); neither it nor the random state
                is changed.
            step: optimiser steps done before.
        """

    def loss(self, module: nn.Module, batch: Batch, signals: TargetSignals) -> BatchLoss:
        """Return the loss of a micro-batch under the (wrapped) module, against the target's signals over it."""

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Return metrics on held-out prompts; `tokens_per_target_step` among them chooses what is kept."""

    @property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        """The first answers of the last evaluation in the main process, as a report has them (`eval.report.build`)."""

    def save(self, module: nn.Module, progress: Progress, metrics: dict[str, float]) -> None:
        """Write the artifact of the module, which is the best so far."""

    def copy_of_module(self) -> nn.Module:
        """Return a copy of the module around the same target."""

    def units(self) -> Sequence[nn.Module]:
        """Return the module's layers that run exactly once a forward: FSDP2 units. The rest is sharded with the root."""

    def read_from_outside(self) -> Sequence[nn.Parameter]:
        """Return the weights that the module reads without running the modules that own them, for ZeRO-3."""
