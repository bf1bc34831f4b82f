"""The distillation benchmark: what it writes on a tiny target, that its sides do the same work, and what it refuses."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.runtime.command import DONE
from configs.runtime.loading import load_config
from configs.schema.training import DistillConfig
from distill.dataset.batches import Example, collate
from distill.dataset.conversations import read_conversations
from heads.frozen.loading import load_target
from heads.inference.model_checks import check_rolls_back
from scripts.lab import trained_runs
from scripts.lab.bench.distill import benchmark as distill_comparison
from scripts.lab.bench.distill import loss as loss_comparison
from scripts.lab.bench.distill import training as training_comparison
from scripts.lab.bench.distill.benchmark import (
    compare_distillation,
    load_setup,
    read_training,
)
from scripts.lab.bench.distill.loss import (
    Key,
    Pass,
    chunked_divergence,
    forward_backward,
    make_inputs,
    measure_pass,
    unchunked_jsd,
)
from scripts.lab.bench.distill.training import (
    CACHED,
    ONLINE,
    compare_cached,
)
from scripts.lab.bench.harness import in_fresh_process
from scripts.lab.settings import BenchDistillConfig, BenchLossConfig
from train.launch import make_accelerator, run_distillation
from train.loop.checkpoints import Progress
from train.tasks.draft import DraftTask

TINY_LOSS = BenchLossConfig(vocab_size=64, width=8, chunk_size=4, positions=16, repeats=2)
RATIOS = {
    "loss_peak_memory_vs_unchunked",
    "loss_time_vs_unchunked",
    "cached_speed_vs_online",
    "tau_distilled_vs_undistilled",
}


@pytest.fixture(autouse=True)
def without_trl(monkeypatch):
    """TRL's sides are left out, also where it is installed."""
    for module in (distill_comparison, loss_comparison, training_comparison):
        monkeypatch.setattr(module, "trl_is_installed", lambda: False)


@pytest.fixture(scope="module")
def config(recipe, tmp_path_factory):
    """A benchmark of a draft said to have begun as the target's first block; in truth it is the whole target."""
    tmp_path = tmp_path_factory.mktemp("distill")
    training = DistillConfig.model_validate(
        {
            **{key: recipe[key] for key in ("target", "data", "num_speculative_tokens")},
            "student": {"layers": [0], "draft_vocab_size": 32},
            "schedule": {"batch_size": 3, "mixed_precision": "no", "trackers": ["tensorboard"]},
            "output": str(tmp_path / "run"),
        }
    )
    target = load_target(training.target)
    rows = read_conversations(Path(training.data.train))
    accelerator = make_accelerator(training.schedule.model_copy(update={"trackers": []}), tmp_path)
    whole = training.model_copy(update={"student": training.student.model_copy(update={"layers": [0, 1]})})
    task = DraftTask(whole, target, rows, rows, accelerator)
    task.config = training
    task.save(task.module, Progress(), {})
    return BenchDistillConfig(
        draft=str(tmp_path / "run/artifact"),
        loss=TINY_LOSS,
        num_batches=2,
        num_prompts=3,
        max_new_tokens=12,
        variants={"forward_kl": {}, "jsd": {"loss": {"divergence": "jsd"}}},
        variant_steps=1,
        runs=str(tmp_path / "variants"),
        bootstrap_samples=50,
        output=str(tmp_path / "distill.json"),
    )


@pytest.fixture
def bench(config, tmp_path):
    return load_setup(config, read_training(config.draft), tmp_path / "scratch")


