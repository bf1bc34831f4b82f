"""The chunked loss against the same loss in one piece: values, every gradient, what it skips and what it allocates."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from distill.loss.chunked import ChunkedLoss, LogitHead, model_head
from distill.loss.divergences import DIVERGENCES, Divergence, forward_kl, mix
from distill.loss.pairs import dense_pair
from heads.inference.causal_lm import head_logits
from tests.support.losses import dense_loss, linear_head

ROWS, DRAFT_WIDTH, TARGET_WIDTH, VOCABULARY = 7, 6, 10, 23
IDS_W = torch.tensor([11, 0, 22, 3, 5, 17, 8])
DRAFT_LABELS = torch.tensor([1, 0, 2, -1, 3, 4, -1])  # positions of the labels of `Inputs` in IDS_W; 9 is not in it
CHUNK_SIZES = [1, 3, ROWS, 100]
LOSSES: dict[str, Divergence] = {
    **DIVERGENCES,
    "mix": mix({"jsd": 0.3, "total_variation": 2.0, "cross_entropy": 0.1}, {"jsd": {"beta": 0.9}}),
}


class Inputs:
    """Random hidden states, heads, weights and labels of one loss; two of the seven rows weigh nothing."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, num_drafted: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
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
    def trained(self) -> tuple[Tensor, ...]:
        return self.draft_hidden_ND, self.draft_weight_WD, self.draft_bias_W

    def chunked(self, divergence: Divergence, chunk_size: int, **options: Any) -> ChunkedLoss:
        return dense_loss(
            self.draft_hidden_ND,
            linear_head(self.draft_weight_WD, self.draft_bias_W),
            self.target_hidden_NE,
            linear_head(self.target_weight_VE),
            divergence,
            self.weights_N,
            chunk_size=chunk_size,
            labels_N=self.labels_N,
            **options,
        )

    def unchunked(self, divergence: Divergence, *, labels: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the loss and the values, from whole logits and ordinary autograd."""
        draft_logits = F.linear(self.draft_hidden_ND, self.draft_weight_WD, self.draft_bias_W)
        target_logits = F.linear(self.target_hidden_NE, self.target_weight_VE)
        labels = self.labels_N if labels is None else labels
        values = divergence(dense_pair(target_logits, draft_logits, labels=labels, **options))
        return (values * self.weights_N).sum(), values


def gradients(loss: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(3.0 * loss, inputs)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "reduced"),
    [(torch.float64, 1e-12, False), (torch.float32, 1e-5, False), (torch.float64, 1e-12, True)],
)
def test_value_and_gradients_are_those_of_the_unchunked_loss(
    name: str, chunk_size: int, dtype: torch.dtype, tolerance: float, reduced: bool
) -> None:
    inputs, divergence = Inputs(dtype, num_drafted=len(IDS_W) if reduced else VOCABULARY), LOSSES[name]
    options = {"temperature": 1.7, "draft_token_ids_W": IDS_W if reduced else None}
    expected, expected_values = inputs.unchunked(divergence, labels=DRAFT_LABELS if reduced else None, **options)
    found = inputs.chunked(divergence, chunk_size, **options)
    torch.testing.assert_close(found.loss, expected, rtol=tolerance, atol=0)
    weighed = inputs.weights_N != 0
    torch.testing.assert_close(found.values_N[weighed], expected_values[weighed].detach(), rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients(found.loss, inputs.trained), gradients(expected, inputs.trained), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@pytest.mark.parametrize("num_drafted", [VOCABULARY, len(IDS_W)])
def test_acceptance_and_top1_agreement_are_those_at_temperature_one(num_drafted: int) -> None:
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


def test_top1_agreement_holds_everywhere_between_equal_heads() -> None:
    inputs = Inputs()
    found = dense_loss(
        inputs.target_hidden_NE,
        linear_head(inputs.target_weight_VE),
        inputs.target_hidden_NE,
        linear_head(inputs.target_weight_VE),
        forward_kl,
        torch.ones(ROWS),
        chunk_size=3,
    )
    assert found.top1_agrees_N.all()
    torch.testing.assert_close(found.acceptance_N, torch.ones(ROWS, dtype=torch.float64))
    assert found.loss.abs() < 1e-14


# --- heads --------------------------------------------------------------------------------------------------------


def test_a_tied_embedding_collects_the_gradient_of_both_its_uses() -> None:
    inputs = Inputs()
    tied_VD, token_ids = inputs.draft_weight_WD, torch.tensor([0, 3, 3, 9, 20, 1, 2])

    def total(loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        (gradient,) = torch.autograd.grad(loss_of(torch.tanh(tied_VD[token_ids])), tied_VD)
        return gradient

    def whole(hidden_ND: Tensor) -> Tensor:
        pair = dense_pair(F.linear(inputs.target_hidden_NE, inputs.target_weight_VE), F.linear(hidden_ND, tied_VD))
        return (forward_kl(pair) * inputs.weights_N).sum()

    def in_chunks(hidden_ND: Tensor) -> Tensor:
        heads = linear_head(tied_VD), linear_head(inputs.target_weight_VE)
        return dense_loss(
            hidden_ND, heads[0], inputs.target_hidden_NE, heads[1], forward_kl, inputs.weights_N, chunk_size=2
        ).loss

    torch.testing.assert_close(total(in_chunks), total(whole), rtol=1e-12, atol=1e-14)


def test_a_head_cut_out_of_a_larger_weight_passes_its_gradient_on() -> None:
    inputs = Inputs()
    full_VD = inputs.draft_weight_WD
    target_logits = F.linear(inputs.target_hidden_NE, inputs.target_weight_VE)
    pair = dense_pair(target_logits, F.linear(inputs.draft_hidden_ND, full_VD[IDS_W]), draft_token_ids_W=IDS_W)
    (expected,) = torch.autograd.grad((forward_kl(pair) * inputs.weights_N).sum(), full_VD)
    inputs.draft_weight_WD, inputs.draft_bias_W = full_VD[IDS_W], torch.zeros(len(IDS_W), dtype=torch.float64)
    (found,) = torch.autograd.grad(inputs.chunked(forward_kl, 2, draft_token_ids_W=IDS_W).loss, full_VD)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_frozen_parts_get_no_gradient_and_the_others_the_same_one() -> None:
    inputs = Inputs()
    (expected, _, _) = gradients(inputs.unchunked(forward_kl)[0], inputs.trained)
    inputs.draft_weight_WD.requires_grad_(False)
    inputs.draft_bias_W.requires_grad_(False)
    inputs.chunked(forward_kl, 2).loss.backward()
    torch.testing.assert_close(3 * inputs.draft_hidden_ND.grad, expected)
    assert inputs.draft_weight_WD.grad is None


def test_a_frozen_trunk_still_trains_its_head() -> None:
    inputs = Inputs()
    (_, *expected) = gradients(inputs.unchunked(forward_kl)[0], inputs.trained)
    inputs.draft_hidden_ND.requires_grad_(False)
    found = gradients(inputs.chunked(forward_kl, 2).loss, (inputs.draft_weight_WD, inputs.draft_bias_W))
    torch.testing.assert_close(list(found), expected)


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **changes)).requires_grad_(False)


@pytest.mark.parametrize("tied", [True, False])
def test_model_head_hands_out_the_model_s_own_head(tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    (parameter,) = model_head(model).parameters
    assert parameter is model.lm_head.weight
    assert (parameter is model.model.embed_tokens.weight) == tied


def test_a_soft_capped_head_is_trained_through_its_cap() -> None:
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    capped = Gemma2ForCausalLM(
        Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=0.5)
    ).double()
    target = tiny_llama().double()
    hidden_ND = torch.randn(ROWS, 16, dtype=torch.float64, requires_grad=True)
    weight_VD = capped.lm_head.weight
    pair = dense_pair(head_logits(target, hidden_ND), head_logits(capped, hidden_ND))
    expected = torch.autograd.grad(forward_kl(pair).sum(), (hidden_ND, weight_VD))
    found = dense_loss(
        hidden_ND, model_head(capped), hidden_ND.detach(), model_head(target), forward_kl, torch.ones(ROWS), chunk_size=2
    )
    torch.testing.assert_close(torch.autograd.grad(found.loss, (hidden_ND, weight_VD)), expected, rtol=1e-12, atol=1e-14)


class Backbone(nn.Module):
    """A draft whose head is called from the loss, outside of the forward that DDP wraps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk = nn.Linear(3, DRAFT_WIDTH, dtype=torch.float64)
        self.lm_head = nn.Linear(DRAFT_WIDTH, VOCABULARY, dtype=torch.float64)

    def forward(self, features_NF: Tensor) -> Tensor:
        return self.trunk(features_NF)


def test_ddp_reduces_a_head_that_only_the_loss_uses(tmp_path: Path) -> None:
    inputs, model = Inputs(), Backbone()
    features_NF = torch.ones(ROWS, 3, dtype=torch.float64)

    def backward(trunk: nn.Module) -> list[Tensor]:
        model.zero_grad()
        inputs.draft_hidden_ND = trunk(features_NF)
        inputs.draft_weight_WD, inputs.draft_bias_W = model.lm_head.weight, model.lm_head.bias
        inputs.chunked(forward_kl, 2).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = backward(model)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):  # the second round fails if the reducer is still waiting for a gradient of the first
            torch.testing.assert_close(backward(wrapped), expected)
        del wrapped  # its reducer, if it outlived the group, would wait for the group's thread while it holds the interpreter
    finally:
        distributed.destroy_process_group()
    assert len(expected) == 4


