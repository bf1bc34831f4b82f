"""TRL's distillation with the same target, draft and batches: what ours is measured against where `trl` is installed.

Written for trl 1.16.0. Its trainer runs at its best here: no activation checkpointing, no logging, no data loading in the step.
B batch, T positions.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.training import OptimizerConfig
from heads.frozen.loading import Target
from heads.modules.interface import NO_DOCUMENT, Batch

IGNORED = -100  # TRL's label of a position that is not trained


def trl_is_installed() -> bool:
    return importlib.util.find_spec("trl") is not None


class GkdPeer:
    """TRL's `GKDTrainer`, one optimiser step at a time: forward KL on given answers, AdamW."""

    def __init__(
        self, target: Target, draft: PreTrainedModel, optimizer: OptimizerConfig, mixed_precision: str, folder: Path
    ) -> None:
        from datasets import Dataset
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        size = draft.config.get_text_config().vocab_size
        if size != target.vocab_size:
            raise InputError(
                f"TRL distils into a draft of the target's vocabulary size only; the draft has {size}, the target "
                f"{target.vocab_size}; uninstall trl to leave its side out"
            )
        arguments = GKDConfig(
            output_dir=str(folder),
            lmbda=0.0,
            beta=0.0,  # KL(target || draft)
            bf16=mixed_precision == "bf16",
            fp16=mixed_precision == "fp16",
            activation_checkpointing=False,
            use_cpu=target.device.type == "cpu",
            learning_rate=optimizer.learning_rate,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            report_to="none",
            disable_tqdm=True,
        )
        # The trainer wants a data set and is never asked for a batch of it.
        rows = Dataset.from_list([{"messages": [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}]}])
        self.trainer = GKDTrainer(
            model=draft,
            teacher_model=copy.deepcopy(target.model),
            args=arguments,
            train_dataset=rows,
            processing_class=target.tokenizer,
        )
        accelerator = self.trainer.accelerator
        self.optimizer = accelerator.prepare_optimizer(self.trainer.create_optimizer())
        self.model = accelerator.prepare_model(self.trainer.model)
        self.max_grad_norm = optimizer.max_grad_norm

    def step(self, batch: Batch) -> float:
        inputs = {
            "input_ids": batch.input_ids_BT,
            "attention_mask": (batch.document_ids_BT != NO_DOCUMENT).long(),
            "labels": batch.input_ids_BT.masked_fill(~batch.loss_mask_BT, IGNORED),
        }
        loss = self.trainer.training_step(self.model, inputs, int(batch.loss_mask_BT[:, 1:].sum()))
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()
