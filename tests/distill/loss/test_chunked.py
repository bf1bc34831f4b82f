"""The chunked loss against the same loss in one piece: values, every gradient, what it skips and what it allocates."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM

from configs.schema.training import LossConfig
from distill.loss import chunked
from distill.loss.chunked import compare
from distill.loss.divergences import DIVERGENCES, configured_divergence, cross_entropy, forward_kl
from distill.loss.logit_head import LogitHead, model_head
from distill.loss.pairs import DenseChunk
from heads.inference.causal_lm import head_logits
from tests.support.losses import dense_loss, dense_pair, linear_head, random_logits

ROWS, DRAFT_WIDTH, TARGET_WIDTH, VOCABULARY = 7, 6, 10, 23
IDS_W = torch.tensor([11, 0, 22, 3, 5, 17, 8])
DRAFT_LABELS = torch.tensor([1, 0, 2, -1, 3, 4, -1])  # positions of the labels of `Inputs` in IDS_W; 9 is not in it
MIX = LossConfig(mix={"jsd": 0.3, "total_variation": 2.0, "cross_entropy": 0.1}, settings={"jsd": {"beta": 0.9}})
LOSSES = {**DIVERGENCES, "mix": configured_divergence(MIX)}


class Inputs:
    """Random hidden states, heads, weights and labels of one loss; two of the seven rows weigh nothing."""

    def __init__(self, dtype=torch.float64, *, num_drafted=VOCABULARY):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.draft_hidden_ND = draw(ROWS, DRAFT_WIDTH).requires_grad_()
        self.draft_weight_WD = draw(num_drafted, DRAFT_WIDTH).requires_grad_()
        self.draft_bias_W = draw(num_drafted).requires_grad_()
        self.target_hidden_NE = draw(ROWS, TARGET_WIDTH)
        self.target_weight_VE = draw(VOCABULARY, TARGET_WIDTH)
        self.weights_N = draw(ROWS).abs()
        self.weights_N[[1, 4]] = 0
        self.labels_N = torch.tensor([0, 11, 22, -100, 3, 5, 9])

    @property
    def trained(self):
        return self.draft_hidden_ND, self.draft_weight_WD, self.draft_bias_W

    @property
    def target(self):
        return self.target_hidden_NE, linear_head(self.target_weight_VE)

    def chunked(self, divergence, chunk_size, **options):
        head = options.pop("head", linear_head(self.draft_weight_WD, self.draft_bias_W))
        options = {"chunk_size": chunk_size, "labels_N": self.labels_N} | options
        return dense_loss(self.draft_hidden_ND, head, *self.target, divergence, self.weights_N, **options)

    def unchunked(self, divergence, labels=None, **options):
        """Return the loss and the values, from whole logits and ordinary autograd."""
        target_logits, labels = (
            F.linear(self.target_hidden_NE, self.target_weight_VE),
            self.labels_N if labels is None else labels,
        )
        values = divergence(dense_pair(target_logits, F.linear(*self.trained), labels=labels, **options))
        return (values * self.weights_N).sum(), values


def gradients(loss, inputs):
    return torch.autograd.grad(3.0 * loss, inputs)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "reduced"),
    [(torch.float64, 1e-12, False), (torch.float32, 1e-5, False), (torch.float64, 1e-12, True)],
)
def test_value_and_gradients_are_those_of_the_unchunked_loss(name, chunk_size, dtype, tolerance, reduced):
    inputs, divergence = Inputs(dtype, num_drafted=len(IDS_W) if reduced else VOCABULARY), LOSSES[name]
    options = {"temperature": 1.7, "draft_token_ids_W": IDS_W if reduced else None}
    expected, expected_values = inputs.unchunked(divergence, labels=DRAFT_LABELS if reduced else None, **options)
    expected_gradients = gradients(expected, inputs.trained)
    found = inputs.chunked(divergence, chunk_size, **options)
    torch.testing.assert_close(found.loss, expected, rtol=tolerance, atol=0)
    weighed = inputs.weights_N != 0
    torch.testing.assert_close(found.values_N[weighed], expected_values[weighed].detach(), rtol=tolerance, atol=tolerance)
    assert not any(tensor.requires_grad for tensor in found[1:])
    for keep in (True, False):  # a second backward through a kept graph gives the same
        found_gradients = torch.autograd.grad(3.0 * found.loss, inputs.trained, retain_graph=keep)
        for ours, theirs in zip(found_gradients, expected_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@pytest.mark.parametrize("num_drafted", [VOCABULARY, len(IDS_W)])
def test_acceptance_and_top1_agreement_are_those_at_temperature_one(num_drafted):
    inputs = Inputs(num_drafted=num_drafted)
    inputs.weights_N[:] = 1
    ids_W = None if num_drafted == VOCABULARY else IDS_W
    found = inputs.chunked(forward_kl, 2, temperature=4.0, draft_token_ids_W=ids_W)
    ids = torch.arange(VOCABULARY) if ids_W is None else ids_W
    q_NV = torch.zeros(ROWS, VOCABULARY, dtype=torch.float64)
    q_NV[:, ids] = F.linear(*inputs.trained).softmax(-1).detach()
    p_NV = F.linear(inputs.target_hidden_NE, inputs.target_weight_VE).softmax(-1)
    torch.testing.assert_close(found.acceptance_N, torch.minimum(p_NV, q_NV).sum(-1))
    assert torch.equal(found.top1_agrees_N, p_NV.argmax(-1) == q_NV.argmax(-1))


# --- heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [(0,), (1, 2)], ids=["a frozen head", "a frozen trunk"])
def test_frozen_parts_get_no_gradient_and_the_others_the_same_one(trained):
    inputs = Inputs()
    expected = gradients(inputs.unchunked(forward_kl)[0], inputs.trained)
    for number, tensor in enumerate(inputs.trained):
        tensor.requires_grad_(number in trained)
    (3 * inputs.chunked(forward_kl, 2).loss).backward()
    for number, (tensor, gradient) in enumerate(zip(inputs.trained, expected, strict=True)):
        assert (tensor.grad is None) == (number not in trained)
        if number in trained:
            torch.testing.assert_close(tensor.grad, gradient)


def test_a_soft_capped_head_is_trained_through_its_cap(tiny_llama):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    capped = Gemma2ForCausalLM(
        Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=0.5)
    ).double()
    target, weight_VD = tiny_llama(), capped.lm_head.weight
    hidden_ND = torch.randn(ROWS, 32, dtype=torch.float64, requires_grad=True)
    pair = dense_pair(head_logits(target, hidden_ND), head_logits(capped, hidden_ND))
    expected = torch.autograd.grad(forward_kl(pair).sum(), (hidden_ND, weight_VD))
    found = dense_loss(
        hidden_ND, model_head(capped), hidden_ND.detach(), model_head(target), forward_kl, torch.ones(ROWS), chunk_size=2
    )
    torch.testing.assert_close(torch.autograd.grad(found.loss, (hidden_ND, weight_VD)), expected, rtol=1e-12, atol=1e-14)


# --- precision ----------------------------------------------------------------------------------------------------


def test_under_bfloat16_autocast_it_computes_what_the_unchunked_loss_computes_there():
    inputs = Inputs(torch.float32)
    inputs.target_hidden_NE, inputs.target_weight_VE = inputs.target_hidden_NE.bfloat16(), inputs.target_weight_VE.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, _ = inputs.unchunked(forward_kl)
        found = inputs.chunked(forward_kl, 3)
    torch.testing.assert_close(found.loss, expected, rtol=1e-6, atol=0)  # the same bfloat16 logits, so float32 rounding only
    for ours, theirs in zip(gradients(found.loss, inputs.trained), gradients(expected, inputs.trained), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * theirs.abs().max().item())


def test_many_chunks_add_up_in_float32_where_the_head_is_bfloat16():
    num_rows = 768  # in bfloat16 a running sum stops growing after 256 equal terms
    hidden_ND = torch.ones(num_rows, 2, dtype=torch.bfloat16)
    weight_VD = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    target = linear_head(torch.tensor([[20.0, 20.0], [0, 0], [0, 0], [0, 0]], dtype=torch.bfloat16))
    found = dense_loss(hidden_ND, linear_head(weight_VD), hidden_ND, target, forward_kl, torch.ones(num_rows), chunk_size=1)
    (gradient,) = torch.autograd.grad(found.loss, weight_VD)
    assert gradient.dtype == torch.bfloat16
    assert gradient[0].tolist() == pytest.approx([-0.75 * num_rows] * 2, rel=0.01)


def test_tiny_weights_do_not_underflow_in_float16_before_the_loss_scale_arrives():
    inputs = Inputs(torch.float16)
    inputs.weights_N = torch.full((ROWS,), 1e-7)
    (found,) = torch.autograd.grad(inputs.chunked(forward_kl, 2).loss * 1e7, inputs.draft_hidden_ND)
    inputs.weights_N = torch.ones(ROWS)
    (expected,) = torch.autograd.grad(inputs.chunked(forward_kl, 2).loss, inputs.draft_hidden_ND)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


class Operations(TorchDispatchMode):
    """Records each operation, with the shapes of its first argument and of its results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
        self.seen.append((func, given, [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]))
        return result


