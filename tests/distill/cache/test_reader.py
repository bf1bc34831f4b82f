"""A cache says what the target says, and is refused wherever it does not belong."""

import dataclasses
import json
import math

import pytest
import torch
from torch.nn import functional as F

from configs.runtime.errors import ConfigError, InputError
from configs.schema.training import DistillConfig, HeadsConfig, LossConfig
from distill.cache.format import RowLayout, pack_ids, read_places, unpack_ids
from distill.cache.reader import check_fits, open_cache
from distill.cache.rows import encode
from distill.cache.storage import Folder
from distill.dataset.batches import ConversationDataset
from distill.loss.draft_objective import DraftObjective
from tests.support.caches import batch_of, flip_a_bit, run
from tests.support.losses import target_hidden


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
    layout = RowLayout(kind="top_k", dtype="float32", width=2, vocab_size=byte_target.vocab_size)
    found = encode(byte_target, layout, hidden, 1)
    log_p = F.linear(hidden, head.weight.detach()).double().log_softmax(-1)[0]
    exact = log_p.sort(descending=True).values[2:].logsumexp(-1)
    assert float(exact) < math.log(1e-7)
    assert float(found["log_tail"][0]) == pytest.approx(float(exact), rel=1e-4)


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
        ({"student": {"draft_vocab_size": 100}}, r"student\.draft_vocab_size: expected null"),
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