# --- precision ----------------------------------------------------------------------------------------------------


def test_under_bfloat16_autocast_it_computes_what_the_unchunked_loss_computes_there() -> None:
    inputs = Inputs(torch.float32)
    inputs.target_hidden_NE, inputs.target_weight_VE = inputs.target_hidden_NE.bfloat16(), inputs.target_weight_VE.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, _ = inputs.unchunked(forward_kl)
        found = inputs.chunked(forward_kl, 3)
    torch.testing.assert_close(found.loss, expected, rtol=1e-6, atol=0)  # the same bfloat16 logits, so float32 rounding only
    for ours, theirs in zip(gradients(found.loss, inputs.trained), gradients(expected, inputs.trained), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * theirs.abs().max().item())


def test_many_chunks_add_up_in_float32_where_the_head_is_bfloat16() -> None:
    num_rows = 768  # in bfloat16 a running sum stops growing after 256 equal terms
    hidden_ND = torch.ones(num_rows, 2, dtype=torch.bfloat16)
    weight_VD = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    target = linear_head(torch.tensor([[20.0, 20.0], [0, 0], [0, 0], [0, 0]], dtype=torch.bfloat16))
    found = dense_loss(hidden_ND, linear_head(weight_VD), hidden_ND, target, forward_kl, torch.ones(num_rows), chunk_size=1)
    (gradient,) = torch.autograd.grad(found.loss, weight_VD)
    assert gradient.dtype == torch.bfloat16
    assert gradient[0].tolist() == pytest.approx([-0.75 * num_rows] * 2, rel=0.01)


