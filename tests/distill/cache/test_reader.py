"""A cache says what the target says, goes on where it was cut off, and is refused wherever it does not belong."""

import dataclasses
import json
import logging
import math
import shutil
import threading
from collections import Counter, namedtuple

import pytest
import torch
from torch.nn import functional as F

from configs.runtime.errors import ConfigError, InputError
from configs.schema.training import DistillConfig, HeadsConfig, LossConfig
from distill.cache.format import SHARD, RowLayout, check_folder, pack_ids, read_places, unpack_ids
from distill.cache.reader import check_fits, open_cache
from distill.cache.rows import encode
from distill.cache.storage import Folder
from distill.cache.writer import CacheJob
from distill.dataset.batches import ConversationDataset
from distill.loss.draft_objective import DraftObjective
from tests.support.caches import (
    batch_of,
    cache_job,
    flip_a_bit,
    interrupt_after,
    random_conversations,
    run,
    shard_files,
    write_rows,
)
from tests.support.losses import target_hidden

VOCABULARY = 258  # of the byte target


@pytest.fixture(scope="module")
def conversations():
    """Twelve conversations of random tokens, prompts of 3 to 8 of them, answers of 1 to 40."""
    return random_conversations([(3 + n % 6, 1 + (n * 17) % 40) for n in range(12)], VOCABULARY, seed=5)


@pytest.fixture
def job(tmp_path, data_file, conversations, byte_target):
    """A function that gives the job of making a cache of those conversations."""

    def make(output="cache", **settings):
        return cache_job(byte_target, data_file, conversations, tmp_path / output, batch_size=3, **settings)

    return make


@pytest.fixture
def cache(job, tmp_path, data_file, byte_target):
    """A cache of hidden states in float32, several shards."""
    run(job(dtype="float32", shard_megabytes=0.008))
    return open_cache(tmp_path / "cache", data_file, byte_target)


@pytest.fixture
def objective(byte_target, tiny_llama):
    draft = tiny_llama(seed=4, layers=1, vocab_size=byte_target.vocab_size, dtype=torch.float32)
    return lambda **loss: DraftObjective(draft, byte_target, LossConfig(**loss))


def loss_and_gradient(objective, batch, signal):
    result = objective(batch, signal, torch.tensor(7.0), 1)
    weights = [parameter for parameter in objective.draft.parameters() if parameter.requires_grad]
    return result, torch.autograd.grad(result.loss, weights)


def assert_same_learning(objective, batch, found, expected, tolerance):
    ours, our_gradient = loss_and_gradient(objective, batch, found)
    theirs, their_gradient = loss_and_gradient(objective, batch, expected)
    assert float(ours.loss.detach()) == pytest.approx(float(theirs.loss.detach()), rel=tolerance)
    torch.testing.assert_close(ours.acceptance_N, theirs.acceptance_N, rtol=tolerance, atol=tolerance)
    assert torch.equal(ours.top1_agrees_N, theirs.top1_agrees_N)
    for one, other in zip(our_gradient, their_gradient, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=20 * tolerance * float(other.abs().max()))


# --- what a row takes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "num_ids"), [(1, 3), (7, 1), (8, 2), (9, 5), (16, 3), (18, 32), (31, 2)])
def test_packed_ids_are_one_long_number_of_lowest_bits_first_and_come_back(bits, num_ids):
    ids = torch.randint(2**bits, (4, num_ids), generator=torch.Generator().manual_seed(bits))
    ids[0], ids[1] = 0, 2**bits - 1
    packed = pack_ids(ids, bits)
    assert packed.shape == (4, math.ceil(num_ids * bits / 8))
    for row, stored in zip(ids.tolist(), packed.tolist(), strict=True):
        assert int.from_bytes(stored, "little") == sum(one << (place * bits) for place, one in enumerate(row))
    assert torch.equal(unpack_ids(packed, num_ids, bits), ids)


# --- what a row says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [512, 6])  # at 6 half of the conversations have no answer and are dropped
def test_learning_from_hidden_states_is_learning_online(cache, conversations, byte_target, objective, max_length):
    batch = batch_of(conversations, [5, 0, 4, 3], max_length)
    assert_same_learning(objective(), batch, cache.signal(batch), target_hidden(byte_target, batch), 1e-6)


