"""Training a head from a cache of the target's states: the same run as online, without a forward of the target."""

from pathlib import Path

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import sha256_of
from configs.schema.data import CacheConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.training import HeadsConfig
from distill.cache.writer import CacheJob
from distill.dataset.batches import ConversationDataset, collate
from distill.loss import head_objective
from distill.loss import pairs as normalised_rows
from heads.inference.causal_lm import backbone
from heads.modules.interface import Normalisers
from tests.support.training_runs import conversation, train_task
from train.launch import make_accelerator, open_training_cache
from train.tasks.head import HeadTask

MAX_LENGTH = 64
BATCH_SIZE = 4
EAGLE3 = {"kind": "eagle3", "taps": [1, 2, 3], "num_depths": 2}
SOME_TOKENS = {"draft_vocab_size": 40}
HEADS = [EAGLE3, {"kind": "medusa", "num_depths": 2}, {"kind": "mtp", "num_depths": 2, "reads": "pre_norm"}]


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, dtype=torch.float32, layers=4))


@pytest.fixture
def conversations():
    """A function that gives sixteen conversations, all of 20 tokens or of 8 to 19."""

    def make(*, ragged):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(5, 64, (16, 20), generator=generator).tolist()
        return [conversation(number, ids[:5], ids[5 : 8 + number % 12 if ragged else 20]) for number, ids in enumerate(rows)]

    return make


@pytest.fixture
def make_cache(tmp_path, target):
    """A function that makes a cache of conversations and returns its folder."""

    def make(rows, **settings):
        data = tmp_path / "train.jsonl"
        data.write_text("".join(row.to_line() for row in rows))
        values = {"taps": [1, 2, 3, 4], "dtype": "float32", "batch_size": BATCH_SIZE} | settings
        config = CacheConfig(data=str(data), output=str(tmp_path / "cache"), max_length=MAX_LENGTH, **values)
        job = CacheJob(target=target, conversations=rows, config=config, data_sha256=sha256_of(data))
        job.prepare()
        job.work(rank=0, num_processes=1)
        job.finish()
        return tmp_path / "cache"

    return make


def config_for(folder, cache, head=EAGLE3, **settings):
    return HeadsConfig(
        data={"train": str(folder / "train.jsonl"), "max_length": MAX_LENGTH, "cache": cache and str(cache)},
        head=head,
        schedule={"batch_size": BATCH_SIZE, "max_steps": 6, "mixed_precision": "no", "trackers": [], "log_every_steps": 1},
        held_out={"num_prompts": 2, "decode": DecodeConfig(num_speculative_tokens=2, max_new_tokens=4)},
        num_speculative_tokens=2,
        output=str(folder / ("cached" if cache else "online")),
        **settings,
    )


def make_task(config, target, rows):
    accelerator = make_accelerator(config.schedule, Path(config.output))
    dataset = ConversationDataset(rows, MAX_LENGTH)
    cache = open_training_cache(config, dataset, target)
    return HeadTask(config, target, rows, rows[:2], accelerator, cache), dataset


def run(config, target, rows):
    """Train as configured; return the head's weights at the end and the loss of each batch on the way."""
    task, _ = make_task(config, target, rows)
    task.evaluate = lambda module: {"tokens_per_target_step": 1.0}
    return train_task(task, rows, max_length=MAX_LENGTH)


