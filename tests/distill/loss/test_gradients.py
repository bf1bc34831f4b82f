"""A chunk compared in tiles: the same however it is cut, through autograd only where no closed form is known."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from distill.loss import gradients as comparison
from distill.loss.divergences import DIVERGENCES, Divergence, Pair, SparseTarget, cross_entropy, dense_pair, forward_kl
from distill.loss.gradients import Rule, compare
from distill.loss.target_logits import DenseChunk, SparseChunk, TargetChunk

ROWS, VOCABULARY = 7, 11


def random_logits(seed: int, columns: int = VOCABULARY) -> Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rule(divergence: Divergence, temperature: float = 1.0, ids_W: Tensor | None = None) -> Rule:
    return Rule(divergence=divergence, temperature=temperature, draft_token_ids_W=ids_W)


def squared_hellinger(pair: Pair) -> Tensor:
    """What a reader may add: nothing but a function of a pair."""
    return ((pair.p.sqrt() - pair.q.sqrt()) ** 2).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Watched(DenseChunk):
    """Notes whether each pair was made with a graph, and of how many rows."""

    graphs: list[bool] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def part(self, rows: slice) -> Watched:
        return Watched(logits_CV=self.logits_CV[rows], graphs=self.graphs, sizes=self.sizes)

    def pair(self, draft_logits_CW: Tensor, **options: object) -> Pair:
        pair = super().pair(draft_logits_CW, **options)
        self.graphs.append(pair.log_q.requires_grad)
        self.sizes.append(len(draft_logits_CW))
        return pair


@pytest.mark.parametrize("bytes_of_a_tile", [1, 3 * 4 * VOCABULARY, 2**21])
@pytest.mark.parametrize("divergence", [forward_kl, cross_entropy])
def test_the_size_of_the_tiles_changes_nothing(monkeypatch, divergence: Divergence, bytes_of_a_tile: int) -> None:
    monkeypatch.setattr(comparison, "TILE_BYTES", bytes_of_a_tile)
    target, draft, labels = random_logits(1), random_logits(2), torch.tensor([0, 3, 5, -1, 7, 10, 2])
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, gradient_CW = compare(rule(divergence), DenseChunk(logits_CV=target), draft, labels, weights)
    leaf = draft.clone().requires_grad_()
    values = divergence(dense_pair(target, leaf, labels=labels))
    (gradient,) = torch.autograd.grad((weights * values).sum(), leaf)
    torch.testing.assert_close(found.values_C, values.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient_CW, gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.acceptance_C, torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1))
    assert torch.equal(found.top1_agrees_C, target.argmax(-1) == draft.argmax(-1))


@pytest.mark.parametrize(("num_bytes", "sizes"), [(1, [1] * 7), (3 * 4 * VOCABULARY, [3, 3, 1]), (2**21, [7])])
def test_a_tile_is_as_many_rows_as_its_bytes_hold_and_never_none(monkeypatch, num_bytes: int, sizes: list[int]) -> None:
    monkeypatch.setattr(comparison, "TILE_BYTES", num_bytes)
    target = Watched(logits_CV=random_logits(1))
    compare(rule(forward_kl), target, random_logits(2), None, torch.ones(ROWS))
    assert target.sizes == sizes


def test_the_wider_of_both_sides_decides_how_many_rows_a_tile_has(monkeypatch) -> None:
    monkeypatch.setattr(comparison, "TILE_BYTES", 2 * 4 * VOCABULARY)
    target, ids_W = Watched(logits_CV=random_logits(1)), torch.tensor([2, 5, 6])
    compare(rule(forward_kl, ids_W=ids_W), target, random_logits(2, 3), None, torch.ones(ROWS))
    assert target.sizes == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("divergence", "graph"),
    [(forward_kl, False), (DIVERGENCES["jsd"], False), (squared_hellinger, True), (cross_entropy, True)],
)
def test_only_a_divergence_without_a_closed_form_builds_a_graph(divergence: Divergence, graph: bool) -> None:
    target, labels = Watched(logits_CV=random_logits(1)), torch.zeros(ROWS, dtype=torch.int64)
    compare(rule(divergence), target, random_logits(2), labels, torch.ones(ROWS))
    assert target.graphs == [graph]


@pytest.mark.parametrize("divergence", [forward_kl, squared_hellinger])
def test_without_weights_there_is_no_gradient_and_no_graph(divergence: Divergence) -> None:
    target = Watched(logits_CV=random_logits(1))
    found, gradient_CW = compare(rule(divergence), target, random_logits(2), None, None)
    assert gradient_CW is None
    assert target.graphs == [False]
    torch.testing.assert_close(found.values_C, divergence(dense_pair(random_logits(1), random_logits(2))))


def sparse_chunk(num_kept: int) -> SparseChunk:
    log_p = random_logits(1).log_softmax(-1)
    kept = log_p.topk(num_kept)
    log_tail = log_p.scatter(-1, kept.indices, -torch.inf).logsumexp(-1)
    return SparseChunk(target=SparseTarget(log_probs=kept.values, token_ids=kept.indices, log_tail=log_tail))


@pytest.mark.parametrize("num_kept", [4, VOCABULARY - 1])  # the latter with as many buckets as there are draft logits
def test_a_sparse_target_goes_through_autograd_even_where_a_closed_form_is_known(num_kept: int) -> None:
    target, draft = sparse_chunk(num_kept), random_logits(2).requires_grad_()
    pair = target.pair(draft, temperature=1.0)
    (expected,) = torch.autograd.grad(forward_kl(pair).sum(), draft)
    _, gradient_CW = compare(rule(forward_kl), target, draft.detach(), None, torch.ones(ROWS, dtype=torch.float64))
    torch.testing.assert_close(gradient_CW, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("target", [DenseChunk(logits_CV=random_logits(1)[:0]), DenseChunk(logits_CV=random_logits(1))])
def test_no_rows_give_empty_figures(target: TargetChunk) -> None:
    found, gradient_CW = compare(rule(forward_kl), target.part(slice(0, 0)), random_logits(2)[:0], None, torch.ones(0))
    assert gradient_CW is not None
    assert gradient_CW.shape == (0, VOCABULARY)
    assert len(found.values_C) == len(found.acceptance_C) == len(found.top1_agrees_C) == 0


def test_the_gradient_comes_in_the_dtype_of_the_logits_and_the_values_in_float32() -> None:
    target, draft = random_logits(1).bfloat16(), random_logits(2).bfloat16()
    found, gradient_CW = compare(rule(forward_kl), DenseChunk(logits_CV=target), draft, None, torch.ones(ROWS))
    assert gradient_CW is not None
    assert gradient_CW.dtype == torch.bfloat16
    assert found.values_C.dtype == torch.float32
    torch.testing.assert_close(
        found.values_C.double(), forward_kl(dense_pair(target.double(), draft.double())), rtol=1e-5, atol=0
    )
