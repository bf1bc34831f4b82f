"""The head benchmark's training part: EAGLE-3 by our head and objective, and by speculators' own module, in turns.

A step is forward, loss, backward and AdamW on one batch. Both sides begin with the same weights, train the same of them (the
embedding and the output head are the target's, frozen) in the same precision, and get the same hidden states, computed
beforehand, the same conversations, depths, draft vocabulary and loss (forward KL). Before the clock runs, both must give the
same loss. Two kinds of labels: the answers' tokens, as in training, where ours leaves out what nothing is learnt from; and
every token, where both compute as many logits. Theirs packs the batch into one row and computes the logits of all places at
every depth, whatever the labels; ours also computes the target's whole distribution, for its acceptance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from configs.runtime.errors import ConfigError
from configs.schema.heads import Eagle3Settings
from configs.schema.learning import LossConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import ConversationDataset, make_loader
from distill.dataset.conversations import read_conversations
from distill.loss.head_objective import HeadObjective
from eval.stats.bootstrap import Interval
from heads.families.eagle3 import Eagle3
from heads.frozen.hidden_states import TargetStates, num_blocks, read_states
from heads.frozen.loading import Target
from heads.modules.interface import NO_DOCUMENT, Batch
from scripts.lab.bench.harness import TrainingStep
from scripts.lab.bench.peers.speculators_eagle3 import INSTALL, Eagle3Peer, PackedRow, pack, why_not_installed
from scripts.lab.settings import BenchHeadsConfig
from scripts.trials.turns import SideTurns, pooled_rate, speed_ratio, take_turns
from train.launch import make_accelerator
from train.loop.optimizer import make_optimizer
from train.tasks.head import HeadTask

log = logging.getLogger("draftsmith")

OURS, THEIRS = "ours", "speculators"
ANSWERS, EVERY_TOKEN = "answers", "every token"  # what the labels are
TOLERANCE = 1e-3  # relative; our side rounds the target's logits to the target's dtype


@dataclass(frozen=True, kw_only=True)
class PairedBatch:
    """One batch as both sides take it, with one kind of labels."""

    batch: Batch
    states: TargetStates
    theirs: PackedRow
    num_labels: Tensor
    num_tokens: int  # without padding


@dataclass(frozen=True, kw_only=True)
class TrainingComparison:
    """What was measured, by side; `losses` are of the first batch before any step, in float32."""

    turns: Mapping[str, SideTurns[TrainingStep]]
    losses: Mapping[str, float]
    batch_size: int

    @property
    def agrees(self) -> bool:
        """Whether both sides compute the same loss."""
        pairs = [[self.losses[name_of(whose, labels)] for whose in (OURS, THEIRS)] for labels in (ANSWERS, EVERY_TOKEN)]
        return all(abs(ours - theirs) <= TOLERANCE * abs(theirs) for ours, theirs in pairs)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each side."""
        rows = []
        for whose, labels in product((OURS, THEIRS), (ANSWERS, EVERY_TOKEN)):
            steps = self.turns[name_of(whose, labels)]
            rows.append(
                {
                    "training": f"eagle3, {whose}",
                    "labels": labels,
                    "batch_size": self.batch_size,
                    "steps": len(steps),
                    "tokens_per_second": pooled_rate(steps, lambda step: step.num_tokens),
                    "first_loss": self.losses[name_of(whose, labels)],
                }
            )
        return rows

    def ratios(self, samples: int) -> dict[str, Interval]:
        """Return our tokens a second over theirs, as training does it and on the same work."""
        name, ratios = "eagle3_tokens_per_second_vs_speculators", {}
        for key, labels in ((name, ANSWERS), (f"same_work_{name}", EVERY_TOKEN)):
            ours, theirs = (self.turns[name_of(whose, labels)] for whose in (OURS, THEIRS))
            ratios[key] = speed_ratio(ours, theirs, lambda step: step.num_tokens, samples=samples)
        return ratios


def name_of(whose: str, labels: str) -> str:
    """Return what a side is called."""
    return f"{whose}, labels: {labels}"


