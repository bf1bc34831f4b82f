"""A cache with taps says at every position what the target says online, and is refused by heads that want something else."""

import json

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from configs.schema.data import CacheConfig
from distill.cache import writer as cache_making
from distill.cache.reader import open_cache
from distill.loss.pairs import normalise
from heads.frozen.hidden_states import read_states
from heads.inference.causal_lm import head_logits
from tests.support import family_checks as checks
from tests.support.caches import batch_of, cache_job, random_conversations, run

TAPS = [0, 2, 4]
WIDTH = 32


@pytest.fixture(scope="module")
def conversations():
    """Eight conversations of random tokens, prompts of 3 to 6 of them, answers of 2 to 23."""
    return random_conversations([(3 + n % 4, 2 + 3 * n) for n in range(8)], checks.VOCAB_SIZE, seed=6)


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


@pytest.fixture
def job(tmp_path, data_file, conversations, target):
    """A function that gives the job of making a cache of those conversations."""

    def make(output="cache", target=target, **settings):
        values = {"taps": TAPS, "dtype": "float32", "batch_size": 3, "shard_megabytes": 0.02} | settings
        return cache_job(target, data_file, conversations, tmp_path / output, **values)

    return make


@pytest.fixture
def cache(job, tmp_path, data_file, target):
    run(job())
    return open_cache(tmp_path / "cache", data_file, target)


# --- what it says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in sorted(checks.CONFIGS)), ("llama", "bfloat16")])
def test_states_are_those_read_online_to_the_bit(name, dtype, job, tmp_path, data_file, conversations, as_target):
    target = as_target(checks.tiny_target(name))
    run(job(target=target, dtype=dtype, batch_size=1))  # one by one: the shape of a forward decides the last bits
    cache = open_cache(tmp_path / "cache", data_file, target)
    for number in range(len(conversations)):
        batch = batch_of(conversations, [number])
        online = read_states(target.model, batch.input_ids_BT, TAPS)
        online = online.map(lambda state_BTE: state_BTE.to(getattr(torch, dtype)).to(target.model.dtype))
        found = cache.states(batch, TAPS)
        assert torch.equal(found.final_BTE, online.final_BTE)
        assert len(found.taps_ABTE) == len(TAPS)
        assert all(torch.equal(one, other) for one, other in zip(found.taps_ABTE, online.taps_ABTE, strict=True))
        expected = normalise(target.model, online.final_BTE, torch.arange(batch.input_ids_BT.numel()), chunk_size=128)
        assert torch.equal(cache.normalisers(batch).log_sum_P, expected.log_sum_P.float())
        assert torch.equal(cache.normalisers(batch).top1_P, expected.top1_P)


def test_rows_of_a_batch_are_padded_with_nothing_and_taps_come_in_the_order_asked_for(cache, conversations, target):
    batch = batch_of(conversations, [5, 0, 3])
    inside_BT = batch.document_ids_BT == 0
    online = read_states(target.model, batch.input_ids_BT, [4, 0])
    found = cache.states(batch, [4, 0])
    for one, other in zip([found.final_BTE, *found.taps_ABTE], [online.final_BTE, *online.taps_ABTE], strict=True):
        torch.testing.assert_close(one[inside_BT], other[inside_BT], rtol=1e-6, atol=1e-5)
        assert not one[~inside_BT].any()
    known = cache.normalisers(batch)
    logits_BTV = head_logits(target.model, online.final_BTE).float()
    inside_P = inside_BT.flatten()
    torch.testing.assert_close(known.log_sum_P[inside_P], logits_BTV.logsumexp(-1).flatten()[inside_P], rtol=1e-5, atol=1e-5)
    assert torch.equal(known.top1_P[inside_P], logits_BTV.argmax(-1).flatten()[inside_P])
    assert known.top1_P.dtype == torch.int64
    assert not known.log_sum_P[~inside_P].any()


def test_probabilities_of_rounded_states_still_add_up(job, tmp_path, data_file, conversations, target):
    run(job(dtype="bfloat16"))
    cache = open_cache(tmp_path / "cache", data_file, target)
    batch = batch_of(conversations, [7])
    logits_PV = head_logits(target.model, cache.states(batch).final_BTE)[0]
    sums_P = (logits_PV - cache.normalisers(batch).log_sum_P.unsqueeze(-1)).exp().sum(-1)
    torch.testing.assert_close(sums_P, torch.ones_like(sums_P), rtol=1e-5, atol=0)


