"""The loss of conversations that share rows, and all its gradients: packed, they are those of a row each; several answers in
a row, those of as many rows, each a prompt and its answer."""

import pytest
import torch
from pydantic import TypeAdapter

from configs.schema.heads import HeadConfig
from configs.schema.training import LossConfig
from distill.dataset.batches import Example, collate, collate_packed
from distill.loss.objectives import DraftObjective, HeadObjective
from heads.frozen.hidden_states import read_states
from tests.support import family_checks as checks
from tests.support.losses import target_hidden
from tests.support.tiny_heads import HEADS

# Each family once on full attention and, where its own attention might care, on a target with a sliding window of 5.
SETTINGS = HEADS | {
    "hydra++": HEADS["hydra"] | {"prefix_attention": True},
    "dspark": HEADS["dflash"] | {"kind": "dspark", "markov_rank": 4},
    "dflash2": HEADS["dflash"] | {"kind": "dflash2", "selector_rank": 4},
    "domino": HEADS["dflash"] | {"kind": "domino", "gru_hidden_dim": 6, "emb_dim": 4},
    "xpress": HEADS["dflash"] | {"kind": "xpress", "xpress_rank": 4},
}
CASES = [(name, "llama") for name in SETTINGS] + [("mtp", "gemma3"), ("eagle3", "gemma3"), ("dflash", "gemma3")]
ROWS = [[0, 3, 1], [4, 2], [5]]


@pytest.fixture(autouse=True)
def float64_throughout(monkeypatch):
    """Norms, rotations and softmaxes are in float32 whatever the model is in; a last bit of the sums before them, whose order
    packing changes, may then turn one of theirs. Here they are in float64, so that what is left is the distribution.
    """
    plain = torch.Tensor.to
    wider = {torch.float32: torch.float64}

    def to(tensor, *args, **settings):
        args = [wider.get(each, each) if isinstance(each, torch.dtype) else each for each in args]
        return plain(tensor, *args, **{name: wider.get(each, each) for name, each in settings.items()})

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def examples():
    """Six conversations of 3 to 16 tokens, one of which has a single label."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(9, 3), (3, 2), (16, 4), (6, 1), (12, 6), (5, 2)]
    return [
        Example(tuple(torch.randint(1, checks.VOCAB_SIZE, (length,), generator=generator).tolist()), start, number)
        for number, (length, start) in enumerate(lengths)
    ]


def both_ways():
    alone = examples()
    return collate(alone), collate_packed([[alone[number] for number in row] for row in ROWS])


def shared_or_not(shared):
    """A chat of three answers, two tokens of the user's before the later ones, and another: in two rows, in one, or in four."""
    ids, other = (
        tuple(torch.randint(1, checks.VOCAB_SIZE, (26,), generator=torch.Generator().manual_seed(1)).tolist()),
        examples()[4],
    )
    spans = (4, 9), (11, 16), (18, 26)
    chat = Example(ids, 18, 0, None, spans[:2])
    if shared == "each":
        return collate([*(Example(ids[:end], start, number) for number, (start, end) in enumerate(spans)), other])
    return collate_packed([[chat, other]]) if shared == "packed" else collate([chat, other])


def loss_and_gradients(module, loss):
    module.zero_grad()
    loss.backward()
    gradients = {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}
    return loss.detach(), gradients


def assert_same(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found[0], expected[0], atol=tolerance, rtol=tolerance)
    assert found[1].keys() == expected[1].keys()
    assert any(bool(gradient.any()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: name + text
        )


def head_result(objective, model, batch):
    states = read_states(model, batch.input_ids_BT, objective.head.taps, batch.packed_positions_BT)
    return objective(batch, states)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_head_learns_the_same_from_shared_rows(as_target, name, family):
    target = as_target(checks.tiny_target(family))
    head = checks.build(TypeAdapter(HeadConfig).validate_python(SETTINGS[name]), target.model)
    objective = HeadObjective(head, target, LossConfig(divergence={"forward_kl": 1.0, "cross_entropy": 0.5}))
    for alone, *shared in (both_ways(), map(shared_or_not, ("each", "unpacked", "packed"))):
        expected = head_result(objective, target.model, alone)
        plain = loss_and_gradients(objective, expected.loss)
        for found in (head_result(objective, target.model, batch) for batch in shared):
            for field in ("labels_K", "origins_K", "reached_K", "joint_agrees_K"):
                assert torch.equal(getattr(expected, field), getattr(found, field))
            assert_same(loss_and_gradients(objective, found.loss), plain)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_a_draft_learns_the_same_from_shared_rows(as_target, family):
    target = as_target(checks.tiny_target(family))
    torch.manual_seed(1)
    draft = type(target.model)(target.model.config).double()
    objective = DraftObjective(draft, target, LossConfig(divergence={"forward_kl": 1.0, "cross_entropy": 0.5}, chunk_size=7))
    for batches in (both_ways(), map(shared_or_not, ("each", "unpacked", "packed"))):
        alone, *shared = (
            loss_and_gradients(objective, objective(batch, target_hidden(target, batch)).loss) for batch in batches
        )
        for found in shared:
            assert_same(found, alone)
