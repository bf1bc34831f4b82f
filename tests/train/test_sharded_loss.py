"""The distillation objective under several processes: the losses and weights of one process, whatever wraps it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support import sharded_steps
from tests.support.sharded_steps import CASES, Case, Steps, make_objective, steps_alone

ROOT = Path(__file__).resolve().parents[2]
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
ENGINES = [
    # The entries are tried under these by test_engines; of the stages of ZeRO only the third takes the head's weights apart.
    *(pytest.param(engine, marks=pytest.mark.slow) for engine in ("ddp", "fsdp2")),
    *(pytest.param(f"zero{stage}", marks=[NEEDS_DEEPSPEED, pytest.mark.slow]) for stage in (1, 2)),
    pytest.param("zero3", marks=NEEDS_DEEPSPEED),
]
TOLERANCE = 1e-5  # float32, sums in another order
FLOAT32 = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """A target, a draft with a tied head and one without, and the batches of three steps; only for reading."""
    folder = tmp_path_factory.mktemp("sharded")
    target = tiny_llama(seed=1, layers=1, dtype=torch.float32)
    target.save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    for name, tied in {"tied": True, "untied": False}.items():
        tiny_llama(seed=2, dtype=torch.float32, tie_word_embeddings=tied, spread=2.0).save_pretrained(folder / name)
    torch.save([batch_of(target, step) for step in range(3)], folder / "batches.pt")
    return folder


def batch_of(target, step):
    """Four rows; in the second step those of the second process, the last two, hold no label."""
    generator = torch.Generator().manual_seed(step)
    input_ids_BT = torch.randint(5, 64, (4, 12), generator=generator)
    loss_mask_BT = torch.rand(4, 12, generator=generator) < torch.tensor([[0.8], [0.5], [0.2], [0.6]])
    if step == 1:
        loss_mask_BT[2:] = False
    with torch.no_grad():
        hidden_BTE = target.model(input_ids=input_ids_BT).last_hidden_state
    return input_ids_BT, loss_mask_BT, hidden_BTE


@pytest.fixture(scope="module")
def alone(folder):
    """The steps of each case in one process."""
    return {name: steps_alone(folder, case) for name, case in CASES.items()}


def launch(engine: str, folder: Path) -> dict[str, Steps]:
    """Run all cases in two processes on the CPU."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if engine.startswith("zero"):
        environment |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, sharded_steps.__file__, engine, str(folder)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: Steps(**torch.load(folder / f"{engine}, {name}.pt")) for name in CASES}


@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_train_the_weights_of_one(folder, alone, engine):
    together = launch(engine, folder)
    for name, expected in alone.items():
        assert together[name].losses == pytest.approx(expected.losses, rel=TOLERANCE), name
        shares = differences(folder, CASES[name], together[name], expected)
        assert max(shares.values()) < 1, (name, shares)


def differences(folder: Path, case: Case, found: Steps, expected: Steps) -> dict[str, float]:
    """Return each tensor's largest difference as a share of what is allowed.

    That is a share of how far training moved the tensor, and what float32 can tell of the tensor itself.
    """
    start = make_objective(folder, case).state_dict()
    assert found.weights.keys() == expected.weights.keys()
    shares = {}
    for name, weight in expected.weights.items():
        allowed = TOLERANCE * (weight - start[name]).abs().max() + 4 * FLOAT32 * weight.abs().max()
        shares[name] = ((found.weights[name] - weight).abs().max() / allowed).item()
    return shares


@pytest.mark.parametrize("name", CASES)
def test_the_head_takes_part_where_it_is_trained(folder, alone, name):
    start = make_objective(folder, CASES[name]).state_dict()["draft.lm_head.weight"]
    moved = (alone[name].weights["draft.lm_head.weight"] - start).abs().amax(-1)
    assert moved.any() == CASES[name].trained_head
