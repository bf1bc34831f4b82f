"""Training from a cache of the target's outputs, and on a target with blocks on disk: the run is that on the whole target."""

import dataclasses
from pathlib import Path

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from configs.schema.target import TargetConfig
from distill.dataset.batches import ConversationDataset, collate
from heads.frozen.hidden_states import blocks
from heads.frozen.loading import load_target
from heads.inference.runner import backbone
from tests.support.checkpoints import last_on_disk
from tests.support.training_runs import distill_config, draft_task, train_task
from train.launch import make_accelerator, open_training_cache
from train.tasks.draft import DraftTask
from train.tasks.head import HeadTask

DRAFT = "draft_lm"
ALL_STATES = {"taps": [1, 2, 3], "dtype": "float32", "batch_size": 4}
SOME_TOKENS = {"draft_vocab_size": 40}


@pytest.fixture
def make_task(tmp_path, greedy_target, head_task):
    """A function that makes the task of training a draft or head on conversations, from a cache where there is one."""

    def make(kind, rows, cache=None, head=None, **settings):
        data = {"train": str(tmp_path / "train.jsonl"), "max_length": 64, "cache": cache and str(cache)}
        settings |= {"data": data}
        folder = tmp_path / ("cached" if cache else "online")
        if kind == DRAFT:
            config = distill_config(folder, settings=settings, max_steps=6, eval_every_steps=None)
        else:
            config = head_task(kind, rows, rows[:2], head=head or {}, output=str(folder), **settings).config
        opened = open_training_cache(config, ConversationDataset(rows, 64), greedy_target)
        if kind == DRAFT:
            return draft_task(config, greedy_target, rows, opened)
        return HeadTask(config, greedy_target, rows, rows[:2], make_accelerator(config.schedule, Path(config.output)), opened)

    return make


def trained(task, rows):
    """Train without decoding; return the weights at the end and the loss of each batch on the way."""
    task.evaluate = lambda module: {"tokens_per_target_step": 1.0}
    return train_task(task, rows)


@pytest.mark.parametrize(
    ("kind", "head", "kept"),
    [
        (DRAFT, {}, {"dtype": "float32", "batch_size": 3}),
        ("eagle3", {}, ALL_STATES | {"batch_size": 3}),
        ("eagle3", SOME_TOKENS, ALL_STATES | {"batch_size": 3}),
        ("mtp", {"reads": "pre_norm"}, ALL_STATES | {"batch_size": 3}),
    ],
    ids=["draft", "head", "head, some tokens", "MTP"],
)
def test_among_other_neighbours_a_run_from_the_cache_differs_by_rounding_only(
    make_task, greedy_rows, make_cache, kind, head, kept
):
    cache = make_cache(greedy_rows, **kept)
    online, online_losses = trained(make_task(kind, greedy_rows, head=head), greedy_rows)
    cached, cached_losses = trained(make_task(kind, greedy_rows, cache, head), greedy_rows)
    assert len(set(online_losses)) == 6
    assert cached_losses == pytest.approx(online_losses, rel=1e-5)
    torch.testing.assert_close(cached, online, rtol=1e-3, atol=1e-4)


def test_a_draft_is_trained_without_running_the_target(make_task, greedy_target, greedy_rows, make_cache, monkeypatch):
    cache = make_cache(greedy_rows)
    monkeypatch.setattr("distill.signals.read_states", lambda *_: pytest.fail("the target was run"))
    monkeypatch.setattr(DraftTask, "evaluate", lambda *_: {"tokens_per_target_step": 1.0})
    task = make_task(DRAFT, greedy_rows, cache)  # compares the draft's blocks with the target's by a probe
    monkeypatch.setattr(backbone(greedy_target.model), "forward", lambda *_, **__: pytest.fail("the target was run"))
    _, losses = train_task(task, greedy_rows)
    assert len(losses) == 6


def test_other_conversations_than_the_caches_are_read_online(make_task, greedy_target, greedy_rows, make_cache):
    task = make_task("eagle3", greedy_rows, make_cache(greedy_rows, **ALL_STATES))
    (other,) = ConversationDataset(greedy_rows[9:10], 64)
    assert other.conversation == 0  # of another file: number 0 in the cache is another conversation
    states = task.states(collate([other]))
    expected = backbone(greedy_target.model)(torch.tensor([other.input_ids])).last_hidden_state
    torch.testing.assert_close(states.final_BTE, expected.detach())


def test_a_cache_that_does_not_fit_is_refused_before_training(tmp_path, make_task, greedy_rows, make_cache):
    def expect(error, match, kind, cache, rows=greedy_rows, **settings):
        with pytest.raises(error, match=match):
            make_task(kind, rows, cache, **settings)

    cache = make_cache(greedy_rows, **ALL_STATES | {"taps": [2]})
    expect(InputError, r"keeps taps \[2\], and the head reads \[1, 2, 3\]", "eagle3", cache)
    longer = [*greedy_rows[:-1], dataclasses.replace(greedy_rows[-1], answer_ids=(7,) * 40)]
    expect(ConfigError, r"data\.max_length: expected at most", "eagle3", cache, longer)
    (tmp_path / "train.jsonl").write_text("changed")
    expect(InputError, "is not that file", DRAFT, cache)
    expect(InputError, "is not that file", "eagle3", cache)


@pytest.fixture(scope="module")
def targets(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """One target of three blocks, loaded whole, and with two of its blocks on disk."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(seed=1, dtype=torch.float32, layers=3).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    config = TargetConfig(name=str(folder), dtype="float32", device="cpu")
    return load_target(config), load_target(config.model_copy(update=last_on_disk(folder, 2)))


@pytest.mark.parametrize(("kind", "settings"), [("eagle3", {"init_block": 1}), ("mtp", {}), ("draft_lm", {"layers": [1, 2]})])
def test_training_on_a_spread_target_gives_the_weights_of_training_on_the_whole_one(
    tmp_path, targets, head_task, greedy_rows, kind, settings
):
    results = []
    for target in targets:
        folder = tmp_path / str(target.spread_by is None)
        torch.manual_seed(0)
        if kind == "draft_lm":
            task = draft_task(distill_config(folder, settings, max_steps=3), target, greedy_rows)
        else:
            schedule = {"batch_size": 4, "max_steps": 3, "mixed_precision": "no", "trackers": []}
            task = head_task(kind, target=target, head=settings, schedule=schedule, output=str(folder))
        results.append(train_task(task, greedy_rows))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert all(each.is_meta for each in blocks(targets[1].model)[1].parameters())
