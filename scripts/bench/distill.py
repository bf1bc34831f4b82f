"""The distillation loss beside a plain one, and training steps beside TRL's: `python -m scripts.bench.distill`.

Needs the draft LM of `make bench`. TRL's side is left out where `trl` is not installed (written for 1.16.0; its trainer
runs at its best: no activation checkpointing, no logging, no data loading in the step). Both sides of the loss take the
same random hidden states and frozen bfloat16 heads, a process each pass. B batch, T positions of a row; N positions, D width, V
vocabulary of the loss.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.nn import functional as F

from configs.runtime.command import DONE, GATE_FAILED, run_command
from configs.schema.base import PositiveInt, Settings
from configs.schema.training import DistillConfig, LossConfig
from distill.dataset.batches import ConversationDataset, make_loader
from distill.dataset.conversations import Conversation, read_conversations
from distill.loss.divergences import forward_kl
from distill.loss.fused import DraftRows, LogitHead, TargetRows, fused_loss
from distill.student.init import initial_draft
from eval.stats import Interval, paired_ratio_interval
from heads.frozen.loading import Target, load_target
from heads.metadata import read_metadata
from heads.modules.interface import NO_DOCUMENT, Batch
from scripts.bench.harness import speed_ratio, take_turns, write_results
from train.launch import make_accelerator
from train.loop.engines import make_optimizer
from train.tasks.draft import DraftTask

log = logging.getLogger("draftsmith")

OURS, UNCHUNKED = "chunked", "unchunked"
GKD, SAME_WORK = "trl_gkd", "ours, the same work"
TRL_IS_INSTALLED = importlib.util.find_spec("trl") is not None
IGNORED = -100  # TRL's label of a position that is not trained

Step = Callable[[Batch], object]  # an optimiser step, done when it returns


class DistillBenchConfig(Settings):
    """`python -m scripts.bench.distill`: the loss's memory and time, and training beside TRL."""

    draft: str = "runs/heads/draft_lm/artifact"  # a distilled draft LM; its target, data and recipe are what is measured
    vocab_size: PositiveInt = 151_936  # of the loss: rows of both heads
    width: PositiveInt = 576  # of both sides' hidden states
    chunk_size: PositiveInt = 128  # positions whose logits live at one time in our loss
    positions: PositiveInt = 4096  # the unchunked loss takes 36 bytes a position and token: 21 GiB
    repeats: PositiveInt = 3  # processes by side, each for one pass
    num_batches: PositiveInt = 12  # timed optimiser steps by side
    batch_size: PositiveInt = 4  # conversations a step
    output: str = "docs/results/distill.json"


def compare_distillation(config: DistillBenchConfig) -> int:
    rows, ratios, agrees = measure_losses(config)
    with TemporaryDirectory(prefix="bench-distill-") as scratch:
        steps, speed = compare_training(config, Path(scratch))
    threads = torch.get_num_threads()
    write_results(config.output, "distill", rows=[*rows, *steps], ratios=ratios | speed, config=config, threads=threads)
    if not agrees:
        log.error("the two losses have different values: a ratio of the times of two computations would mean nothing")
    return DONE if agrees else GATE_FAILED


# --- training ---------------------------------------------------------------------------------------------------------


def compare_training(config: DistillBenchConfig, scratch: Path) -> tuple[list[dict[str, Any]], dict[str, Interval]]:
    """Let each side take a step on every batch, every token a label, as TRL's trainer has it; return rows and the ratio."""
    recipe = plain_recipe(DistillConfig.model_validate(read_metadata(Path(config.draft)).training), scratch)
    accelerator = make_accelerator(recipe.schedule, scratch)
    target = load_target(recipe.target.model_copy(update={"device": str(accelerator.device)}))
    rows = read_conversations(Path(recipe.data.train))
    steps = {SAME_WORK: our_steps(recipe, target, rows, accelerator, config.num_batches)}
    if TRL_IS_INSTALLED:
        steps[GKD] = trl_steps(recipe, target, scratch)
    dataset = ConversationDataset(rows[: config.num_batches * config.batch_size], int(recipe.data.max_length))
    loader = make_loader(dataset, config.batch_size, seed=recipe.schedule.seed)
    batches = [every_token_a_label(batch.to(target.device)) for batch in islice(loader, config.num_batches)]

    def timed(step: Step, batch: Batch, repeat: int) -> int:
        step(batch)
        return int((batch.document_ids_BT != NO_DOCUMENT).sum())

    sides = {name: partial(timed, step) for name, step in steps.items()}
    turns = take_turns(sides, batches, 1, description="training steps", unit="batches")
    measured = []
    for name, own in turns.items():
        seconds, tokens = (sum(getattr(turn, what) for (turn,) in own) for what in ("seconds", "result"))
        rates = {"tokens_per_second": tokens / seconds, "steps_per_second": len(own) / seconds}
        measured.append({"training": name, "batch_size": config.batch_size, "steps": len(own), **rates})
    if GKD not in turns:
        return measured, {}
    return measured, {"tokens_per_second_vs_trl_gkd": speed_ratio(turns[SAME_WORK], turns[GKD], float)}


