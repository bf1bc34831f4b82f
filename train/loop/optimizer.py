"""The optimiser of a training run and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from configs.schema.learning import OptimizerConfig


def make_optimizer(module: nn.Module, config: OptimizerConfig, num_steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return AdamW over the trainable parameters, no decay on vectors, and linear warm-up with a cosine to `final_share`."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))
    warmup = max(1, round(config.warmup_share * num_steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * done))

    return optimizer, LambdaLR(optimizer, factor)
