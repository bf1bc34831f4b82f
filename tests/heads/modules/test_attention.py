"""Attention over ranges is attention under a dense mask, values and gradients, and holds nothing of all pairs' size."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxOutput, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from configs.schema.heads import LayerSettings
from heads.families.registry import FAMILIES
from heads.modules.attention import BLOCK, Ranges, causal_ranges, read_by_flex, read_ranges
from heads.modules.layers import layer_shape
from heads.proposers.protocol import RoundInputs
from heads.sampling.draws import CounterRNG
from heads.sampling.token_tree import Tree
from tests.support import family_checks as checks

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def flex_attention_has_gradients(monkeypatch):
    """Its dense reference has them on CPUs too, and is refused there."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def positions(*rows):
    """Position ids of rows of documents with these lengths."""
    return torch.tensor([[place for length in row for place in range(length)] for row in rows])


def inputs(B, N, M, X, T, dtype=torch.float64, H=6):
    torch.manual_seed(0)
    return [torch.randn(B, heads, length, H).to(dtype).requires_grad_() for heads, length in ((N, X), (M, T), (M, T))]


def dense(q, k, v, visible_BXT):
    """Mixed values and logarithms of sums in float64, each key of its own head written out."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1).double() for each in (k, v))
    scores = (q.double() @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible_BXT.unsqueeze(1), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def seen(ranges, T):
    places_T = torch.arange(T)
    return (places_T >= ranges.first_BX.unsqueeze(-1)) & (places_T < ranges.end_BX.unsqueeze(-1))


# `flex_attention` uncompiled is torch's own dense reference, gradients included: it reads the mask by pairs, not by blocks.
READS = {"parts": read_ranges, "flex": partial(read_by_flex, flex_attention)}
BOTH = pytest.mark.parametrize("read", READS.values(), ids=READS)
IN_PARTS_AND_AT_ONCE = pytest.mark.parametrize(("name", "at_once"), [("parts", 1), ("parts", 2**26), ("flex", None)])
RAGGED = [((37,), (37,)), ((5, 20, 1, 11), (30, 7)), ((16,), (1,) * 16), ((1,),)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("rows", [*RAGGED, None], ids=["one document", "packed", "of one token", "one token", "any ranges"])
@IN_PARTS_AND_AT_ONCE
def test_values_sums_and_gradients_are_those_of_a_dense_mask(name, heads, kv_heads, rows, at_once, monkeypatch):
    monkeypatch.setattr("heads.modules.attention.AT_ONCE_IN_CACHE", at_once)
    if rows is None:  # queries in any order
        torch.manual_seed(1)
        B, X, T = 2, 45, 33
        first_BX = torch.randint(0, T, (B, X))
        ranges = Ranges(first_BX=first_BX, end_BX=(first_BX + torch.randint(1, T, (B, X))).clamp(max=T))
        visible_BXT = seen(ranges, T)
    else:
        position_ids_BT = positions(*rows)
        (B, T), ranges = position_ids_BT.shape, causal_ranges(position_ids_BT)
        X, document_ids_BT = T, (position_ids_BT == 0).cumsum(1)
        visible_BXT = (document_ids_BT.unsqueeze(1) == document_ids_BT.unsqueeze(2)) & torch.ones(T, T).tril().bool()
    parts = inputs(B, heads, kv_heads, X, T)
    found, expected = READS[name](*parts, ranges), dense(*parts, visible_BXT)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    ahead = [torch.randn_like(each) for each in expected]  # the sums have gradients of their own
    gradients = [torch.autograd.grad(each, parts, ahead) for each in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_narrower_dtypes_differ_by_their_rounding(dtype, tolerance, monkeypatch):
    monkeypatch.setattr("heads.modules.attention.AT_ONCE_IN_CACHE", 1)
    parts, ranges = inputs(2, 4, 2, 64, 64, dtype, H=16), causal_ranges(positions((40, 24), (64,)))
    (mixed, log_sums), expected = read_ranges(*parts, ranges), dense(*parts, seen(ranges, 64))
    assert (mixed.dtype, log_sums.dtype) == (dtype, torch.float32)
    torch.testing.assert_close((mixed.double(), log_sums.double()), expected, atol=tolerance, rtol=tolerance)
    found, wanted = (
        torch.autograd.grad([each.square().sum() for each in pair], parts) for pair in ((mixed, log_sums), expected)
    )
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() < tolerance * other.norm()


@BOTH
def test_a_query_without_any_position_gives_nothing_to_a_sum_it_has_no_share_in(read):
    parts = inputs(1, 2, 1, 3, 5)
    ranges = Ranges(first_BX=torch.tensor([[0, 2, 4]]), end_BX=torch.tensor([[3, 2, 4]]))
    mixed, log_sums = read(*parts, ranges)
    weights = torch.stack([log_sums, torch.zeros_like(log_sums)]).softmax(0)[0]
    assert weights[0, :, 1:].tolist() == [[0, 0], [0, 0]]
    gradients = torch.autograd.grad((weights.unsqueeze(-1) * mixed).sum(), parts)
    assert gradients[0][:, :, 1:].eq(0).all()
    assert gradients[1][:, :, 3:].eq(0).all()
    assert all(bool(each.isfinite().all()) for each in gradients)


def test_flex_attention_reads_the_blocks_that_hold_something_and_masks_those_that_hold_all():
    torch.manual_seed(0)
    first_BX = torch.randint(0, 900, (3, 3 * BLOCK + 5)).sort(1).values
    drawn = Ranges(first_BX=first_BX, end_BX=first_BX + torch.randint(0, 400, first_BX.shape))
    edges_BX = torch.tensor([-1, 0, 1]).repeat_interleave(BLOCK).repeat(3).unsqueeze(0)  # of ranges that end at a block's end
    at_edges = Ranges(first_BX=BLOCK + edges_BX, end_BX=3 * BLOCK + edges_BX.sort(1).values)
    packed = causal_ranges(positions((500, 12), (256, 256)))
    for ranges, T in ((drawn, 1300), (at_edges, 4 * BLOCK), (packed, 512)):
        mask, (B, X) = ranges.block_mask(T), ranges.first_BX.shape
        visible_BXT = torch.zeros(B, -(-X // BLOCK) * BLOCK, -(-T // BLOCK) * BLOCK, dtype=torch.bool)
        visible_BXT[:, :X, :T] = seen(ranges, T)
        blocks_BPSBB = visible_BXT.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).transpose(2, 3)
        listed = {"some": (mask.kv_num_blocks, mask.kv_indices), "all": (mask.full_kv_num_blocks, mask.full_kv_indices)}
        read = {name: torch.zeros_like(blocks_BPSBB[..., 0, 0]) for name in listed}
        for name, (counts_B1P, indices_B1PS) in listed.items():
            for place in torch.cartesian_prod(*map(torch.arange, counts_B1P[:, 0].shape)).tolist():
                read[name][(*place, indices_B1PS[:, 0][*place, : counts_B1P[:, 0][*place]].long())] = True
        assert not (read["some"] & read["all"]).any()
        inside_BPS = (blocks_BPSBB | ~(torch.arange(len(blocks_BPSBB[0]) * BLOCK) < X).view(1, -1, 1, BLOCK, 1)).all((3, 4))
        assert torch.equal(read["all"], read["all"] & inside_BPS)
        assert torch.equal(blocks_BPSBB.any((3, 4)), blocks_BPSBB.any((3, 4)) & (read["some"] | read["all"]))
    assert read["all"].any()


@pytest.mark.slow
def test_compiled_flex_attention_is_attention_under_a_dense_mask():
    ranges = causal_ranges(positions((300, 212), (512,)))
    parts = [each.detach().float() for each in inputs(2, 4, 2, 512, 512, H=16)]
    compiled = torch.compile(flex_attention)

    def flex(*args, return_aux, **settings):  # torch compiles for CPUs neither the sums nor a backward
        return compiled(*args, **settings), AuxOutput(lse=torch.zeros(()))

    mixed, _ = read_by_flex(flex, *parts, ranges)
    torch.testing.assert_close(mixed.double(), dense(*parts, seen(ranges, 512))[0], atol=1e-5, rtol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation inside has returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [
            each.untyped_storage().nbytes() // each.element_size() for each in tree_leaves(result) if torch.is_tensor(each)
        ]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("name", ["hydra, prefix", "eagle3", "peagle", "dflash"])
def test_the_largest_tensor_of_a_heads_training_grows_no_faster_than_the_length(name, monkeypatch):
    monkeypatch.setattr("heads.modules.attention.AT_ONCE_IN_CACHE", 1)
    model = checks.tiny_target("llama")
    head = checks.build(checks.SETTINGS[name], model).train()

    def largest(T):
        batch, states = checks.inputs_of(model, [[n % checks.VOCAB_SIZE for n in range(T)]], head.taps)
        with LargestTensor() as mode:
            sum(depth.hidden_ND.sum() for depth in head(batch, states)).backward()
        return mode.elements

    sizes = [largest(T) for T in (256, 512, 1024)]
    assert sizes[1] <= 2.1 * sizes[0]
    assert sizes[2] <= 2.1 * sizes[1]
    assert sizes[2] < model.config.num_attention_heads * 1024**2 / 8


# --- layers of a head's own sizes, and their windows -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (LayerSettings(num_heads=3, num_key_value_heads=3), "3 heads and 3 key-value heads at width 32"),
        (LayerSettings(num_key_value_heads=3), "4 heads and 3 key-value heads"),
        (LayerSettings(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rotary embeddings of type dynamic"),
    ],
)
def test_layers_that_cannot_be_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        layer_shape(checks.tiny_target("llama"), settings)


@torch.no_grad()
def test_tokens_read_as_many_keys_as_their_window_has_however_long_the_text_is(monkeypatch):
    model = checks.tiny_target("llama")
    head = checks.build(checks.SETTINGS["eagle3, window"], model)  # of 4
    proposer = FAMILIES["eagle3"].propose(head, model.device)
    tokens = [list(range(30)), list(range(28))]
    checks.Rounds(proposer, model).start(tokens)
    read, attend = [], functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda q, k, *rest, **how: read.append(k.shape[2]) or attend(q, k, *rest, **how),
    )
    inputs = RoundInputs.of(tokens, CounterRNG(0, [0, 0], model.device))
    proposer.propose(inputs, 4, SamplingConfig(), keep_logits=False)
    assert max(read[-2 * 3 :]) <= 6  # of rows that are two positions apart
    read.clear()
    proposer.propose_tree(inputs, Tree((0, 0, 1, 2)), None)
    assert max(read[-2:]) <= 8  # those of a tree read all of it