def plain_recipe(recipe: DistillConfig, scratch: Path) -> DistillConfig:
    """Return a recipe with the loss and the vocabulary that TRL has too."""
    changes = {
        "data": recipe.data.model_copy(update={"cache": None}),
        "schedule": recipe.schedule.model_copy(update={"trackers": []}),
        "student": recipe.student.model_copy(update={"draft_vocab_size": None}),
        "loss": LossConfig(chunk_size=recipe.loss.chunk_size),
        "output": str(scratch / "run"),
    }
    return recipe.model_copy(update=changes)


def every_token_a_label(batch: Batch) -> Batch:
    """Return the batch with all its real tokens as labels but the first of each row, which nothing predicts."""
    mask_BT = batch.document_ids_BT != NO_DOCUMENT
    mask_BT[:, 0] = False
    return batch._replace(loss_mask_BT=mask_BT)


def our_steps(
    recipe: DistillConfig, target: Target, rows: Sequence[Conversation], accelerator: Accelerator, num_steps: int
) -> Step:
    """Return the steps of our training of a recipe, from an untrained draft."""
    set_seed(recipe.schedule.seed)
    task = DraftTask(recipe, target, rows, rows[: recipe.held_out.num_prompts], accelerator)
    optimizer, _ = make_optimizer(task.module, recipe.optimizer, num_steps + 1)
    module, optimizer = accelerator.prepare(task.module, optimizer)

    def step(batch: Batch) -> float:
        with accelerator.autocast():
            loss = task.loss(module, batch, task.source.read(batch)).loss / batch.loss_mask_BT[:, 1:].sum()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), recipe.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())  # which waits for the device

    return step


def trl_steps(recipe: DistillConfig, target: Target, scratch: Path) -> Step:
    """Return the steps of TRL's trainer: forward KL on given answers, AdamW."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    set_seed(recipe.schedule.seed)
    adamw = recipe.optimizer
    arguments = GKDConfig(
        output_dir=str(scratch / "trl"),
        report_to="none",
        disable_tqdm=True,
        learning_rate=adamw.learning_rate,
        weight_decay=adamw.weight_decay,
        adam_beta1=adamw.beta1,
        adam_beta2=adamw.beta2,
        bf16=recipe.schedule.mixed_precision == "bf16",
        use_cpu=target.device.type == "cpu",
        lmbda=0.0,  # on given answers
        beta=0.0,  # KL(target || draft)
        activation_checkpointing=False,
    )
    unused = [{"messages": [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}]}]  # it wants some
    trainer = GKDTrainer(
        model=initial_draft(recipe.student, target),
        teacher_model=copy.deepcopy(target.model),
        args=arguments,
        train_dataset=Dataset.from_list(unused),
        processing_class=target.tokenizer,
    )
    optimizer = trainer.accelerator.prepare_optimizer(trainer.create_optimizer())
    model = trainer.accelerator.prepare_model(trainer.model)

    def step(batch: Batch) -> float:
        attended_BT = (batch.document_ids_BT != NO_DOCUMENT).long()
        labels_BT = batch.input_ids_BT.masked_fill(~batch.loss_mask_BT, IGNORED)
        inputs = {"input_ids": batch.input_ids_BT, "attention_mask": attended_BT, "labels": labels_BT}
        loss = trainer.training_step(model, inputs, int(batch.loss_mask_BT[:, 1:].sum()))
        trainer.accelerator.clip_grad_norm_(model.parameters(), adamw.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


# --- the loss -----------------------------------------------------------------------------------------------------------


def measure_losses(config: DistillBenchConfig) -> tuple[list[dict[str, Any]], dict[str, Interval], bool]:
    """Return rows, the ratios of our memory and time over the plain loss's, and whether both have the same value."""
    sides = {name: partial(measure_pass, config, name) for name in (OURS, UNCHUNKED)}
    turns = take_turns(sides, range(config.repeats), 1, description="losses")
    passes = {name: [turn.result for (turn,) in own] for name, own in turns.items()}
    rows: list[dict[str, Any]] = []
    for name, own in passes.items():
        sizes = {"loss": name, "vocabulary": config.vocab_size, "positions": config.positions}
        rows.append(sizes | {"peak_mebibytes": fmean(each[0] for each in own), "seconds": fmean(each[1] for each in own)})
    ratios, ones = {}, [1.0] * config.repeats
    for place, what in enumerate(("peak_memory", "time")):
        ours, theirs = ([each[place] for each in passes[name]] for name in (OURS, UNCHUNKED))
        ratios[f"loss_{what}_vs_unchunked"] = paired_ratio_interval(ours, ones, theirs, ones)
    return rows, ratios, math.isclose(passes[OURS][0][2], passes[UNCHUNKED][0][2], rel_tol=1e-3)


