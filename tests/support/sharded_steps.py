"""Optimiser steps on a distillation objective, alone or as one of several processes that share each batch.

    python -m torch.distributed.run --nproc_per_node 2 tests/support/sharded_steps.py ENGINE FOLDER

`test_sharded_loss` writes the models and batches into FOLDER, launches this file, and reads what it leaves there. Wrapped as
`train.loop.loop` wraps the objective, by accelerate; only FSDP2 is applied here by hand, because accelerate offers it on GPUs
only. Plain SGD on purpose: its steps are the gradients, while AdamW would hide any factor that they were wrong by.
B batch, T positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.integrations import unset_hf_deepspeed_config

from configs.schema.learning import LossConfig
from configs.schema.target import TargetConfig
from distill.loss.draft_objective import DraftObjective
from heads.inference.causal_lm import backbone
from heads.proposers.vocabulary import DraftVocabulary
from heads.target.loading import load_target
from heads.target.processes import join_processes

LEARNING_RATE = 1.0
SPOKEN = torch.arange(1, 64, 3)  # the reduced draft vocabulary


@dataclass(frozen=True, kw_only=True)
class Case:
    """A draft: which of the two on disk, whether its embeddings and head are trained, whether it says all tokens."""

    draft: str = "tied"
    trained_head: bool = True
    reduced: bool = False


CASES = {  # a frozen head of the whole vocabulary is trained by test_engines
    "tied": Case(),
    "tied, reduced vocabulary": Case(reduced=True),
    "untied, reduced vocabulary": Case(draft="untied", reduced=True),
    "frozen head, reduced vocabulary": Case(trained_head=False, reduced=True),
}


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What came out: the loss of each step over the whole batch, and the weights after the last one."""

    losses: list[float]
    weights: dict[str, Tensor]


def steps_alone(folder: Path, case: Case) -> Steps:
    """Take the steps in this process, every batch in one piece, without any wrapper."""
    objective = make_objective(folder, case)
    optimizer = make_optimizer(objective)
    losses = []
    for input_ids_BT, loss_mask_BT, hidden_BTE in torch.load(folder / "batches.pt"):
        loss = objective(input_ids_BT, loss_mask_BT, hidden_BTE, loss_mask_BT[:, 1:].sum(), 1).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Steps(losses=losses, weights=objective.state_dict())


def make_objective(folder: Path, case: Case) -> DraftObjective:
    """Load a draft and its target, and put the loss around them."""
    target = load_target(TargetConfig(name=str(folder / "target"), dtype="float32", device="cpu"))
    draft = AutoModelForCausalLM.from_pretrained(folder / case.draft, dtype=torch.float32).train()
    draft.get_input_embeddings().requires_grad_(case.trained_head)
    draft.get_output_embeddings().requires_grad_(case.trained_head)
    vocabulary = DraftVocabulary(token_ids_W=SPOKEN, target_vocab_size=target.vocab_size) if case.reduced else None
    return DraftObjective(draft, target, LossConfig(divergence="forward_kl", chunk_size=3), vocabulary)


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=LEARNING_RATE)


# --- one of several processes -------------------------------------------------------------------------------------


def steps_together(folder: Path, case: Case, accelerator: Accelerator, prepare: Callable[..., Any]) -> Steps:
    """Take the steps as one of the processes: an equal share of each batch's rows."""
    module, optimizer = prepare(accelerator, make_objective(folder, case))
    rank, world_size = accelerator.process_index, accelerator.num_processes
    losses = []
    for batch in torch.load(folder / "batches.pt"):
        num_labels = batch[1][:, 1:].sum()
        loss = module(*(tensor.chunk(world_size)[rank] for tensor in batch), num_labels, world_size).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return Steps(losses=losses, weights=whole_weights(accelerator, module))


def prepare_by_accelerate(accelerator: Accelerator, objective: DraftObjective) -> Sequence[Any]:
    if splits_weights(accelerator):
        from deepspeed.runtime.zero import register_external_parameter

        for parameter in objective.draft.get_output_embeddings().parameters():  # as the task of a distillation says
            register_external_parameter(objective, parameter)
    return accelerator.prepare(objective, make_optimizer(objective))


def prepare_by_hand(accelerator: Accelerator, objective: DraftObjective) -> Sequence[Any]:
    """Shard each block, and all the rest as one, which is what accelerate makes of this objective."""
    for block in backbone(objective.draft).layers:
        fully_shard(block)
    fully_shard(objective)
    return objective, accelerator.prepare(make_optimizer(objective))


def whole_weights(accelerator: Accelerator, module: nn.Module) -> dict[str, Tensor]:
    """Return the weights that the processes hold together; complete in the first of them."""
    if splits_weights(accelerator):
        from deepspeed.runtime.zero import GatheredParameters

        unwrapped = accelerator.unwrap_model(module)
        assert not any(each.numel() for each in unwrapped.parameters())
        with GatheredParameters(unwrapped.parameters()):
            return {name: weight.clone() for name, weight in unwrapped.state_dict().items()}
    if accelerator.distributed_type == "DEEPSPEED":
        return accelerator.get_state_dict(module)
    return get_model_state_dict(accelerator.unwrap_model(module), options=StateDictOptions(full_state_dict=True))


def splits_weights(accelerator: Accelerator) -> bool:
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def join(engine: str) -> Accelerator:
    """Return the accelerator of this process. For DeepSpeed, the environment must say that it is wanted."""
    if not engine.startswith("zero"):
        join_processes(TargetConfig(device="cpu"))
        return Accelerator(cpu=True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": int(engine.removeprefix("zero")),
            "stage3_param_persistence_threshold": 0,  # split even what is tiny
        },
    }
    join_processes(TargetConfig(device="cpu"))
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    unset_hf_deepspeed_config()  # transformers would otherwise mind it in each model that it loads
    return accelerator


def main(engine: str, folder: Path) -> None:
    """Take the steps of every case, one after the other; the first process writes what came out."""
    accelerator = join(engine)
    prepare = prepare_by_hand if engine == "fsdp2" else prepare_by_accelerate
    for name, case in CASES.items():
        steps = steps_together(folder, case, accelerator, prepare)
        if accelerator.is_main_process:
            torch.save(vars(steps), folder / f"{engine}, {name}.pt")
        accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
