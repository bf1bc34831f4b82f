"""The distillation benchmark: what it writes on a tiny target, that its sides do the same work, and what it refuses."""

import json
from functools import partial

import pytest
import torch

from configs.command import BAD_INPUT, DONE, GATE_FAILED, run_command
from configs.errors import InputError
from configs.schema import BenchDistillConfig, BenchLossConfig, DataConfig, DecodeConfig, DistillConfig, TargetConfig
from distill.batches import Example, collate
from distill.conversations import read_conversations
from distill.making import make_dataset
from distill.target import load_target
from eval.decode import Request, decode
from heads.artifact import load_draft
from scripts import distill_comparison, loss_comparison, training_comparison
from scripts.bench_distill import main
from scripts.distill_comparison import (
    compare_distillation,
    count_rounds,
    measure_acceptance,
    open_bench,
    read_training,
    verdict,
)
from scripts.loss_comparison import (
    LossMeasurement,
    chunked_jsd,
    fitting_positions,
    forward_backward,
    make_inputs,
    peak_growth,
    unchunked_jsd,
)
from scripts.training_comparison import CACHED, GKD, ONLINE, SAME_LOSS, SAME_WORK, compare_cached, compare_with_trl
from train.checkpoints import Progress
from train.draft_task import DraftTask
from train.launch import make_accelerator

TINY_LOSS = BenchLossConfig(
    vocab_size=64, width=8, chunk_size=4, memory_positions=16, memory_repeats=1, time_positions=16, time_repeats=2
)
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


@pytest.fixture
def config(tmp_path, tiny_run):
    """A benchmark of a draft said to have begun as the target's first block; in truth it is the whole target."""
    data = DataConfig(
        target=TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"),
        prompts={"source": "file", "path": str(tiny_run / "suite.jsonl")},
        answers={"max_new_tokens": 8},
        held_out_share=0.4,
        output=str(tmp_path / "data"),
    )
    make_dataset(data)
    training = DistillConfig(
        target=data.target,
        data={"train": str(tmp_path / "data/train.jsonl"), "held_out": str(tmp_path / "data/held_out.jsonl"), "max_length": 64},
        student={"layers": [0], "draft_vocab_size": 32},
        schedule={"batch_size": 3, "mixed_precision": "no", "trackers": ["tensorboard"]},
        num_speculative_tokens=2,
        output=str(tmp_path / "run"),
    )
    target = load_target(training.target)
    rows = read_conversations(tmp_path / "data/train.jsonl")
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
        bootstrap_samples=50,
        output=str(tmp_path / "distill.json"),
    )


@pytest.fixture
def bench(config, tmp_path):
    return open_bench(config, read_training(config.draft), tmp_path / "scratch")


def test_the_file_holds_every_ratio_and_the_rows_of_every_part(config, monkeypatch):
    # A process of its own costs seconds of imports; the one test of a real one is below.
    monkeypatch.setattr(loss_comparison, "in_fresh_process", lambda config, name, positions: {"chunked": 2.0}.get(name, 8.0))
    assert compare_distillation(config) == DONE
    with open(config.output, encoding="utf-8") as file:
        results = json.load(file)
    ratios = results["ratios"]
    assert ratios.keys() == {name + end for name in RATIOS for end in ("", "_low", "_high")}
    assert ratios["loss_peak_memory_vs_unchunked"] == 0.25
    assert ratios["cached_speed_vs_online"] > 0
    assert ratios["tau_distilled_vs_undistilled"] > 1
    rows = results["rows"]
    drafts = [(row["draft"], row["temperature"], row["prompts"]) for row in rows if "draft" in row]
    assert drafts == [("undistilled", 0.0, 3), ("undistilled", 1.0, 3), ("distilled", 0.0, 3), ("distilled", 1.0, 3)]
    assert all(row["tau_low"] <= row["tau"] <= row["tau_high"] for row in rows if "draft" in row)
    assert {row["divergence"] for row in rows if row.get("draft") == "distilled"} == {"forward_kl"}
    assert [row["loss"] for row in rows if "loss" in row] == ["chunked", "unchunked"]
    assert [row["training"] for row in rows if "training" in row] == ["online", "cached"]
    assert len(rows) == 8


def test_the_sides_of_the_loss_give_the_same_value_and_gradient():
    values, gradients = [], []
    for side in (partial(chunked_jsd, chunk_size=5), unchunked_jsd):
        inputs = make_inputs(12, 8, 64)
        values.append(forward_backward(side, inputs))
        gradients.append(inputs.draft_hidden_ND.grad.float())
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert 0 < values[0] < 0.7  # the textbook's JSD is at most log 2
    assert torch.allclose(gradients[0], gradients[1], atol=1e-2 * gradients[1].abs().max().item())
    assert gradients[1].abs().max() > 0


def test_sides_that_compute_different_losses_fail_the_benchmark():
    parts = {"config": TINY_LOSS, "memory_positions": 1, "time_positions": 1, "peak_mebibytes": {}, "seconds": {}}
    same = LossMeasurement(values={"chunked": 0.5, "unchunked": 0.50001}, **parts)
    other = LossMeasurement(values={"chunked": 2.0, "unchunked": 0.5}, **parts)
    assert verdict(same) == DONE
    assert verdict(other) == GATE_FAILED