def test_learning_from_the_whole_vocabulary_is_learning_online(job, tmp_path, data_file, conversations, byte_target, objective):
    run(job(kind="top_k", k=len(byte_target.tokenizer), dtype="float32"))
    cache = open_cache(tmp_path / "cache", data_file, byte_target)
    batch = batch_of(conversations, [4, 11, 1])
    expected = target_hidden(byte_target, batch)
    assert_same_learning(objective(), batch, cache.signal(batch), expected, 2e-6)


def test_in_half_precision_the_most_likely_tokens_and_the_tail_are_right_to_three_digits(
    job, tmp_path, data_file, conversations, byte_target
):
    run(job(kind="top_k", k=5))
    cache = open_cache(tmp_path / "cache", data_file, byte_target)
    row = conversations[6]
    found = cache.rows([6], [len(row.answer_ids)])
    logits = byte_target.model(torch.tensor([row.prompt_ids + row.answer_ids])).logits[0, len(row.prompt_ids) - 1 : -1]
    p = F.softmax(logits.detach().double(), -1)
    assert torch.equal(found["token_ids"], p.topk(5).indices)
    torch.testing.assert_close(found["log_probs"].double().exp(), p.topk(5).values, rtol=5e-3, atol=0)
    torch.testing.assert_close(found["log_tail"].double().exp(), 1 - p.topk(5).values.sum(-1), rtol=5e-3, atol=0)


def test_a_tail_too_small_for_one_minus_the_rest_is_still_there(byte_target):
    head = byte_target.model.get_output_embeddings()
    hidden = 400 * F.normalize(head.weight[:1].detach(), dim=-1)
    layout = RowLayout(kind="top_k", dtype="float32", width=2, vocab_size=VOCABULARY)
    found = encode(byte_target, layout, hidden, 1)
    log_p = F.linear(hidden, head.weight.detach()).double().log_softmax(-1)[0]
    exact = log_p.sort(descending=True).values[2:].logsumexp(-1)
    assert float(exact) < math.log(1e-7)
    assert float(found["log_tail"][0]) == pytest.approx(float(exact), rel=1e-4)


# --- making -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"taps": [0, 2]}], ids=["rows before labels", "taps"])
def test_a_cut_off_run_goes_on_to_the_same_bytes(job, tmp_path, monkeypatch, settings):
    whole = run(job("whole", shard_megabytes=0.003, **settings))
    assert whole.num_shards >= 4
    written = interrupt_after(monkeypatch, 2)
    parts = job("parts", shard_megabytes=0.003, **settings)
    with pytest.raises(KeyboardInterrupt):
        run(parts)
    assert not (tmp_path / "parts" / "manifest.json").exists()
    (tmp_path / "parts" / ".shard-00002.safetensors.0badf00d").write_bytes(b"half of one")
    run(parts)
    assert written == [f"shard-{number:05d}.safetensors" for number in range(whole.num_shards)]
    assert shard_files(tmp_path / "parts") == shard_files(tmp_path / "whole")
    (tmp_path / "parts" / "shard-00001.safetensors").unlink()  # as the complaint of a damaged one asks for
    run(parts)
    assert shard_files(tmp_path / "parts") == shard_files(tmp_path / "whole")


def test_a_shard_costs_the_same_calls_however_many_there_are(byte_target, tmp_path, monkeypatch):
    def calls(count):
        rows = random_conversations([(2, 2)] * count, 258, seed=5)
        job = cache_job(
            byte_target, write_rows(tmp_path / f"{count}.jsonl", rows), rows, tmp_path / str(count), shard_megabytes=1e-6
        )
        job.prepare()
        assert len(job._plan) == count
        found = Counter()
        with monkeypatch.context() as patch:
            for name in ("names", "has", "read", "write", "create", "delete"):
                plain = getattr(Folder, name)
                patch.setattr(Folder, name, lambda *args, name=name, plain=plain: found.update([name]) or plain(*args))
            job.work(rank=0, num_processes=1)
        return found

    few, many = calls(20), calls(60)
    assert many["names"] == few["names"] < 6
    assert {name: many[name] - few[name] for name in ("has", "write", "create", "delete")} == dict.fromkeys(
        ("has", "write", "create", "delete"), 40
    )