def test_tiny_weights_do_not_underflow_in_float16_before_the_loss_scale_arrives() -> None:
    inputs = Inputs(torch.float16)
    inputs.weights_N = torch.full((ROWS,), 1e-7)
    (found,) = torch.autograd.grad(inputs.chunked(forward_kl, 2).loss * 1e7, inputs.draft_hidden_ND)
    inputs.weights_N = torch.ones(ROWS)
    (expected,) = torch.autograd.grad(inputs.chunked(forward_kl, 2).loss, inputs.draft_hidden_ND)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


class Operations(TorchDispatchMode):
    """Records each operation, with the shapes of its first argument and of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[int, ...], list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
        self.seen.append((func, given, [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]))
        return result


@pytest.mark.parametrize("trained", [False, True])
def test_autocast_casts_a_head_once_and_not_for_every_chunk(trained: bool) -> None:
    model = tiny_llama().requires_grad_(trained)
    hidden_ND = torch.randn(ROWS, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), Operations() as operations:
        heads = model_head(model), linear_head(torch.randn(VOCABULARY, 16, dtype=torch.bfloat16))
        result = dense_loss(hidden_ND, heads[0], hidden_ND.detach(), heads[1], forward_kl, torch.ones(ROWS), chunk_size=1)
        casts = [given for func, given, _ in operations.seen if func is torch.ops.aten._to_copy.default]
        assert (
            casts.count((VOCABULARY, 16)) == 1 + ROWS * trained
        )  # each chunk's gradient of a trained weight comes back to float32
        pair = dense_pair(heads[1].logits_of(hidden_ND.detach()), head_logits(model, hidden_ND))
        torch.testing.assert_close(result.loss, forward_kl(pair).sum(), rtol=1e-6, atol=0)


def test_target_hidden_states_from_inference_mode_are_accepted() -> None:
    inputs = Inputs()
    expected = gradients(inputs.chunked(forward_kl, 2).loss, inputs.trained)
    with torch.inference_mode():
        inputs.target_hidden_NE = inputs.target_hidden_NE.clone()
    torch.testing.assert_close(gradients(inputs.chunked(forward_kl, 2).loss, inputs.trained), expected)


# --- what is skipped ----------------------------------------------------------------------------------------------


def test_rows_without_weight_never_reach_a_head() -> None:
    inputs = Inputs()
    seen: list[int] = []
    inputs.draft_hidden_ND.data[[1, 4]] = torch.nan
    inputs.target_hidden_NE[[1, 4]] = torch.nan

    class Counting(nn.Linear):
        def forward(self, hidden_CD: Tensor) -> Tensor:
            seen.append(len(hidden_CD))
            return super().forward(hidden_CD)

    head = Counting(TARGET_WIDTH, VOCABULARY, dtype=torch.float64)
    found = dense_loss(
        inputs.draft_hidden_ND,
        linear_head(inputs.draft_weight_WD),
        inputs.target_hidden_NE,
        LogitHead(logits_of=head, parameters=()),
        forward_kl,
        inputs.weights_N,
        chunk_size=3,
    )
    (gradient_ND,) = torch.autograd.grad(found.loss, inputs.draft_hidden_ND)
    assert seen == [3, 2]
    assert torch.isfinite(gradient_ND).all()
    assert not gradient_ND[[1, 4]].any()
    assert found.values_N[[1, 4]].tolist() == found.acceptance_N[[1, 4]].tolist() == [0, 0]


@pytest.mark.parametrize("num_rows", [0, ROWS])
def test_without_any_weighed_row_the_loss_is_zero_and_so_is_its_gradient(num_rows: int) -> None:
    inputs = Inputs()
    hidden_ND = inputs.draft_hidden_ND[:num_rows].detach().requires_grad_()
    found = dense_loss(
        hidden_ND,
        linear_head(inputs.draft_weight_WD),
        inputs.target_hidden_NE[:num_rows],
        linear_head(inputs.target_weight_VE),
        forward_kl,
        torch.zeros(num_rows),
        chunk_size=4,
    )
    found.loss.backward()
    assert found.loss.item() == 0
    assert hidden_ND.grad is not None
    assert inputs.draft_weight_WD.grad is not None
    assert not hidden_ND.grad.any()
    assert not inputs.draft_weight_WD.grad.any()


def test_without_gradients_the_same_loss_comes_out_and_backward_is_impossible() -> None:
    inputs = Inputs()
    with torch.no_grad():
        found = inputs.chunked(forward_kl, 2)
    assert not found.loss.requires_grad
    torch.testing.assert_close(found.loss, inputs.chunked(forward_kl, 3).loss.detach())


def test_without_gradients_no_graph_is_built_for_a_trainable_head() -> None:
    inputs, tracked = Inputs(), []

    def logits_of(hidden_CD: Tensor) -> Tensor:
        logits_CV = F.linear(hidden_CD, inputs.draft_weight_WD)
        tracked.append(logits_CV.requires_grad)
        return logits_CV

    draft_head = LogitHead(logits_of=logits_of, parameters=(inputs.draft_weight_WD,))
    target = inputs.target_hidden_NE, linear_head(inputs.target_weight_VE)
    with torch.no_grad():
        dense_loss(inputs.draft_hidden_ND, draft_head, *target, forward_kl, inputs.weights_N, chunk_size=3)
    assert tracked == [False, False]


def test_a_second_backward_through_a_kept_graph_gives_the_same_gradient() -> None:
    inputs = Inputs()
    loss = inputs.chunked(forward_kl, 2).loss
    first = torch.autograd.grad(loss, inputs.trained, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs.trained), first)


def test_the_metrics_carry_no_gradient() -> None:
    found = Inputs().chunked(forward_kl, 2)
    assert not any(tensor.requires_grad for tensor in (found.values_N, found.acceptance_N, found.top1_agrees_N))


# --- memory and mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIVERGENCES)
def test_no_tensor_is_larger_than_one_chunk_of_logits(name: str) -> None:
    num_rows, width, vocabulary, chunk_size = 256, 4, 300, 8
    hidden_ND = torch.randn(num_rows, width, requires_grad=True)
    weight_VD = torch.randn(vocabulary, width, requires_grad=True)
    target_weight_VD = torch.randn(vocabulary, width)
    with Operations() as operations:
        dense_loss(
            hidden_ND,
            linear_head(weight_VD),
            hidden_ND.detach(),
            linear_head(target_weight_VD),
            DIVERGENCES[name],
            torch.ones(num_rows),
            chunk_size=chunk_size,
            labels_N=torch.zeros(num_rows, dtype=torch.int64),
        ).loss.backward()
    assert max(math.prod(shape) for _, _, shapes in operations.seen for shape in shapes) == chunk_size * vocabulary


@pytest.mark.parametrize("trained", [False, True])
def test_a_chunk_costs_three_matrix_products_and_one_more_where_the_head_is_trained(trained: bool) -> None:
    hidden_ND, weight_VD = torch.randn(4, 5, requires_grad=True), torch.randn(9, 5, requires_grad=trained)
    with Operations() as operations:
        heads = linear_head(weight_VD), linear_head(weight_VD.detach())
        dense_loss(hidden_ND, heads[0], hidden_ND.detach(), heads[1], forward_kl, torch.ones(4), chunk_size=2).loss.backward()
    products = [shapes[0] for func, _, shapes in operations.seen if func is torch.ops.aten.mm.default]
    of_the_weight = [shape for shape in products if shape in ((9, 5), (5, 9))]
    assert sorted(set(products) - set(of_the_weight)) == [(2, 5), (2, 9)]
    assert len(products) - len(of_the_weight) == 2 * 3
    assert len(of_the_weight) == 2 * trained


def test_row_counts_that_differ_are_refused() -> None:
    inputs = Inputs()
    inputs.weights_N = torch.ones(ROWS + 1)
    with pytest.raises(ValueError, match=r"equally many rows, got \[7, 8\]"):
        inputs.chunked(forward_kl, 2)


def test_a_chunk_of_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        Inputs().chunked(forward_kl, 0)
