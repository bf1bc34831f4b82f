"""What a training leaves: every key of `draftsmith.json`, and every tensor's dtype, which is the target's."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training_runs import distill_config, draft_task, train_task

NUM_DRAFTS = 5  # of the config's `num_speculative_tokens`, not of held-out decoding
ONE_STEP = {"batch_size": 4, "max_steps": 1, "mixed_precision": "no", "trackers": []}


@pytest.fixture(scope="module")
def half_target(tiny_llama, as_target):
    """A target in bfloat16."""
    return as_target(tiny_llama(seed=1, dtype=torch.bfloat16, layers=3).requires_grad_(False))


def written_by(task, rows, output):
    train_task(task, rows)
    metadata = json.loads((output / "artifact" / "draftsmith.json").read_text())
    provenance = metadata.pop("provenance")
    assert set(provenance) == {"data", "command", "versions", "git", "step", "held_out"}
    assert provenance["step"] == 1
    assert provenance["held_out"]["tokens_per_target_step"] >= 1
    assert metadata.pop("training") == task.config.model_dump(mode="json")
    assert metadata.pop("target") == task.target.identity.to_dict()
    return metadata, load_file(output / "artifact" / "model.safetensors")


def test_a_draft_lm(tmp_path, half_target, greedy_rows):
    settings = {"num_speculative_tokens": NUM_DRAFTS}
    config = distill_config(tmp_path, {"draft_vocab_size": 20}, settings=settings, **ONE_STEP | {"eval_every_steps": None})
    metadata, tensors = written_by(draft_task(config, half_target, greedy_rows), greedy_rows, tmp_path)
    assert metadata == {
        "format_version": 1,
        "kind": "draft_lm",
        "hidden_states": None,
        "head": None,
        "draft_vocab_size": 20,
        "draft_vocabulary": "reduced",
        "num_speculative_tokens": NUM_DRAFTS,
    }
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "artifact" / "config.json").read_text())["dtype"] == "bfloat16"
    assert len(load_file(tmp_path / "artifact" / "draft_vocabulary.safetensors")["d2t"]) == 20


def test_a_head(tmp_path, half_target, head_task, greedy_rows):
    head = {"taps": [0, 2, 3], "draft_vocab_size": 30, "train_head": True}
    settings = {"num_speculative_tokens": NUM_DRAFTS, "schedule": ONE_STEP, "output": str(tmp_path)}
    task = head_task("eagle3", target=half_target, head=head, **settings)
    metadata, tensors = written_by(task, greedy_rows, tmp_path)
    assert metadata.pop("head") == task.module.head.settings.model_dump(mode="json")
    states = metadata.pop("hidden_states")
    assert (states["taps"], states["concat_order"], states["last_is_post_norm"]) == ([0, 2, 3], ["h_0", "h_2", "h_3"], True)
    assert metadata == {
        "format_version": 1,
        "kind": "eagle3",
        "draft_vocab_size": 30,
        "draft_vocabulary": "reduced",
        "num_speculative_tokens": NUM_DRAFTS,
    }
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}
    assert len(load_file(tmp_path / "artifact" / "draft_vocabulary.safetensors")["d2t"]) == 30