def test_the_file_holds_every_ratio_and_the_rows_of_every_part(config, monkeypatch):
    # A process of its own costs seconds of imports; the one test of a real one is below.
    by_side = {"chunked": Pass(2.0, 3.0, 0.5), "unchunked": Pass(8.0, 4.0, 0.50001)}
    monkeypatch.setattr(loss_comparison, "in_fresh_process", lambda work, config, key, positions: by_side[key.side])
    monkeypatch.setattr(trained_runs, "run_training", lambda entry, path: run_distillation(load_config(DistillConfig, path)))
    assert compare_distillation(config) == DONE
    results = json.loads(Path(config.output).read_text())
    ratios = results["ratios"]
    assert ratios.keys() == {name + end for name in RATIOS for end in ("", "_low", "_high")}
    assert ratios["loss_peak_memory_vs_unchunked"] == 0.25
    assert ratios["loss_time_vs_unchunked"] == 0.75
    assert ratios["cached_speed_vs_online"] > 0
    assert ratios["tau_distilled_vs_undistilled"] > 1
    rows = results["rows"]
    drafts = [(row["draft"], row["temperature"], row["prompts"]) for row in rows if "draft" in row]
    assert drafts == [("undistilled", 0.0, 3), ("undistilled", 1.0, 3), ("distilled", 0.0, 3), ("distilled", 1.0, 3)]
    assert all(row["tau_low"] <= row["tau"] <= row["tau_high"] for row in rows if "draft" in row)
    assert {row["divergence"] for row in rows if row.get("draft") == "distilled"} == {"forward_kl"}
    losses = [(row["loss"], row["divergence"], row["positions"]) for row in rows if "loss" in row]
    assert losses == [("chunked", "jsd", 16), ("unchunked", "jsd", 16)]
    assert [row["training"] for row in rows if "training" in row] == ["online", "cached"]
    first, other = rows[-2:]
    assert (first["recipe"], other["recipe"]) == ("forward_kl", "jsd")
    assert first["tau_t0_vs_first"] == 1.0
    assert other["labels"] > 0
    assert len(rows) == 10


def test_the_sides_of_the_loss_give_the_same_value_and_gradient():
    values, gradients = [], []
    for side in (partial(chunked_divergence, beta=0.5, chunk_size=5), unchunked_jsd):
        inputs = make_inputs(12, 8, 64)
        values.append(forward_backward(side, inputs))
        gradients.append(inputs.draft_hidden_ND.grad.float())
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert 0 < values[0] < 0.7  # the textbook's JSD is at most log 2
    assert torch.allclose(gradients[0], gradients[1], atol=1e-2 * gradients[1].abs().max().item())
    assert gradients[1].abs().max() > 0


def test_the_unchunked_loss_peaks_at_several_logit_tensors_and_the_chunked_below_one():
    # 64 MB a tensor of float32 logits, in processes of their own: what tests before leave in this one counts as well.
    config = TINY_LOSS.model_copy(update={"vocab_size": 16384, "chunk_size": 16})
    tensor = 1024 * 16384 * 4 / 2**20
    unchunked = in_fresh_process(measure_pass, config, Key("jsd", "unchunked"), 1024)
    chunked = in_fresh_process(measure_pass, config, Key("jsd", "chunked"), 1024)
    # Five tensors are alive at once; resident memory is counted in pages that the allocator may hold already.
    assert 4.5 * tensor < unchunked.peak_mebibytes < loss_comparison.TENSORS_AT_PEAK * tensor
    assert chunked.peak_mebibytes < tensor
    assert chunked.value == pytest.approx(unchunked.value, rel=1e-5)
    assert chunked.seconds > 0


def test_cached_and_online_steps_learn_the_same_and_only_the_online_run_the_target(bench):
    check_rolls_back(bench.target.model)  # by a probe, which is no step
    forwards = []
    bench.target.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    turns = compare_cached(bench)
    # One batch makes the cache of six conversations, a probe compares each draft's blocks with the target's, one step warms up.
    assert len(forwards) == 1 + 2 + 3
    cached, online = ([turn.result for (turn,) in turns[name]] for name in (CACHED, ONLINE))
    assert len(cached) == 2
    assert [step.num_tokens for step in cached] == [step.num_tokens for step in online]
    assert [step.loss for step in cached] == pytest.approx([step.loss for step in online], rel=1e-5)
    assert cached[0].loss != cached[1].loss


def test_the_same_work_has_every_real_token_but_the_first_as_a_label():
    batch = training_comparison.every_token_a_label(collate([Example((5, 6, 7, 8), 3), Example((5, 6), 1)]))
    assert batch.loss_mask_BT.tolist() == [[False, True, True, True], [False, True, False, False]]
