"""Training a head from files to an artifact that decodes: what is scored is what is kept, and a run can be repeated."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.training import HeadsConfig
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import generate
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from tests.support.caches import write_rows
from tests.support.tiny_project import TinyProject
from tests.support.training_runs import train_task
from train.launch import run_heads
from train.loop.checkpoints import list_checkpoints, read_manifest

# Two of them draw random numbers while they train: the origins that are kept, the anchors.
HEADS = {
    "eagle3": {"draft_vocab_size": 30, "train_head": True},
    "peagle": {"keep_share": 0.5},
    "dflash": {"num_anchors": 2},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A target and conversations in its words, on disk."""
    project = TinyProject(tmp_path_factory.mktemp("heads"))
    project.create()
    return project


@pytest.fixture
def own_precision():
    """The one precision that accelerate keeps for a whole process may be another one in this test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def config_for(project, output, **settings):
    schedule = {"max_steps": 8, "mixed_precision": "bf16", "log_every_steps": 2, "eval_every_steps": 4}
    config = project.heads(output, **schedule).model_dump() | {"target": project.target | {"dtype": "bfloat16"}}
    return HeadsConfig.model_validate(config | settings)


@pytest.mark.parametrize(
    "head",
    [
        {"kind": "eagle3", "taps": [0, 1, 2], "num_depths": 3, "draft_vocab_size": 40, "norm_taps": True},
        {"kind": "peagle", "taps": [0, 1, 2], "num_depths": 3, "num_layers": 2, "train_head": True, "mask_token_id": 0},
    ],
    ids=["eagle3", "peagle"],
)
@pytest.mark.usefixtures("own_precision")
def test_from_files_to_a_head_that_decodes_as_the_target_alone(project, tmp_path, head):
    config = config_for(project, tmp_path / "out", head=head)
    assert run_heads(config) == 0  # under bfloat16, as by default
    outcome = json.loads((tmp_path / "out" / "outcome.json").read_text())
    assert outcome["steps"] == 8
    parts = [outcome[f"{part}_seconds"] for part in ("training", "evaluation", "checkpoint")]
    assert sum(parts) == pytest.approx(outcome["seconds"])
    assert min(*parts, outcome["input_seconds"]) > 0
    assert outcome["input_seconds"] < outcome["training_seconds"]
    target = load_target(config.target)
    draft = load_draft(tmp_path / "out" / "artifact", target.identity, target.model)
    assert draft.metadata.kind == head["kind"]
    assert draft.metadata.hidden_states.taps == [0, 1, 2]
    assert draft.metadata.provenance["held_out"]["tokens_per_target_step"] == outcome["best_score"]
    assert run_heads(config) == 0  # with nothing left to train
    assert json.loads((tmp_path / "out" / "outcome.json").read_text()) == outcome
    prompts = [[5, 6, 7, 8], [20, 21]]
    plain = generate(target, prompts, DecodeConfig(num_speculative_tokens=0, max_new_tokens=8, batch_size=2))
    with_head = generate(
        target, prompts, DecodeConfig(num_speculative_tokens=3, max_new_tokens=8, batch_size=2), draft.proposer
    )
    assert with_head == plain


@pytest.mark.parametrize("kind", HEADS)
def test_a_resumed_run_ends_as_the_undisturbed_one(head_task, greedy_rows, tmp_path, kind):
    schedule = {"batch_size": 4, "max_steps": 5, "mixed_precision": "no", "trackers": [], "checkpoint_every_steps": 2}
    schedule |= {"eval_every_steps": 3}  # decoding in between leaves the random numbers of training alone

    def task(name):
        return head_task(kind, head=HEADS[kind], schedule=schedule, output=str(tmp_path / name))

    whole, losses = train_task(task("whole"), greedy_rows)
    with pytest.raises(KeyboardInterrupt):
        train_task(task("parts"), greedy_rows, stop_after=4)
    assert [path.name for path in list_checkpoints(tmp_path / "parts" / "checkpoints")] == ["step-00000002", "step-00000004"]
    resumed, rest = train_task(task("parts"), greedy_rows)
    assert rest == losses[4:]
    start = task("start").module.state_dict()
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert any(not torch.equal(whole[name], start[name]) for name in whole)


@pytest.mark.usefixtures("own_precision")
def test_what_a_recipe_leaves_open_is_settled_in_all_that_a_run_writes(project, tmp_path, monkeypatch):
    monkeypatch.setattr("train.resolve.VOCABULARY_STEP", 4)
    data = Path(shutil.copytree(project.folder / "data", tmp_path / "data"))
    rows = list(read_conversations(data / "train.jsonl"))

    def config(max_steps, **schedule):
        schedule |= {"batch_size": 4, "max_steps": max_steps, "trackers": []}
        left_open = {"head": {"kind": "eagle3", "taps": [0, 1], "init_block": "auto", "draft_vocab_size": "auto"}}
        left_open |= {"optimizer": {"learning_rate": "auto"}, "schedule": schedule}
        left_open |= {
            "data": {"train": str(data / "train.jsonl"), "held_out": str(data / "held_out.jsonl"), "max_length": "auto"}
        }
        return config_for(project, tmp_path / "out", **left_open)

    write_rows(data / "train.jsonl", rows[:6])
    assert run_heads(config(1)) == 0
    values = json.loads((tmp_path / "out" / "run.json").read_text())["config"]
    assert (values["head"]["init_block"], values["optimizer"]["learning_rate"]) == (1, 1e-3)
    metadata = json.loads((tmp_path / "out" / "artifact" / "draftsmith.json").read_text())
    (checkpoint,) = list_checkpoints(tmp_path / "out" / "checkpoints")
    for section in ("data", "head", "optimizer"):
        assert "auto" not in (*metadata["training"][section].values(), *values[section].values())
    assert "auto" not in read_manifest(checkpoint).lineage.settings.values()
    write_rows(data / "train.jsonl", rows)
    with pytest.raises(InputError, match=r"contents.train [0-9a-f]+ -> [0-9a-f]+"):
        run_heads(config(2))
    assert run_heads(config(1, resume=False)) == 0
    again = json.loads((tmp_path / "out" / "run.json").read_text())["config"]
    assert again["head"]["draft_vocab_size"] != values["head"]["draft_vocab_size"]


@pytest.mark.parametrize(
    ("kind", "head", "sentence"),
    [
        ("eagle3", {"taps": [1, 4]}, r"head\.taps: 4 is none of the hidden states h_0 \(embedding\) to h_3"),
        ("eagle3", {"init_block": 3}, r"head\.init_block 3: the target's blocks are 0 to 2"),
    ],
)
def test_a_head_that_the_target_cannot_carry_is_refused_before_training(head_task, kind, head, sentence):
    with pytest.raises(InputError, match=sentence):
        head_task(kind, head=head)


def test_a_head_starts_from_an_artifact_with_its_vocabulary_and_goes_on_from_its_score(head_task, greedy_rows, tmp_path):
    head = {"draft_vocab_size": 30, "train_head": True}
    first = head_task(head=head)
    train_task(first, greedy_rows)
    artifact = Path(first.config.output) / "artifact"
    recorded = json.loads((artifact / "draftsmith.json").read_text())["provenance"]["held_out"]
    train = {"schedule": {"batch_size": 4, "max_steps": 1, "mixed_precision": "no", "trackers": []}}
    other = head_task(
        head=head | {"draft_vocab_size": 20, "window": 64}, init=str(artifact), output=str(tmp_path / "next"), **train
    )
    assert torch.equal(other.vocabulary.token_ids_W, load_file(artifact / "draft_vocabulary.safetensors")["d2t"])
    again = other.evaluate(other.module)
    assert again["tokens_per_target_step"] == recorded["tokens_per_target_step"]
    train_task(other, greedy_rows)
    written = load_file(tmp_path / "next" / "artifact" / "model.safetensors")
    before = load_file(artifact / "model.safetensors")
    assert written.keys() == before.keys()
    assert all(written[name].shape == before[name].shape for name in before)


def test_an_artifact_of_another_head_is_refused_in_one_sentence(head_task, greedy_rows, tmp_path):
    task = head_task(head={"taps": [1, 2]})
    train_task(task, greedy_rows)
    said = r"init: .* is a head with taps \[1, 2\], and head\.taps is \[0, 1, 2\].*: give head what the artifact has, or set"
    with pytest.raises(InputError, match=said):
        head_task(head={"taps": [0, 1, 2]}, init=str(Path(task.config.output) / "artifact"), output=str(tmp_path / "next"))
