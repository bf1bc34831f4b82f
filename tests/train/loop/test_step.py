"""The training loop against the same steps written out in plain torch: weights, number of steps, precision."""

import math

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.nn import functional as F

from distill.dataset.batches import ConversationDataset, make_loader
from tests.support.training_runs import distil, distill_config, draft_task, read_metrics, train_task
from train.loop.telemetry import METRICS_FILE

STEPS, ACCUMULATED = 6, 2
OPTIMIZER = {
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "beta1": 0.8,
    "beta2": 0.9,
    "max_grad_norm": 0.05,
    "warmup_share": 0.34,  # two steps
    "final_share": 0.2,
}


def textbook(draft, target, rows):
    """Train a draft by AdamW on the sum of KL(p || q) over a step's labels, divided by their number; return the norms."""
    weights = [each for each in draft.parameters() if each.requires_grad]
    matrices, vectors = [each for each in weights if each.ndim > 1], [each for each in weights if each.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    loader = make_loader(ConversationDataset(rows, 64), 4, seed=0)
    batches = []
    for epoch in range(3):
        loader.batch_sampler.set_epoch(epoch)
        batches += list(loader)
    norms = []
    for step in range(STEPS):
        rate = (step + 1) / 2 if step < 2 else 0.2 + 0.8 * (1 + math.cos(math.pi * (step - 2) / 4)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate
        window = batches[step * ACCUMULATED : (step + 1) * ACCUMULATED]
        num_labels = sum(int(batch.loss_mask_BT.sum()) for batch in window)
        for batch in window:
            p, q = (F.log_softmax(model(batch.input_ids_BT).logits[:, :-1], -1) for model in (target, draft))
            values_BT = (p.exp() * (p - q)).sum(-1)
            (values_BT[batch.loss_mask_BT[:, 1:]].sum() / num_labels).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights, 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.fixture
def told_otherwise(monkeypatch):
    """accelerate's variables ask for what the recipe decides."""
    AcceleratorState._reset_state(reset_partial_state=True)
    asked = {"GRADIENT_ACCUMULATION_STEPS": "4", "GRADIENT_CLIPPING": "9", "MIXED_PRECISION": "bf16", "DYNAMO_BACKEND": "EAGER"}
    for name, value in asked.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("told_otherwise")
def test_six_steps_of_two_micro_batches_give_the_weights_of_plain_torch(tmp_path, greedy_target, greedy_rows):
    length = {"max_steps": STEPS, "gradient_accumulation_steps": ACCUMULATED, "log_every_steps": 1, "eval_every_steps": None}
    config = distill_config(tmp_path, settings={"optimizer": OPTIMIZER}, **length)
    task = draft_task(config, greedy_target, greedy_rows)
    expected = task.copy_of_module().draft
    before = {name: weight.clone() for name, weight in expected.state_dict().items()}
    found, _ = train_task(task, greedy_rows)
    norms = textbook(expected, greedy_target.model, greedy_rows)
    moved = 0.0
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(found[f"draft.{name}"], weight, rtol=0, atol=1e-5)
        moved = max(moved, float((weight - before[name]).abs().max()))
    assert moved > 1e-3
    assert min(norms) > 0.05  # so that each step is clipped
    assert [row["gradient_norm"] for row in read_metrics(tmp_path / METRICS_FILE)] == pytest.approx(norms, rel=1e-4)


def test_the_last_partial_step_of_an_epoch_is_taken(tmp_path, greedy_target, greedy_rows):
    schedule = {"batch_size": 2, "epochs": 2, "max_steps": None, "gradient_accumulation_steps": 3, "log_every_steps": 1}
    config = distill_config(tmp_path, **schedule, eval_every_steps=None)
    distil(config, greedy_target, greedy_rows[:7])  # an epoch is 4 micro-batches: a step of three and a step of one
    assert [row["step"] for row in read_metrics(tmp_path / METRICS_FILE)] == [1, 2, 3, 4]


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "FSDP2"])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("no", torch.float32)])
def test_products_of_training_are_in_the_precision_of_the_recipe(
    tmp_path, greedy_target, greedy_rows, monkeypatch, precision, dtype, sharded
):
    if sharded:  # whose module accelerate does not wrap
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
    AcceleratorState._reset_state(reset_partial_state=True)
    task = draft_task(distill_config(tmp_path, max_steps=1, mixed_precision=precision), greedy_target, greedy_rows)
    seen = []
    task.module.draft.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, args, output: seen.append(output.dtype) if module.training else None
    )
    weights, _ = train_task(task, greedy_rows)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert set(seen) == {dtype}
    assert {each.dtype for each in weights.values() if each.is_floating_point()} == {torch.float32}
