"""A small autoregressive model of codes, trained from scratch: the target of the demos on pictures and on speech.

A row of T tokens is a class and the codes of a picture or a recording; N rows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from configs.runtime.terminal import say

WIDTH, BLOCKS, HEADS = 128, 4, 4
LEARNING_RATE, WEIGHT_DECAY, BATCH = 2e-3, 0.1, 64
LEFT_OUT = 0.15  # share of rows without their class


def train_code_model(
    rows_NT: Tensor, held_out_NT: Tensor, *, null: int, epochs: int, folder: Path, end: int | None = None
) -> float:
    """Train a model on rows, write it as a model folder without a tokenizer, and return its loss on held-out rows, in nats."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=null + 1,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=2 * rows_NT.shape[1],
            attention_dropout=0.1,
            bos_token_id=None,
            eos_token_id=end,
        )
    )
    steps = epochs * (len(rows_NT) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        batch_BT = rows_NT[torch.randint(len(rows_NT), (BATCH,))].clone()
        batch_BT[torch.rand(BATCH) < LEFT_OUT, 0] = null
        loss = _loss(model, batch_BT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % (steps // 5) == 0:
            say(f"step {step + 1} of {steps}: loss {loss.item():.3f}, held out {_held_out(model, held_out_NT):.3f}")
    model.eval().save_pretrained(folder)
    return _held_out(model, held_out_NT)


def _loss(model: LlamaForCausalLM, rows_BT: Tensor) -> Tensor:
    logits_BTV = model(input_ids=rows_BT[:, :-1].clamp(min=0)).logits
    return cross_entropy(logits_BTV.flatten(0, 1), rows_BT[:, 1:].flatten(), ignore_index=-1)


@torch.no_grad()
def _held_out(model: LlamaForCausalLM, rows_NT: Tensor) -> float:
    was_training = model.training
    model.eval()
    loss = float(_loss(model, rows_NT))
    model.train(was_training)
    return loss
