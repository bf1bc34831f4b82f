"""The training run: it learns, it resumes bit for bit, it keeps the draft that decodes best, it stops on a bad loss."""

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from configs.runtime.errors import ConfigError, InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.learning import OptimizerConfig, StudentConfig
from configs.schema.target import TargetConfig
from configs.schema.training import DistillConfig, HeldOutDecodingConfig, ScheduleConfig
from distill.dataset.batches import ConversationDataset, make_loader
from distill.student.init import initial_draft
from heads.artifact import load_draft
from tests.support.training_runs import conversation, train_task
from train.launch import make_accelerator, run_distillation
from train.loop.checkpoints import list_checkpoints
from train.loop.loop import train
from train.loop.optimizer import make_optimizer
from train.tasks.draft import DraftTask


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, dtype=torch.float32, layers=3))


@pytest.fixture(scope="module")
def rows(target):
    """Conversations in the target's own words."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 64, (24, 6), generator=generator)
    answers = target.model.generate(prompts, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompts))
    return [conversation(number, row[:6], row[6 : 10 + number % 8]) for number, row in enumerate(answers.tolist())]


def config_for(folder, student=None, **schedule):
    defaults = {
        "batch_size": 4,
        "max_steps": 10,
        "mixed_precision": "no",
        "log_every_steps": 2,
        "eval_every_steps": 5,
        "checkpoint_every_steps": 5,
        "trackers": [],
    }
    return DistillConfig(
        student=StudentConfig(**{"layers": [0, 2]} | (student or {})),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        schedule=ScheduleConfig(**defaults | schedule),
        held_out=HeldOutDecodingConfig(num_prompts=3, decode=DecodeConfig(max_new_tokens=10, num_speculative_tokens=2)),
        output=str(folder),
    )


def run(config, target, rows, stop_after=None):
    """Distil as configured; return the weights at the end."""
    accelerator = make_accelerator(config.schedule, Path(config.output))
    return train_task(DraftTask(config, target, rows, rows[:3], accelerator), rows, stop_after)[0]


@pytest.mark.parametrize("student", [{}, {"lora": {"rank": 4}, "draft_vocab_size": 20}], ids=["full", "lora"])
def test_ten_steps_equal_five_then_a_resume_and_five_bit_for_bit(tmp_path, target, rows, student):
    whole = run(config_for(tmp_path / "whole", student), target, rows)
    with pytest.raises(KeyboardInterrupt):
        run(config_for(tmp_path / "parts", student), target, rows, stop_after=7)
    assert [path.name for path in list_checkpoints(tmp_path / "parts" / "checkpoints")] == ["step-00000005"]
    resumed = run(config_for(tmp_path / "parts", student), target, rows)
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


@pytest.mark.parametrize(("every", "stop_after"), [(3, 10), (4, 12)], ids=["at an epoch's end", "within the second epoch"])
def test_a_resume_finds_its_place_among_accumulated_batches(tmp_path, target, rows, every, stop_after):
    # An epoch is 8 micro-batches: steps of 3, 3 and 2 of them.
    def config(name):
        schedule = {"batch_size": 3, "gradient_accumulation_steps": 3, "max_steps": 7, "checkpoint_every_steps": every}
        return config_for(tmp_path / name, eval_every_steps=None, **schedule)

    whole = run(config("whole"), target, rows)
    with pytest.raises(KeyboardInterrupt):
        run(config("parts"), target, rows, stop_after=stop_after)
    assert [path.name for path in list_checkpoints(tmp_path / "parts" / "checkpoints")] == [f"step-0000000{every}"]
    resumed = run(config("parts"), target, rows)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_a_run_that_does_not_resume_leaves_no_checkpoint_of_the_one_before(tmp_path, target, rows):
    run(config_for(tmp_path), target, rows)
    anew = {"max_steps": 6, "checkpoint_every_steps": 2, "keep_checkpoints": 1}
    with pytest.raises(KeyboardInterrupt):
        run(config_for(tmp_path, resume=False, **anew), target, rows, stop_after=5)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000004"]
    run(config_for(tmp_path, **anew), target, rows)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000006"]


@pytest.mark.parametrize("change", [{"batch_size": 3}, {"student": {"layers": [1]}}], ids=["schedule", "weights"])
def test_a_checkpoint_of_another_config_is_refused(tmp_path, target, rows, change):
    run(config_for(tmp_path, max_steps=5), target, rows)
    with pytest.raises(InputError, match="another config"):
        run(config_for(tmp_path, max_steps=5, **change), target, rows)


def test_a_held_out_prompt_that_cannot_be_decoded_is_refused_before_training(tmp_path, target, rows):
    config = config_for(tmp_path)
    long = dataclasses.replace(rows[0], prompt_ids=(5,) * 300)
    with pytest.raises(InputError, match="p0/0 has 300 tokens; the target's context is 256"):
        DraftTask(config, target, rows, [long], make_accelerator(config.schedule, tmp_path))


def test_a_device_that_accelerate_does_not_train_on_is_refused(tmp_path):
    config = config_for(tmp_path).model_copy(update={"target": TargetConfig(device="meta")})
    with pytest.raises(ConfigError, match=r"target\.device: training runs on .*, got meta"):
        run_distillation(config)


def test_a_tracker_that_is_not_installed_is_not_left_out_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr("train.telemetry.trackers.get_available_trackers", list)
    with pytest.raises(ConfigError, match=r"schedule\.trackers: wandb is not installed"):
        make_accelerator(ScheduleConfig(trackers=["wandb"]), tmp_path)


def test_a_precision_that_the_machine_does_not_have_is_a_sentence(tmp_path, monkeypatch):
    def accelerator(mixed_precision, **_):
        raise ValueError(f"{mixed_precision} mixed precision requires a GPU")

    monkeypatch.setattr("train.launch.Accelerator", accelerator)
    with pytest.raises(ConfigError, match=r"schedule\.mixed_precision: fp16 cannot be used: fp16 mixed precision requires"):
        make_accelerator(ScheduleConfig(mixed_precision="fp16"), tmp_path)


def test_accumulated_micro_batches_give_the_step_of_one_large_batch(tmp_path, target, rows):
    large = run(config_for(tmp_path / "large", batch_size=8, max_steps=1, eval_every_steps=None), target, rows[:8])
    small = run(
        config_for(tmp_path / "small", batch_size=2, gradient_accumulation_steps=4, max_steps=1, eval_every_steps=None),
        target,
        rows[:8],
    )
    for name, tensor in large.items():
        torch.testing.assert_close(small[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def test_training_brings_the_draft_closer_to_the_target(tmp_path, target, rows):
    config = config_for(tmp_path, max_steps=40, eval_every_steps=20, checkpoint_every_steps=None)
    run(config, target, rows)
    untrained = DraftTask(config, target, rows, rows[:3], Accelerator())
    before = untrained.evaluate(untrained.module)
    provenance = json.loads((tmp_path / "artifact" / "draftsmith.json").read_text())["provenance"]
    assert provenance["held_out"]["tokens_per_target_step"] > before["tokens_per_target_step"] + 0.2


def test_a_draft_of_a_reduced_vocabulary_is_decoded_and_kept_as_one(tmp_path, target, rows):
    whole = run(config_for(tmp_path, {"draft_vocab_size": 20}, max_steps=5), target, rows)
    draft = load_draft(tmp_path / "artifact", target.identity, target.model)
    spoken = {token for row in rows for token in row.answer_ids}
    assert (draft.metadata.draft_vocabulary, draft.metadata.draft_vocab_size) == ("reduced", 20)
    assert set(draft.proposer.vocabulary.token_ids_W.tolist()) <= spoken
    assert len(whole["draft.lm_head.weight"]) == 64
    assert draft.metadata.provenance["held_out"]["draft_token_yield"] > 0


def test_the_artifact_of_an_adapted_draft_is_the_plain_model_that_it_amounts_to(tmp_path, target, rows, monkeypatch):
    saved = []
    plain_save = DraftTask.save

    def save(task, module, *args):
        saved[:] = [module.draft.eval()(input_ids=torch.tensor([rows[0].prompt_ids])).logits.detach()]
        module.draft.train()
        plain_save(task, module, *args)

    monkeypatch.setattr(DraftTask, "save", save)
    run(config_for(tmp_path, {"lora": {"rank": 4}}, max_steps=5), target, rows)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "artifact", dtype=torch.float32)
    torch.testing.assert_close(draft(input_ids=torch.tensor([rows[0].prompt_ids])).logits, saved[0], rtol=1e-4, atol=1e-4)
    untrained = initial_draft(StudentConfig(layers=[0, 2]), target)(input_ids=torch.tensor([rows[0].prompt_ids])).logits
    assert (untrained - saved[0]).abs().max() > 0.01


def test_a_searched_student_is_recorded_with_the_layers_that_were_found(tmp_path, target, rows):
    student = {"layers": None, "layer_choice": "searched", "num_layers": 2, "search_trials": 2, "search_conversations": 4}
    run(config_for(tmp_path, student, max_steps=1), target, rows)
    recorded = json.loads((tmp_path / "artifact" / "draftsmith.json").read_text())["training"]["student"]
    assert recorded["layers"] in ([0, 1], [0, 2], [1, 2])
    assert DistillConfig.model_validate({"student": recorded}).student.layer_choice is None


def test_the_artifact_is_the_best_draft_not_the_last(tmp_path, target, rows, monkeypatch):
    scores = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr(DraftTask, "evaluate", lambda *_: {"tokens_per_target_step": next(scores)})
    run(config_for(tmp_path, max_steps=15), target, rows)
    provenance = json.loads((tmp_path / "artifact" / "draftsmith.json").read_text())["provenance"]
    assert (provenance["step"], provenance["held_out"]["tokens_per_target_step"]) == (10, 2.5)


def test_a_loss_that_is_not_finite_stops_before_the_step_and_says_where(tmp_path, target, rows):
    config = config_for(tmp_path)
    accelerator = make_accelerator(config.schedule, tmp_path)
    task = DraftTask(config, target, rows, rows[:3], accelerator)
    with torch.no_grad():
        task.module.draft.model.norm.weight[0] = math.inf
    before = {name: tensor.clone() for name, tensor in task.module.state_dict().items()}
    loader = make_loader(ConversationDataset(rows, 64), 4, seed=0)
    with pytest.raises(RuntimeError, match=r"step 1 .*, micro-batch 1, conversations (\d+, ){3}\d+ of .* was not taken"):
        train(task, loader, config.optimizer, config.schedule, accelerator, tmp_path, config.model_dump(mode="json"))
    after = task.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_learning_rate_warms_up_and_falls_to_its_final_share():
    module = torch.nn.Linear(3, 3)
    optimizer, scheduler = make_optimizer(module, OptimizerConfig(learning_rate=1.0, warmup_share=0.1, final_share=0.2), 100)
    rates = []
    for _ in range(100):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.2, abs=0.01)


def test_vectors_are_not_decayed():
    module = torch.nn.Linear(3, 3)
    optimizer, _ = make_optimizer(module, OptimizerConfig(weight_decay=0.1), 10)
    assert {group["weight_decay"]: [tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups} == {
        0.1: [(3, 3)],
        0.0: [(3,)],
    }