# --- what it takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"taps": None}, WIDTH * 4),
        ({"taps": TAPS}, 4 * WIDTH * 4 + 8),
        ({"taps": []}, WIDTH * 4 + 8),
        ({"taps": None, "kind": "top_k", "k": 7}, 7 * 4 + 4 + 6),  # of 64 tokens, so 6 bits an id
    ],
)
def test_the_size_told_and_checked_before_is_that_on_disk(job, tmp_path, conversations, monkeypatch, settings, row):
    checked = []
    monkeypatch.setattr(cache_making, "check_room", lambda folder, num_bytes: checked.append(num_bytes))
    manifest = run(job(**settings))
    tokens = sum(len(row.answer_ids) + (0 if settings["taps"] is None else len(row.prompt_ids)) for row in conversations)
    assert checked == [tokens * row]
    on_disk = 0
    for number in range(manifest.num_shards):
        content = (tmp_path / "cache" / f"shard-{number:05d}.safetensors").read_bytes()
        on_disk += len(content) - 8 - int.from_bytes(content[:8], "little")
    num_tensors = len(manifest.layout.tensors(0))
    assert on_disk == tokens * row + len(conversations) * 8 * (1 + num_tensors)  # offsets and checksums


def test_taps_in_8_bits_are_right_to_a_sixteenth_and_the_target_s_distribution_is_untouched(
    job, tmp_path, data_file, conversations, target
):
    run(job("exact", dtype="float32"))
    run(job("halves", dtype="bfloat16"))
    small = run(job("small", dtype="float8_e4m3fn"))
    assert small.layout.bytes_per_row == 2 * WIDTH + 3 * (WIDTH + 4) + 8
    batch = batch_of(conversations, [7, 0, 3])
    exact, halves, found = (open_cache(tmp_path / name, data_file, target) for name in ("exact", "halves", "small"))
    assert torch.equal(found.states(batch).final_BTE, halves.states(batch).final_BTE)
    assert torch.equal(found.normalisers(batch).log_sum_P, halves.normalisers(batch).log_sum_P)
    for ours, theirs in zip(found.states(batch, TAPS).taps_ABTE, exact.states(batch, TAPS).taps_ABTE, strict=True):
        largest = theirs.abs().amax(-1, keepdim=True)
        assert bool(((ours - theirs).abs() <= theirs.abs() / 16 + largest / 448 * 2**-9).all())
        assert not torch.equal(ours, theirs)


# --- refusals -----------------------------------------------------------------------------------------------------


def change_layout(folder, **changes):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["layout"].update(changes)
    path.write_text(json.dumps(content))


def test_a_head_of_taps_that_are_not_kept_is_refused_and_one_of_fewer_is_not(cache):
    cache.check_keeps([2])
    cache.check_keeps([])
    with pytest.raises(InputError, match=r"keeps taps \[0, 2, 4\], and the head reads \[1, 2, 3\]: \[1, 3\] are missing"):
        cache.check_keeps([1, 2, 3])


def test_normalisers_of_a_target_in_another_dtype_are_refused_with_both_named(cache, data_file, target):
    change_layout(cache.folder.path, target_dtype="bfloat16")
    with pytest.raises(InputError, match=r"made with target\.dtype bfloat16, and the target is in float64 here"):
        open_cache(cache.folder.path, data_file, target).check_keeps(TAPS)


@pytest.mark.parametrize("settings", [{"kind": "last_hidden"}, {"kind": "top_k", "k": 4}])
def test_a_cache_for_distillation_is_refused_by_heads(job, tmp_path, data_file, target, settings):
    run(job(taps=None, **settings))
    cache = open_cache(tmp_path / "cache", data_file, target)
    with pytest.raises(InputError, match=rf"kind {settings['kind']}, without taps.* taps: \[2\], or set data\.cache to null"):
        cache.check_keeps([2])


def test_taps_behind_the_last_block_are_refused_before_anything_is_written(job, tmp_path):
    with pytest.raises(
        ConfigError, match=r"taps: expected h_0 \(embedding\) to h_4 \(last block of the target\), got \[2, 5\]"
    ):
        job(taps=[2, 5]).prepare()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kind": "top_k", "taps": [1]}, "kind must be last_hidden with taps, got top_k"),
        ({"taps": [3, 1]}, r"taps must rise and name each state once, got \[3, 1\]"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        CacheConfig(**settings)