def test_the_next_shard_is_computed_while_one_is_written_and_a_write_that_fails_ends_the_run(job, monkeypatch, tmp_path):
    made, computed, write_shard, compute = [], [], CacheJob._write_shard, CacheJob._shard_tensors
    second = threading.Event()

    def tensors(self, number):
        computed.append(len(made))
        if len(computed) == 2:
            second.set()
        return compute(self, number)

    def write(self, claims, number, *shard):
        if not made:
            assert second.wait(30)  # which comes while this one is under way
        if len(made) == 2:
            raise InputError("the disk is full")
        write_shard(self, claims, number, *shard)
        made.append(number)

    monkeypatch.setattr(CacheJob, "_shard_tensors", tensors)
    monkeypatch.setattr(CacheJob, "_write_shard", write)
    own = job("overlap", shard_megabytes=0.003)
    own.prepare()
    with pytest.raises(InputError, match="the disk is full"):
        own.work(rank=0, num_processes=1)
    assert computed[:2] == [0, 0]
    assert own.finished() == set(made) == {0, 1}
    monkeypatch.undo()
    run(own)
    run(job("alone", shard_megabytes=0.003))
    assert shard_files(tmp_path / "overlap") == shard_files(tmp_path / "alone")


@pytest.mark.parametrize(
    ("wanted", "other"),
    [
        ({"kind": "top_k", "k": 3}, {"kind": "last_hidden"}),
        ({"kind": "top_k", "k": 3}, {"max_length": 30}),
        ({"taps": [0, 2]}, {"taps": [1, 2]}),
    ],
)
def test_shards_of_another_job_are_not_taken_for_ones_own(job, tmp_path, wanted, other):
    run(job(**wanted | other))
    run(job(**wanted))
    run(job("fresh", **wanted))
    assert shard_files(tmp_path / "cache") == shard_files(tmp_path / "fresh")


def test_two_processes_write_what_one_writes_and_show_what_both_have_done(job, tmp_path, caplog):
    run(job("one", shard_megabytes=0.003))
    shared = job("two", shard_megabytes=0.003)
    shared.prepare()
    with pytest.raises(RuntimeError, match="the first is 0"):
        shared.finish()
    caplog.set_level(logging.INFO)
    workers = [threading.Thread(target=shared.work, kwargs={"rank": rank, "num_processes": 2}) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    shared.finish()
    assert f"target cache: {sum(shared._lengths)} tokens" in [message.partition(" in ")[0] for message in caplog.messages]
    assert shard_files(tmp_path / "two") == shard_files(tmp_path / "one")


def test_a_shard_of_a_cache_that_was_made_of_other_settings_is_not_read(job, data_file, byte_target, conversations, tmp_path):
    run(job("one", chunk_size=2))
    run(job("other", chunk_size=3))
    name = SHARD.format(number=0)
    (tmp_path / "one" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(InputError, match=r"shard-00000\.safetensors is damaged, .* it is of another cache; delete it"):
        open_cache(tmp_path / "one", data_file, byte_target).signal(batch_of(conversations, [0]))


def test_a_disk_without_room_is_refused_before_anything_is_written(job, tmp_path, monkeypatch):
    usage = namedtuple("usage", ["free"])
    made = job(dtype="float32")
    needed = sum(len(row.answer_ids) for row in made.conversations) * 32 * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed - 1))
    with pytest.raises(InputError, match=r"needs 0\.0 MB more, and its disk has 0\.0 MB free; .*fewer taps"):
        made.prepare()
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed))
    made.prepare()


def test_hidden_states_too_large_for_their_type_are_refused(byte_target):
    layout = RowLayout(kind="last_hidden", dtype="float16", width=32, vocab_size=VOCABULARY)
    with pytest.raises(InputError, match="hidden is not finite in float16; try bfloat16"):
        encode(byte_target, layout, torch.full((1, 32), 1e5), 1)


def test_what_a_killed_run_leaves_behind_is_no_obstacle_and_anything_else_is(job, tmp_path):
    run(job())
    for name in (".manifest.json.0badf00d", ".run.json.0badf00d", ".shard-00000.json.0badf00d"):
        (tmp_path / "cache" / name).write_text("{")
    check_folder(Folder(tmp_path / "cache"))
    run(job())
    assert [path.name for path in (tmp_path / "cache").glob(".*")] == []
    (tmp_path / "cache" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"holds thesis\.tex, which is no part of a target cache"):
        check_folder(Folder(tmp_path / "cache"))