@pytest.mark.parametrize("trained", [False, True])
def test_autocast_casts_a_head_once_and_not_for_every_chunk(tiny_llama, trained):
    model = tiny_llama(dtype=torch.float32).requires_grad_(trained)
    hidden_ND = torch.randn(ROWS, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), Operations() as operations:
        heads = model_head(model), linear_head(torch.randn(64, 32, dtype=torch.bfloat16))
        result = dense_loss(hidden_ND, heads[0], hidden_ND.detach(), heads[1], forward_kl, torch.ones(ROWS), chunk_size=1)
        casts = [given for func, given, _ in operations.seen if func is torch.ops.aten._to_copy.default]
        # Each chunk's gradient of a trained weight comes back to float32.
        assert casts.count((64, 32)) == 1 + ROWS * trained
        pair = dense_pair(heads[1].logits_of(hidden_ND.detach()), head_logits(model, hidden_ND))
        torch.testing.assert_close(result.loss, forward_kl(pair).sum(), rtol=1e-6, atol=0)


def test_a_head_takes_states_of_a_wider_dtype_where_autocast_does_not_cast_them(tiny_llama):
    """Mamba's last states are float32 beside a head in bfloat16."""

    class OtherLinear(nn.Linear):
        pass

    model = tiny_llama(dtype=torch.bfloat16)
    hidden_ND = torch.randn(ROWS, 32)
    for head in (model.lm_head, OtherLinear(32, 64, bias=False, dtype=torch.bfloat16)):
        model.set_output_embeddings(head)
        assert torch.equal(model_head(model).logits_of(hidden_ND), head_logits(model, hidden_ND))


