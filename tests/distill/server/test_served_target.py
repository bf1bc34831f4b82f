"""A real engine: vLLM serves the embedded target, and the cache made from what it says is as right as the local one.

Slow: `make serve-check` installs the engine into an environment of its own and runs this. Both sides compute in bfloat16, in
another order. What either may be off by is therefore measured, against a cache of the same target in float32.
"""

import json
from typing import NamedTuple

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.data import CacheConfig, ServerConfig
from configs.schema.learning import LossConfig, StudentConfig
from configs.schema.target import TargetConfig
from distill.cache.reader import open_cache
from distill.cache.writer import make_cache
from distill.dataset.batches import ConversationDataset, collate
from distill.dataset.conversations import Conversation, read_conversations
from distill.loss.draft_objective import DraftObjective
from distill.student.init import initial_draft
from heads.frozen.loading import load_target
from tests.support.vllm_engine import vllm_serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

K = 32
QUESTIONS = [
    "List three fruits and their colours.",
    "Write a Python function that reverses a list.",
    "Why is the sky blue?",
    "Translate 'good morning' into French and Spanish.",
    "A train covers 120 km in 90 minutes. What is its speed in km/h?",
]


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(device="cpu"))


@pytest.fixture(scope="module")
def data_file(target, tmp_path_factory):
    """Conversations that the target wrote, with the manifest beside them."""
    folder = tmp_path_factory.mktemp("data")
    rows = []
    for number, question in enumerate(QUESTIONS):
        messages = ({"role": "user", "content": question},)
        prompt = target.encode_chat(messages)
        ids = torch.tensor([prompt])
        written = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64)
        answer = tuple(written[0, len(prompt) :].tolist())
        rows.append(
            Conversation(
                prompt_id=f"q{number}",
                category="test",
                turn=0,
                messages=(*messages, {"role": "assistant", "content": target.tokenizer.decode(answer)}),
                prompt_ids=tuple(prompt),
                answer_ids=answer,
                ended=answer[-1] in target.eos_token_ids,
            )
        )
    (folder / "train.jsonl").write_text("".join(row.to_line() for row in rows))
    manifest = {"format_version": 1, "target": target.identity.to_dict()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "train.jsonl"


@pytest.fixture(scope="module")
def engine(target, tmp_path_factory):
    """The address of vLLM at work on the target, with so many log-probabilities allowed."""
    flags = ("--max-logprobs", K)
    with vllm_serving(target, tmp_path_factory.mktemp("engine"), dtype="bfloat16", flags=flags) as url:
        yield url


@pytest.fixture(scope="module")
def caches(engine, target, data_file, tmp_path_factory):
    """Three caches of the same conversations: the server's, the local target's, and that in float32."""
    folder = tmp_path_factory.mktemp("caches")
    server = ServerConfig(url=engine, model="smollm2", concurrency=4)
    found = {}
    for name, dtype, asked in (("served", "bfloat16", server), ("local", "bfloat16", None), ("exact", "float32", None)):
        config = CacheConfig(
            target=TargetConfig(dtype=dtype, device="cpu"),
            data=str(data_file),
            kind="top_k",
            k=K,
            server=asked,
            output=str(folder / name),
        )
        make_cache(config)
        found[name] = open_cache(folder / name, data_file, target)
    return found


def rows_of(cache):
    lengths = cache.places.length_C.tolist()
    return cache.rows(range(len(lengths)), lengths)


class Agreement(NamedTuple):
    """How two caches of the same rows agree."""

    shared_ids: float  # of the tokens that the first keeps, the share that the second keeps too
    equal_top1: float  # share of rows with the same likeliest token
    gap: float  # mean |difference| of shared tokens' log-probabilities in nats, each weighed by its probability


def compare(one, other):
    """Return how two caches agree."""
    same_NKK = one["token_ids"].unsqueeze(2) == other["token_ids"].unsqueeze(1)
    gap_NKK = (one["log_probs"].unsqueeze(2).double() - other["log_probs"].unsqueeze(1).double()).abs()
    weight_NKK = one["log_probs"].double().exp().unsqueeze(2) * same_NKK
    return Agreement(
        shared_ids=float(same_NKK.any(2).double().mean()),
        equal_top1=float((one["token_ids"][:, 0] == other["token_ids"][:, 0]).double().mean()),
        gap=float((gap_NKK * weight_NKK).sum() / weight_NKK.sum()),
    )


def test_the_servers_rows_are_as_near_to_the_exact_ones_as_the_local_targets(caches):
    served, local, exact = (rows_of(caches[name]) for name in ("served", "local", "exact"))
    found, expected = compare(exact, served), compare(exact, local)
    print(f"\nagainst float32 (shared ids, equal top-1, gap in nats): the server's {found}, the local target's {expected}")
    assert found.shared_ids > expected.shared_ids - 0.02 > 0.9
    assert found.equal_top1 > expected.equal_top1 - 0.02 > 0.9
    assert found.gap < 1.5 * expected.gap
    torch.testing.assert_close(served["log_tail"].double().exp(), local["log_tail"].double().exp(), rtol=0, atol=0.03)


def test_a_step_of_training_is_the_one_from_the_local_cache(caches, target, data_file):
    batch = collate(list(ConversationDataset(read_conversations(data_file), 512))[:4])
    num_labels = batch.loss_mask_BT.sum()
    losses = {}
    for name in ("served", "local"):
        draft = initial_draft(StudentConfig(layers=[0, 29]), target)
        objective = DraftObjective(draft, target, LossConfig())
        optimizer = torch.optim.AdamW([weight for weight in draft.parameters() if weight.requires_grad], lr=1e-4)
        losses[name] = []
        for _ in range(2):
            loss = objective(batch, caches[name].signal(batch), num_labels, 1).loss
            losses[name].append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses["served"][1] < losses["served"][0]
    assert losses["served"] == pytest.approx(losses["local"], rel=0.01)


def test_more_log_probabilities_than_the_engine_allows_are_refused_with_its_flag(engine, data_file, tmp_path):
    config = CacheConfig(
        target=TargetConfig(device="cpu"),
        data=str(data_file),
        kind="top_k",
        k=K + 1,
        server=ServerConfig(url=engine, model="smollm2"),
        output=str(tmp_path / "cache"),
    )
    with pytest.raises(InputError, match=f"greater than max allowed: {K}.*--max-logprobs {K + 1}, or lower k"):
        make_cache(config)