class ModuleTrainer:
    """A side: a module under its own optimiser.

    Args:
        recipe: has the optimiser's settings.
        accelerator: brings the precision.
        loss_of: the loss of a case, to go backward from.
        scale: what that loss is multiplied with to be speculators' (AdamW does not see such a factor).
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: HeadsConfig,
        accelerator: Accelerator,
        loss_of: Callable[[PairedBatch], Tensor],
        scale: float = 1.0,
    ) -> None:
        self.accelerator, self.loss_of, self.scale = accelerator, loss_of, scale
        self.module = module.train()
        self.optimizer, _ = make_optimizer(module, recipe.optimizer, 1)

    def step(self, case: PairedBatch) -> TrainingStep:
        """Take one optimiser step; returns when it is done, on a GPU as well."""
        with self.accelerator.autocast():
            loss = self.loss_of(case)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return TrainingStep(num_tokens=case.num_tokens, loss=loss.item() * self.scale)

    @torch.no_grad()
    def loss(self, case: PairedBatch) -> float:
        """Return the loss of a case as speculators scales it, in float32."""
        return self.loss_of(case).item() * self.scale


def compare_eagle3(config: BenchHeadsConfig, target: Target, recipe: HeadsConfig, scratch: Path) -> TrainingComparison | None:
    """Train by both in turns; without speculators, say so and return None.

    Args:
        recipe: of an EAGLE-3 head; its data, batches and optimiser are what both sides take.
        scratch: where accelerate may write.
    """
    if (reason := why_not_installed()) is not None:
        log.info("speculators cannot be imported (%s): its side is left out (%s)", reason, INSTALL)
        return None
    recipe = comparable(recipe)
    accelerator = make_accelerator(recipe.schedule, scratch)
    tasks = {labels: make_task(recipe, target, accelerator) for labels in (ANSWERS, EVERY_TOKEN)}
    cases = make_cases(config.num_batches, tasks[ANSWERS])
    sides, losses = {}, {}
    for labels, task in tasks.items():
        for whose, trainer in ((OURS, our_side(task, accelerator)), (THEIRS, their_side(task, accelerator))):
            name = name_of(whose, labels)
            losses[name] = trainer.loss(cases[labels][0])
            sides[name] = partial(lambda trainer, own, number, repeat: trainer.step(own[number]), trainer, cases[labels])
    numbers = range(len(cases[ANSWERS]))
    turns = take_turns(sides, numbers, 1, description="training, beside speculators", unit="batches")
    return TrainingComparison(turns=turns, losses=losses, batch_size=recipe.schedule.batch_size)


def comparable(recipe: HeadsConfig) -> HeadsConfig:
    """Return the recipe of an EAGLE-3 head with what speculators' module has, too."""
    if not isinstance(recipe.head, Eagle3Settings):
        raise ConfigError(f"eagle3: expected the recipe of an eagle3 head, got one of a {recipe.head.kind} head")
    return recipe.model_copy(
        update={
            "head": recipe.head.model_copy(update={"train_head": False}),
            "loss": LossConfig(divergence="forward_kl", chunk_size=recipe.loss.chunk_size),
            "schedule": recipe.schedule.model_copy(update={"trackers": []}),
        }
    )


def make_task(recipe: HeadsConfig, target: Target, accelerator: Accelerator) -> HeadTask:
    """Return the task of a recipe with its head untrained; the same recipe gives the same weights."""
    set_seed(recipe.schedule.seed)
    train, held_out = (read_conversations(Path(path)) for path in (recipe.data.train, recipe.data.held_out))
    return HeadTask(recipe, target, train, held_out, accelerator)


def our_side(task: HeadTask, accelerator: Accelerator) -> ModuleTrainer:
    """Return the task's own objective as a side."""
    objective, settings = cast(HeadObjective, task.module), cast(Eagle3Settings, task.config.head)

    def loss_of(case: PairedBatch) -> Tensor:
        return cast(Tensor, objective(case.batch, case.states, case.num_labels, 1).loss)

    total_weight = sum(settings.depth_decay**depth for depth in range(settings.num_depths))
    return ModuleTrainer(objective, task.config, accelerator, loss_of, total_weight)


def their_side(task: HeadTask, accelerator: Accelerator) -> ModuleTrainer:
    """Return speculators' module as a side, with the weights that the task's head has now."""
    head = cast(Eagle3, cast(HeadObjective, task.module).head)
    peer = Eagle3Peer(head, task.target)
    check_same_weights(head, peer)
    return ModuleTrainer(peer, task.config, accelerator, lambda case: cast(Tensor, peer(case.theirs)))


def check_same_weights(head: Eagle3, peer: Eagle3Peer) -> None:
    """Refuse to compare two sides that train different weights."""
    ours, theirs = (
        {name: parameter.shape for name, parameter in module.named_parameters() if parameter.requires_grad}
        for module in (head, peer.model)
    )
    if ours != theirs:
        names = ", ".join(sorted(name for name, _ in ours.items() ^ theirs.items()))
        raise RuntimeError(f"speculators' module does not train the same weights as ours: {names}")


def make_cases(num_batches: int, task: HeadTask) -> dict[str, list[PairedBatch]]:
    """Return batches of the task's data with the target's states, by kind of label, computed once for both kinds."""
    recipe, target = task.config, task.target
    batch_size = recipe.schedule.batch_size
    rows = read_conversations(Path(recipe.data.train))[: num_batches * batch_size]
    loader = make_loader(ConversationDataset(rows, recipe.data.max_length), batch_size, seed=recipe.schedule.seed)
    cases: dict[str, list[PairedBatch]] = {ANSWERS: [], EVERY_TOKEN: []}
    for on_cpu in islice(loader, num_batches):
        batch = on_cpu.to(target.device)
        states = read_states(target.model, batch.input_ids_BT, [*task.taps, num_blocks(target.model)])
        for labels, mask_BT in ((ANSWERS, batch.loss_mask_BT), (EVERY_TOKEN, batch.document_ids_BT != NO_DOCUMENT)):
            cases[labels].append(make_case(batch._replace(loss_mask_BT=mask_BT), states, recipe))
    return cases


def make_case(batch: Batch, states: TargetStates, recipe: HeadsConfig) -> PairedBatch:
    """Return a batch as both sides take it; the last tap of `states` is the state after the last block.

    Labels among the first K + 1 tokens of a conversation are taken away: no depth k < K of speculators' then reaches from one
    conversation into the labels of the next, and every depth of ours has all labels.
    """
    mask_BT = batch.loss_mask_BT.clone()
    mask_BT[:, : cast(Eagle3Settings, recipe.head).num_depths + 1] = False
    batch = batch._replace(loss_mask_BT=mask_BT)
    ours = TargetStates(final_BTE=states.final_BTE, taps_ABTE=states.taps_ABTE[:-1])
    return PairedBatch(
        batch=batch,
        states=ours,
        theirs=pack(batch, ours.joined_BTF, states.taps_ABTE[-1]),
        num_labels=mask_BT.sum().clamp(min=1),
        num_tokens=int((batch.document_ids_BT != NO_DOCUMENT).sum()),
    )