# --- what counts for nothing --------------------------------------------------------------------------------------


def test_rows_without_weight_change_neither_loss_nor_gradients_and_have_no_statistics():
    inputs = Inputs()
    found = inputs.chunked(forward_kl, 3)
    expected = gradients(found.loss, inputs.trained)
    inputs.draft_hidden_ND.data[[1, 4]] = 3.0
    inputs.target_hidden_NE[[1, 4]] = -2.0
    other = inputs.chunked(forward_kl, 3)
    assert other.loss.item() == found.loss.item()
    assert all(torch.equal(one, two) for one, two in zip(gradients(other.loss, inputs.trained), expected, strict=True))
    assert other.values_N[[1, 4]].tolist() == other.acceptance_N[[1, 4]].tolist() == [0, 0]
    assert not other.top1_agrees_N[[1, 4]].any()


@pytest.mark.parametrize("num_rows", [0, ROWS])
def test_without_any_weighed_row_the_loss_is_zero_and_so_is_its_gradient(num_rows):
    inputs = Inputs()
    hidden_ND, weight_WD = inputs.draft_hidden_ND[:num_rows].detach().requires_grad_(), inputs.draft_weight_WD
    target = inputs.target_hidden_NE[:num_rows], linear_head(inputs.target_weight_VE)
    found = dense_loss(hidden_ND, linear_head(weight_WD), *target, forward_kl, torch.zeros(num_rows), chunk_size=4)
    found.loss.backward()
    assert found.loss.item() == 0
    for tensor in (hidden_ND, weight_WD):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_without_gradients_the_same_loss_comes_out_and_no_graph_is_built_for_a_trainable_head():
    inputs, tracked = Inputs(), []

    def logits_of(hidden_CD):
        logits_CV = F.linear(hidden_CD, inputs.draft_weight_WD, inputs.draft_bias_W)
        tracked.append(logits_CV.requires_grad)
        return logits_CV

    with torch.no_grad():
        head = LogitHead(logits_of=logits_of, parameters=inputs.trained[1:])
        found = inputs.chunked(forward_kl, 3, head=head)
    assert tracked == [False] * 3
    assert not found.loss.requires_grad
    torch.testing.assert_close(found.loss, inputs.chunked(forward_kl, 3).loss.detach())