def measure_pass(config: DistillBenchConfig, name: str, number: int, repeat: int) -> tuple[float, float, float]:
    """Run `forward_backward` in a new process, which inherits neither memory nor a peak from this one."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(forward_backward, config, name).result()


def forward_backward(config: DistillBenchConfig, name: str) -> tuple[float, float, float]:
    """Return what one pass takes: growth of the resident set over the loaded inputs in MiB, seconds, and the loss."""
    loss_of: Callable[..., Tensor] = partial(chunked_kl, chunk_size=config.chunk_size) if name == OURS else unchunked_kl
    loss_of(*make_inputs(2, config.width, 16)).backward()  # what libraries take at their first use is not the loss's
    inputs = make_inputs(config.positions, config.width, config.vocab_size)
    before = read_kibibytes("VmRSS")
    # Resets the peak. getrusage's ru_maxrss cannot be reset, and begins with the peak of the parent process.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    started = time.perf_counter()
    loss = loss_of(*inputs)
    loss.backward()
    return (read_kibibytes("VmHWM") - before) / 1024, time.perf_counter() - started, loss.item()


def read_kibibytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def make_inputs(num_positions: int, width: int, vocab_size: int) -> tuple[Tensor, ...]:
    """Return hidden states [N, D] of draft and target and their heads [V, D], random, bfloat16.

    Logits have a standard deviation of 3, about as a language model's; only the draft's states want a gradient.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.bfloat16).mul_(scale)

    heads = (draw(vocab_size, 3 / math.sqrt(width)) for _ in range(2))
    return draw(num_positions).requires_grad_(), draw(num_positions), *heads


def chunked_kl(draft_ND: Tensor, target_ND: Tensor, draft_head_VD: Tensor, target_head_VD: Tensor, chunk_size: int) -> Tensor:
    """Return the loss by `distill.loss.fused`, not compiled: that would count as memory and time of a process's one pass."""
    num_positions = len(draft_ND)
    target = TargetRows(hidden_PE=target_ND, logits_of=partial(F.linear, weight=target_head_VD))
    rows = DraftRows(
        hidden_ND=draft_ND,
        head=LogitHead(logits_of=partial(F.linear, weight=draft_head_VD), parameters=(draft_head_VD,)),
        places_N=torch.arange(num_positions),
        weights_N=torch.full((num_positions,), 1 / num_positions),
    )
    return fused_loss(target, [rows], forward_kl, chunk_size=chunk_size, compiled=False)[0]


def unchunked_kl(draft_ND: Tensor, target_ND: Tensor, draft_head_VD: Tensor, target_head_VD: Tensor) -> Tensor:
    """Return the loss as it stands in a textbook, all positions at once, with autograd doing the rest."""
    with torch.no_grad():
        log_p_NV = F.linear(target_ND, target_head_VD).float().log_softmax(-1)
    log_q_NV = F.linear(draft_ND, draft_head_VD).float().log_softmax(-1)
    return F.kl_div(log_q_NV, log_p_NV, reduction="batchmean", log_target=True)


if __name__ == "__main__":
    sys.exit(run_command(DistillBenchConfig, compare_distillation, description=__doc__))