def test_positions_are_halved_until_the_unchunked_loss_fits_and_too_little_memory_is_named():
    tensors = 4 * loss_comparison.TENSORS_AT_PEAK * 64 / 2**30
    room_for_nine = TINY_LOSS.model_copy(update={"max_gibibytes": 9 * tensors})
    assert fitting_positions(room_for_nine, 16) == 8
    assert fitting_positions(TINY_LOSS, 16) == 16
    with pytest.raises(InputError, match=r"loss\.max_gibibytes: expected at least"):
        fitting_positions(TINY_LOSS.model_copy(update={"max_gibibytes": tensors / 2}), 16)


def test_the_peak_of_the_unchunked_loss_is_several_logit_tensors_and_that_of_the_chunked_less_than_one():
    # 64 MB a tensor of float32 logits: too large for the allocator to keep, so that no process of its own is needed.
    config = TINY_LOSS.model_copy(update={"vocab_size": 16384, "chunk_size": 16})
    tensor = 1024 * 16384 * 4 / 2**20
    unchunked = peak_growth(config, "unchunked", 1024)
    chunked = peak_growth(config, "chunked", 1024)
    assert 5 * tensor < unchunked < loss_comparison.TENSORS_AT_PEAK * tensor
    assert chunked < tensor


def test_a_fresh_process_measures_as_this_one():
    config = TINY_LOSS.model_copy(update={"vocab_size": 16384})
    assert loss_comparison.in_fresh_process(config, "unchunked", 256) > 5 * 256 * 16384 * 4 / 2**20


def test_cached_and_online_steps_learn_the_same_from_the_same_draft_and_only_the_online_ones_run_the_target(bench):
    forwards = []
    bench.target.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    turns = compare_cached(bench)
    assert len(forwards) == 1 + 3  # one batch makes the cache of six conversations; one step is a warm-up
    cached, online = ([turn.result for (turn,) in turns[name]] for name in (CACHED, ONLINE))
    assert len(cached) == 2
    assert [step.num_tokens for step in cached] == [step.num_tokens for step in online]
    assert [step.loss for step in cached] == pytest.approx([step.loss for step in online], rel=1e-5)
    assert cached[0].loss != cached[1].loss


def test_without_trl_nothing_is_trained_beside_it(bench):
    assert compare_with_trl(bench) == {}


def test_the_same_work_has_every_real_token_but_the_first_as_a_label():
    batch = training_comparison.every_token_a_label(collate([Example((5, 6, 7, 8), 3), Example((5, 6), 1)]))
    assert batch.loss_mask_BT.tolist() == [[False, True, True, True], [False, True, False, False]]


def test_tau_is_that_of_the_decoder_on_the_last_held_out_prompts(bench, config):
    counts = measure_acceptance(bench)
    draft = load_draft(config.draft, bench.target.identity, bench.target.model)
    requests = [
        Request(prompt_id=str(number), category="", tokens=row.prompt_ids) for number, row in enumerate(bench.held_out[-3:])
    ]
    settings = DecodeConfig(num_speculative_tokens=2, max_new_tokens=12)
    generations = [decode(bench.target, [request], settings, draft.proposer)[0][0] for request in requests]
    rounds = [generation.rounds for generation in generations]
    assert counts["distilled", 0.0] == [(sum(len(each.committed) for each in own), len(own)) for own in rounds]
    assert counts["distilled", 0.0] == count_rounds(bench, draft.proposer, requests, 0.0)
    assert counts["undistilled", 0.0] != counts["distilled", 0.0]


def test_the_recipe_is_read_from_the_artifact_and_leaves_its_folder_alone(bench, config, tmp_path):
    assert bench.training.student.layers == [0]
    assert bench.training.schedule.trackers == []
    assert bench.training.output.startswith(str(tmp_path / "scratch"))


def test_an_artifact_that_says_nothing_of_its_training_is_one_sentence_and_code_2(tiny_run, capsys):
    draft = tiny_run / "artifact"
    assert run_command(BenchDistillConfig, main, description="", argv=["--set", f"draft={draft}"]) == BAD_INPUT
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint == f"error: draft: {draft} does not say how it was trained; expected an artifact of train/distill.py"


def test_a_training_config_of_another_version_is_named(tiny_run, tmp_path):
    content = json.loads((tiny_run / "artifact/draftsmith.json").read_text())
    (tmp_path / "draftsmith.json").write_text(json.dumps(content | {"training": {"nosuch": 1}}))
    with pytest.raises(InputError, match="is not of this version \\(nosuch: "):
        read_training(str(tmp_path))


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.skipif(not training_comparison.trl_is_installed(), reason="trl is not installed")
def test_trl_computes_the_same_losses_and_takes_the_same_steps(bench, monkeypatch):
    monkeypatch.setattr(training_comparison, "trl_is_installed", lambda: True)
    inputs = make_inputs(12, 8, 64)
    assert forward_backward(loss_comparison.trl_jsd, inputs) == pytest.approx(forward_backward(unchunked_jsd, inputs), rel=1e-3)
    turns = compare_with_trl(bench)
    theirs, ours, same_work = ([turn.result for (turn,) in turns[name]] for name in (GKD, SAME_LOSS, SAME_WORK))
    assert [step.num_tokens for step in ours] == [step.num_tokens for step in theirs]
    assert [step.loss for step in ours] == pytest.approx([step.loss for step in theirs], rel=0.02)
    assert [step.loss for step in same_work] != pytest.approx([step.loss for step in ours], rel=1e-3)