# --- tiles --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Watched(DenseChunk):
    """Notes of how many rows each pair was made."""

    sizes: list = field(default_factory=list)

    def at(self, rows):
        return Watched(logits_CX=self.logits_CX[rows], sizes=self.sizes)

    def pair(self, draft_logits_CW, **options):
        self.sizes.append(len(draft_logits_CW))
        return super().pair(draft_logits_CW, **options)


@pytest.mark.parametrize(
    ("num_bytes", "num_drafted", "sizes"),
    [(1, 11, [1] * 7), (3 * 4 * 11, 11, [3, 3, 1]), (2**21, 11, [7]), (2 * 4 * 11, 3, [2, 2, 2, 1])],
    ids=["never none", "some", "all", "the wider side decides"],
)
@pytest.mark.parametrize("divergence", [forward_kl, cross_entropy])
def test_a_tile_is_as_many_rows_as_its_bytes_hold_which_changes_nothing(monkeypatch, divergence, num_bytes, num_drafted, sizes):
    monkeypatch.setattr(chunked, "TILE_BYTES", num_bytes)
    target, draft, ids_W = random_logits(1), random_logits(2, num_drafted), torch.arange(num_drafted)
    labels = torch.tensor([0, 2, 1, -1, 2, 0, 2])
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    watched = Watched(logits_CX=target)
    found, gradient_CW = compare(divergence, watched, draft, weights, draft_token_ids_W=ids_W, labels_C=labels)
    assert watched.sizes == sizes
    leaf = draft.clone().requires_grad_()
    values = divergence(dense_pair(target, leaf, draft_token_ids_W=ids_W, labels=labels))
    (gradient,) = torch.autograd.grad((weights * values).sum(), leaf)
    torch.testing.assert_close(found.values_C, values.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient_CW, gradient, rtol=1e-12, atol=1e-15)


# --- memory and mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIVERGENCES)
def test_no_tensor_is_larger_than_one_chunk_of_logits(name):
    num_rows, width, vocabulary, chunk_size = 256, 4, 300, 8
    hidden_ND = torch.randn(num_rows, width, requires_grad=True)
    heads = (linear_head(torch.randn(vocabulary, width, requires_grad=wanted)) for wanted in (True, False))
    options = {"chunk_size": chunk_size, "labels_N": torch.zeros(num_rows, dtype=torch.int64)}
    with Operations() as operations:
        dense_loss(
            hidden_ND, next(heads), hidden_ND.detach(), next(heads), DIVERGENCES[name], torch.ones(num_rows), **options
        ).loss.backward()
    assert max(math.prod(shape) for _, _, shapes in operations.seen for shape in shapes) == chunk_size * vocabulary
