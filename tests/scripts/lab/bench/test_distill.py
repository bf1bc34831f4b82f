"""The distillation benchmark: what it writes on a tiny target, that its sides do the same work, and what it refuses."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.schema.decoding import DecodeConfig
from configs.schema.training import DistillConfig
from distill.dataset.batches import Example, collate
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import Request, decode
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from heads.inference.model_checks import check_rolls_back
from scripts.advice import trained_runs
from scripts.lab.bench.distill import benchmark as distill_comparison
from scripts.lab.bench.distill import loss as loss_comparison
from scripts.lab.bench.distill import training as training_comparison
from scripts.lab.bench.distill.benchmark import (
    compare_distillation,
    load_setup,
    measure_acceptance,
    read_training,
    verdict,
)
from scripts.lab.bench.distill.loss import (
    Key,
    LossMeasurement,
    Pass,
    chunked_divergence,
    fitting_positions,
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


def measured(value=0.50001):
    """Passes of two repeats, where the unchunked JSD is `value` and ours 0.5."""
    passes = {
        Key("jsd", "chunked"): [Pass(2.0, 3.0, 0.5), Pass(4.0, 1.0, 0.5)],
        Key("jsd", "unchunked"): 2 * [Pass(10.0, 4.0, value)],
        Key("forward_kl", "chunked"): 2 * [Pass(1.0, 1.0, 0.1)],
        Key("forward_kl", "trl_chunked"): 2 * [Pass(4.0, 2.0, 0.1)],
    }
    return LossMeasurement(config=TINY_LOSS, positions=16, passes=passes)


def test_sides_that_compute_different_losses_fail_the_benchmark():
    assert verdict(measured()) == DONE
    assert verdict(measured(0.51)) == GATE_FAILED


def test_ratios_are_ours_over_the_other_side_summed_over_repeats():
    ratios = measured().ratios(50)
    assert {name: ratio.point for name, ratio in ratios.items()} == {
        "loss_peak_memory_vs_unchunked": 0.3,
        "loss_time_vs_unchunked": 0.5,
        "forward_kl_loss_peak_memory_vs_trl_chunked": 0.25,
        "forward_kl_loss_time_vs_trl_chunked": 0.5,
    }
    assert ratios["loss_time_vs_unchunked"].low <= 0.5 <= ratios["loss_time_vs_unchunked"].high


def test_positions_are_halved_until_the_loss_fits_and_too_little_memory_is_named():
    tensors = 4 * loss_comparison.TENSORS_AT_PEAK * 64 / 2**30
    assert fitting_positions(TINY_LOSS.model_copy(update={"max_gibibytes": 9 * tensors})) == 8
    assert fitting_positions(TINY_LOSS) == 16
    with pytest.raises(InputError, match=r"loss\.max_gibibytes: expected at least"):
        fitting_positions(TINY_LOSS.model_copy(update={"max_gibibytes": tensors / 2}))


def test_the_unchunked_loss_peaks_at_several_logit_tensors_and_the_chunked_below_one():
    # 64 MB a tensor of float32 logits: too large for the allocator to keep, so that no process of its own is needed.
    config = TINY_LOSS.model_copy(update={"vocab_size": 16384, "chunk_size": 16})
    tensor = 1024 * 16384 * 4 / 2**20
    unchunked = measure_pass(config, Key("jsd", "unchunked"), 1024)
    chunked = measure_pass(config, Key("jsd", "chunked"), 1024)
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


def test_tau_is_that_of_the_decoder_on_the_last_held_out_prompts(bench, config):
    assert bench.training.schedule.trackers == []
    assert bench.training.output.startswith(str(bench.scratch))  # the artifact's own folder is left alone
    counts = measure_acceptance(bench)
    draft = load_draft(config.draft, bench.target.identity, bench.target.model)
    requests = [
        Request(prompt_id=str(number), category="", tokens=row.prompt_ids) for number, row in enumerate(bench.held_out[-3:])
    ]
    settings = DecodeConfig(num_speculative_tokens=2, max_new_tokens=12)
    generations = [decode(bench.target, [request], settings, draft.proposer)[0][0] for request in requests]
    rounds = [generation.rounds for generation in generations]
    assert counts["distilled", 0.0] == [(sum(len(each.committed) for each in own), len(own)) for own in rounds]
    assert counts["undistilled", 0.0] != counts["distilled", 0.0]


@pytest.mark.parametrize(
    ("training", "complaint"),
    [({}, "does not say how it was trained; expected an artifact of"), ({"nosuch": 1}, r"is not of this version \(nosuch: ")],
)
def test_an_artifact_without_a_recipe_of_this_version_is_named(tiny_run, tmp_path, training, complaint):
    content = json.loads((tiny_run / "artifact/draftsmith.json").read_text())
    (tmp_path / "draftsmith.json").write_text(json.dumps(content | {"training": training}))
    with pytest.raises(InputError, match=f"^draft: .*{complaint}"):
        read_training(str(tmp_path))