def difference(ours, theirs):
    """Return the largest difference of two sets of weights."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head["kind"])
def test_a_run_from_the_cache_ends_in_the_same_bits(tmp_path, target, conversations, make_cache, head):
    # Of equal lengths and in batches of equal size: forwards of the same shape then round alike wherever a row stands.
    rows = conversations(ragged=False)
    cache = make_cache(rows)
    online, online_losses = run(config_for(tmp_path, None, head), target, rows)
    cached, cached_losses = run(config_for(tmp_path, cache, head), target, rows)
    assert len(set(online_losses)) == 6
    assert cached_losses == online_losses
    assert difference(cached, online) == 0


@pytest.mark.parametrize("settings", [EAGLE3, EAGLE3 | SOME_TOKENS], ids=["all tokens", "some tokens"])
def test_among_other_neighbours_a_run_from_the_cache_differs_by_rounding_only(
    tmp_path, target, conversations, make_cache, settings
):
    rows = conversations(ragged=True)
    cache = make_cache(rows, batch_size=3, chunk_size=7)
    online, online_losses = run(config_for(tmp_path, None, settings), target, rows)
    cached, cached_losses = run(config_for(tmp_path, cache, settings), target, rows)
    assert cached_losses == pytest.approx(online_losses, rel=1e-5)
    assert difference(cached, online) < 1e-4


def test_neither_the_target_nor_its_whole_head_is_run_on_a_batch(tmp_path, target, conversations, make_cache, monkeypatch):
    rows = conversations(ragged=True)
    config = config_for(tmp_path, make_cache(rows), EAGLE3 | SOME_TOKENS)
    task, dataset = make_task(config, target, rows)
    batch = collate(list(dataset)[:3])
    backbone(target.model).forward = lambda *_, **__: pytest.fail("the target was run")
    for module in (head_objective, normalised_rows):
        monkeypatch.setattr(module, "normalise", lambda *_, **__: pytest.fail("the whole head was run"))
    found = task.loss(task.module, batch, batch.loss_mask_BT.sum(), 1)
    assert torch.isfinite(found.loss)


def test_known_normalisers_are_what_the_objective_computes(tmp_path, target, conversations, make_cache):
    rows = conversations(ragged=True)
    task, dataset = make_task(config_for(tmp_path, make_cache(rows), EAGLE3 | SOME_TOKENS), target, rows)
    batch = collate(list(dataset)[3:7])
    (states, normalisers), num_labels = task.training_states(batch), batch.loss_mask_BT.sum()
    known = task.module(batch, states, num_labels, 1, normalisers)
    computed = task.module(batch, states, num_labels, 1)
    assert known.loss.item() == pytest.approx(computed.loss.item(), rel=1e-6)
    torch.testing.assert_close(known.acceptance_K, computed.acceptance_K)
    assert torch.equal(known.agrees_K, computed.agrees_K)
    larger = Normalisers(log_sum_P=normalisers.log_sum_P + 1, top1_P=normalisers.top1_P)
    # Were they computed again, a sum e times as large would leave the target's probabilities as they are.
    assert bool((task.module(batch, states, num_labels, 1, larger).acceptance_K < known.acceptance_K).all())


def test_other_conversations_than_the_caches_are_read_online(tmp_path, target, conversations, make_cache):
    rows = conversations(ragged=True)
    task, _ = make_task(config_for(tmp_path, make_cache(rows)), target, rows)
    (other,) = list(ConversationDataset(rows[9:10], MAX_LENGTH))
    assert other.conversation == 0  # of another file: number 0 in the cache is another conversation
    states = task.states(collate([other]))
    expected = backbone(target.model)(torch.tensor([other.input_ids])).last_hidden_state
    torch.testing.assert_close(states.final_BTE, expected.detach())


def test_a_cache_that_does_not_fit_is_refused_before_training(tmp_path, target, conversations, make_cache):
    rows = conversations(ragged=True)
    config = config_for(tmp_path, make_cache(rows, taps=[2]))
    with pytest.raises(InputError, match=r"keeps taps \[2\], and the head reads \[1, 2, 3\]"):
        make_task(config, target, rows)
    make_cache(rows, taps=None)
    with pytest.raises(InputError, match="make one with kind: last_hidden and taps"):
        make_task(config, target, rows)
    longer = [*rows[:-1], rows[-1].__class__(**{**vars(rows[-1]), "answer_ids": (7,) * 40})]
    with pytest.raises(ConfigError, match=r"data\.max_length: expected at most"):
        make_task(config, target, longer)
    (tmp_path / "train.jsonl").write_text("changed")
    with pytest.raises(InputError, match="is not that file"):
        make_task(config, target, rows)
