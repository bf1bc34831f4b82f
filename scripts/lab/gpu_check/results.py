"""Tokens, losses and artifacts of a device beside the CPU's. Both in float32, where they differ by the order of sums alone.

B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from configs.schema.training import LossConfig
from distill.loss.head_objective import HeadObjective
from eval.decoder.decode import decode
from eval.decoder.records import Generation
from eval.lossless.teacher_forcing import check_tokens
from heads.artifact import load_draft
from heads.families.registry import FAMILIES, serve
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import Target
from heads.metadata import WEIGHTS_FILE
from heads.modules.interface import Batch
from heads.modules.output_head import HeadModule
from heads.proposers.lookup import PromptLookup
from heads.proposers.protocol import Proposer
from scripts.lab.counts.launches import head_of, tiny_batch, tiny_target
from scripts.lab.gpu_check.page import Line, held, tried
from scripts.lab.gpu_check.setup import Setup

SAME_LOSS, SAME_GRADIENT = 1e-5, 1e-4  # relative, float32
BF16_LOSS = 0.03  # relative, of bfloat16 products: eight bits a number, which a sum over many evens out

Made = Callable[[Target], Proposer | None]


def compare_tokens(setup: Setup) -> Iterator[Line]:
    """Compare answers in float32 token by token, greedy and drawn by the same random numbers, and judge those in the dtype."""
    proposers: Mapping[str, Made] = {
        "plain": lambda target: None,
        "prompt lookup": lambda target: PromptLookup(target.device),
        "an untrained EAGLE-3": lambda target: FAMILIES["eagle3"].propose(
            serve(head_of("eagle3", target), target.model), target.device
        ),
    }
    here, there = setup.wide_on_cpu, setup.wide
    for temperature, kind in ((0.0, "greedy"), (1.0, "drawn")):
        for name, make in proposers.items():
            expected, found = (_answers(setup, target, make(target), temperature) for target in (here, there))
            same = sum(one.tokens == other.tokens for one, other in zip(expected, found, strict=True))
            if temperature == 0:
                wrong = len(check_tokens(here, expected, found, LosslessConfig().tie_noise).wrong_answers)
                told, why = f"{same} of {len(found)} answers equal, {wrong} beyond a tie", "the CPU's, but for ties in float32"
                yield held("tokens", f"{kind}, {name}, float32", told, why, wrong == 0)
            else:  # a draw that falls between two tokens' sums may fall either way
                told, why = f"{same} of {len(found)} answers equal", "the CPU's, but for one: sums of probabilities round"
                yield held("tokens", f"{kind}, {name}, float32", told, why, same >= len(found) - 1)
    target = setup.target
    plain, drafted = (_answers(setup, target, make(target), 0.0) for make in list(proposers.values())[::2])
    wrong = len(check_tokens(target, plain, drafted, LosslessConfig().tie_noise).wrong_answers)
    told = f"{len(plain) - wrong} of {len(plain)} answers the target's own"
    yield held("tokens", f"greedy, EAGLE-3, {setup.dtype}", told, f"all, but for ties in {setup.dtype}", wrong == 0)


def _answers(setup: Setup, target: Target, proposer: Proposer | None, temperature: float) -> list[Generation]:
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=setup.config.max_new_tokens, temperature=temperature)
    return decode(target, setup.requests, config, proposer)[0]


def compare_losses(setup: Setup) -> Iterator[Line]:
    """Compare loss and gradient of every family's training step, on a tiny Llama."""
    with TemporaryDirectory(prefix="gpu-check-") as scratch:
        here, there = (tiny_target(Path(scratch) / device, device) for device in ("cpu", setup.device_name))
        for kind in FAMILIES:
            yield tried("losses", f"{kind}, float32", partial(_compare_loss, kind, here, there))
        rounded, _ = _step("eagle3", there, autocast=True)
        loss, _ = _step("eagle3", here)
        yield held(
            "losses",
            "eagle3, bfloat16 products",
            f"loss {rounded:.5f} beside float32's {loss:.5f}",
            f"equal to {BF16_LOSS:g}",
            _relative(rounded, loss) <= BF16_LOSS,
        )


def _compare_loss(kind: str, here: Target, there: Target) -> Line:
    (loss, gradient), (other, their_gradient) = (_step(kind, target) for target in (here, there))
    apart = max(_relative(other, loss) / SAME_LOSS, _relative(their_gradient, gradient) / SAME_GRADIENT)
    told = f"loss {other:.6f} beside {loss:.6f}, norm of the gradient {their_gradient:.5f} beside {gradient:.5f}"
    return held("losses", f"{kind}, float32", told, f"equal to {SAME_LOSS:g} and {SAME_GRADIENT:g}", apart <= 1)


def _step(kind: str, target: Target, autocast: bool = False) -> tuple[float, float]:
    """Return the loss of a batch and the norm of its gradient."""
    head = head_of(kind, target)
    if (start := FAMILIES[kind].start) is not None:
        start(head, target.model)
    batch: Batch = tiny_batch().to(target.device)
    states = read_states(target.model, batch.input_ids_BT, tuple(head.taps) if isinstance(head, HeadModule) else ())
    torch.manual_seed(0)  # of families that draw origins
    labels = batch.loss_mask_BT[:, 1:].sum()
    with torch.autocast(target.device.type, torch.bfloat16, enabled=autocast):
        loss = HeadObjective(head, target, LossConfig())(batch, states).loss / labels
    loss.backward()
    gradients = [each.grad for each in head.parameters() if each.grad is not None]
    return float(loss.detach()), float(nn.utils.get_total_norm(gradients))


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def compare_artifact(setup: Setup) -> Iterator[Line]:
    """Read the artifact that was trained on the device on the CPU, and decode with it there."""
    tensors = load_file(setup.artifact / WEIGHTS_FILE)
    finite = all(bool(torch.isfinite(each).all()) for each in tensors.values())
    yield held("artifact", "weights trained on the device", f"{len(tensors)} tensors", "all finite", finite)
    answers: list[Any] = []
    for target in (setup.wide_on_cpu, setup.wide):
        draft = load_draft(setup.artifact, target.identity, target.model)
        answers.append(_answers(setup, target, draft.proposer, 0.0))
    rounds = [[len(each.rounds) for each in side] for side in answers]
    differing = sum(one != other for one, other in zip(*rounds, strict=True))
    yield held(
        "artifact",
        "rounds an answer with it, on CPU and device, float32",
        f"{differing} of {len(rounds[0])} answers take another number",
        "none, but for two with ties",
        differing <= 2,
    )