# --- damage and refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [(flip_a_bit, "is damaged, .* its rows .* delete it and run scripts/make_"), (lambda path: path.unlink(), "is missing")],
    ids=["bit flipped", "missing"],
)
def test_a_damaged_shard_is_found_when_it_is_needed_and_named(cache, conversations, damage, complaint):
    last = int((cache.places.shard_C == 1).nonzero().max())
    cache.signal(batch_of(conversations, [last]))
    damage(cache.folder.path / "shard-00001.safetensors")
    cache.signal(batch_of(conversations, [0]))
    with pytest.raises(InputError, match=rf"shard-00001\.safetensors {complaint}"):
        cache.signal(batch_of(conversations, [0, last]))


def change_manifest(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_cache_of_another_target_is_refused_with_what_differs(cache, data_file, byte_target):
    other = dataclasses.replace(byte_target.identity, weights_sha256="f" * 64, tokenizer_sha256="f" * 64)
    with pytest.raises(InputError, match=r"differs from target .* in target weights and tokenizer;"):
        open_cache(cache.folder.path, data_file, dataclasses.replace(byte_target, identity=other))


def test_a_cache_of_other_data_is_refused(cache, data_file, byte_target):
    data_file.write_text(data_file.read_text() + "\n")
    with pytest.raises(InputError, match="is not that file"):
        open_cache(cache.folder.path, data_file, byte_target)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda content: content.update(format_version=1), "format_version must be 2, got 1"),
        (lambda content: content["index"][0].update(file="../index-00000.safetensors"), r"index\.0\.file"),
        (lambda content: content["index"][0].update(file="index-00001.safetensors"), "index-00001.safetensors is missing"),
        (lambda content: content["index"][0].update(sha256="0" * 64), "index-00000.safetensors is damaged"),
        (lambda content: content.pop("data_sha256"), "data_sha256"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(cache, data_file, byte_target, change, complaint):
    change_manifest(cache.folder.path, change)
    with pytest.raises(InputError, match=complaint):
        open_cache(cache.folder.path, data_file, byte_target)


def test_an_unfinished_cache_is_none(cache, data_file, byte_target):
    (cache.folder.path / "manifest.json").unlink()
    with pytest.raises(InputError, match="making it was cut off"):
        open_cache(cache.folder.path, data_file, byte_target)


@pytest.mark.parametrize(("taps", "recipe"), [(None, DistillConfig), ([0], HeadsConfig)])
def test_conversations_longer_than_the_caches_are_refused(job, tmp_path, data_file, conversations, byte_target, taps, recipe):
    run(job(max_length=20, taps=taps))
    cache = open_cache(tmp_path / "cache", data_file, byte_target)
    check_fits(cache, ConversationDataset(conversations, 20), recipe(data={"max_length": 20}))
    with pytest.raises(ConfigError, match=r"data\.max_length: expected at most 20, .* got 21"):
        check_fits(cache, ConversationDataset(conversations, 21), recipe(data={"max_length": 21}))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"loss": {"temperature": 2.0}}, r"loss\.temperature: expected 1"),
        ({"student": {"draft_vocab_size": 100}}, r"student\.draft_vocab_size and draft_vocab_by: expected null"),
    ],
)
def test_a_top_k_cache_is_refused_where_it_cannot_answer_and_hidden_states_are_not(
    job, tmp_path, data_file, conversations, byte_target, settings, complaint
):
    dataset, config = ConversationDataset(conversations, 512), DistillConfig(**settings)
    run(job("hidden"))
    check_fits(open_cache(tmp_path / "hidden", data_file, byte_target), dataset, config)
    run(job("top", kind="top_k", k=4))
    with pytest.raises(ConfigError, match=complaint):
        check_fits(open_cache(tmp_path / "top", data_file, byte_target), dataset, config)


def test_a_conversation_without_an_answer_in_reach_takes_no_rows(job, tmp_path, conversations):
    lengths = read_places(Folder(tmp_path / "cache"), run(job(max_length=6))).length_C.tolist()
    assert lengths == [max(0, min(len(row.answer_ids), 6 - len(row.prompt_ids))) for row in conversations]
    assert 0 in lengths
