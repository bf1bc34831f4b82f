"""A chunk's divergence and gradient: the same however it is cut into tiles, and each closed form against autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from distill.loss import chunked
from distill.loss.chunked import compare
from distill.loss.divergences import (
    CLOSED_FORMS,
    DIVERGENCES,
    Divergence,
    closed_form,
    cross_entropy,
    forward_kl,
    jsd,
    kl_tv_blend,
    mix,
)
from distill.loss.pairs import DenseChunk, Pair, SparseRows, TargetChunk, dense_pair
from tests.support.losses import keep_top

ROWS, VOCABULARY = 7, 11


def random_logits(seed: int, columns: int = VOCABULARY) -> Tensor:
    return 2 * torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    monkeypatch.setattr(chunked, "TILE_BYTES", bytes_of_a_tile)
    target, draft, labels = random_logits(1), random_logits(2), torch.tensor([0, 3, 5, -1, 7, 10, 2])
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, gradient_CW = compare(divergence, DenseChunk(logits_CV=target), draft, weights, labels_C=labels)
    leaf = draft.clone().requires_grad_()
    values = divergence(dense_pair(target, leaf, labels=labels))
    (gradient,) = torch.autograd.grad((weights * values).sum(), leaf)
    torch.testing.assert_close(found.values_C, values.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient_CW, gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.acceptance_C, torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1))
    assert torch.equal(found.top1_agrees_C, target.argmax(-1) == draft.argmax(-1))


@pytest.mark.parametrize(("num_bytes", "sizes"), [(1, [1] * 7), (3 * 4 * VOCABULARY, [3, 3, 1]), (2**21, [7])])
def test_a_tile_is_as_many_rows_as_its_bytes_hold_and_never_none(monkeypatch, num_bytes: int, sizes: list[int]) -> None:
    monkeypatch.setattr(chunked, "TILE_BYTES", num_bytes)
    target = Watched(logits_CV=random_logits(1))
    compare(forward_kl, target, random_logits(2), torch.ones(ROWS))
    assert target.sizes == sizes


def test_the_wider_of_both_sides_decides_how_many_rows_a_tile_has(monkeypatch) -> None:
    monkeypatch.setattr(chunked, "TILE_BYTES", 2 * 4 * VOCABULARY)
    target, ids_W = Watched(logits_CV=random_logits(1)), torch.tensor([2, 5, 6])
    compare(forward_kl, target, random_logits(2, 3), torch.ones(ROWS), draft_token_ids_W=ids_W)
    assert target.sizes == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("divergence", "graph"),
    [(forward_kl, False), (DIVERGENCES["jsd"], False), (squared_hellinger, True), (cross_entropy, True)],
)
def test_only_a_divergence_without_a_closed_form_builds_a_graph(divergence: Divergence, graph: bool) -> None:
    target, labels = Watched(logits_CV=random_logits(1)), torch.zeros(ROWS, dtype=torch.int64)
    compare(divergence, target, random_logits(2), torch.ones(ROWS), labels_C=labels)
    assert target.graphs == [graph]


@pytest.mark.parametrize("divergence", [forward_kl, squared_hellinger])
def test_without_weights_there_is_no_gradient_and_no_graph(divergence: Divergence) -> None:
    target = Watched(logits_CV=random_logits(1))
    found, gradient_CW = compare(divergence, target, random_logits(2), None)
    assert gradient_CW is None
    assert target.graphs == [False]
    torch.testing.assert_close(found.values_C, divergence(dense_pair(random_logits(1), random_logits(2))))


@pytest.mark.parametrize("num_kept", [4, VOCABULARY - 1])  # the latter with as many buckets as there are draft logits
def test_a_sparse_target_goes_through_autograd_even_where_a_closed_form_is_known(num_kept: int) -> None:
    target, draft = SparseRows(target=keep_top(random_logits(1), num_kept)), random_logits(2).requires_grad_()
    pair = target.pair(draft, temperature=1.0)
    (expected,) = torch.autograd.grad(forward_kl(pair).sum(), draft)
    _, gradient_CW = compare(forward_kl, target, draft.detach(), torch.ones(ROWS, dtype=torch.float64))
    torch.testing.assert_close(gradient_CW, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("target", [DenseChunk(logits_CV=random_logits(1)[:0]), DenseChunk(logits_CV=random_logits(1))])
def test_no_rows_give_empty_figures(target: TargetChunk) -> None:
    found, gradient_CW = compare(forward_kl, target.part(slice(0, 0)), random_logits(2)[:0], torch.ones(0))
    assert gradient_CW is not None
    assert gradient_CW.shape == (0, VOCABULARY)
    assert len(found.values_C) == len(found.acceptance_C) == len(found.top1_agrees_C) == 0


def test_the_gradient_comes_in_the_dtype_of_the_logits_and_the_values_in_float32() -> None:
    target, draft = random_logits(1).bfloat16(), random_logits(2).bfloat16()
    found, gradient_CW = compare(forward_kl, DenseChunk(logits_CV=target), draft, torch.ones(ROWS))
    assert gradient_CW is not None
    assert gradient_CW.dtype == torch.bfloat16
    assert found.values_C.dtype == torch.float32
    torch.testing.assert_close(
        found.values_C.double(), forward_kl(dense_pair(target.double(), draft.double())), rtol=1e-5, atol=0
    )


# --- closed forms -------------------------------------------------------------------------------------------------

DIVERGENCES_WITH_A_FORM: dict[str, Divergence] = {
    **{name: divergence for name, divergence in DIVERGENCES.items() if name != "cross_entropy"},
    "jsd_0": partial(jsd, beta=0.0),
    "jsd_0.1": partial(jsd, beta=0.1),
    "jsd_1": partial(jsd, beta=1.0),
    "blend_of_a_mean": partial(kl_tv_blend, eta=1.0, mean_acceptance=torch.tensor(0.3, dtype=torch.float64)),
    "mix": mix({"forward_kl": 0.3, "jsd": 2.0, "total_variation": 0.5}, {"jsd": {"beta": 0.9}}),
}
every_form = pytest.mark.parametrize("name", DIVERGENCES_WITH_A_FORM)


def by_autograd(divergence: Divergence, target: Tensor, draft: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    leaf = draft.clone().requires_grad_()
    values = divergence(dense_pair(target, leaf, **options))
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient


def by_form(divergence: Divergence, target: Tensor, draft: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    form = closed_form(divergence)
    assert form is not None
    return form(dense_pair(target, draft, **options))


@every_form
@pytest.mark.parametrize("ids", [None, torch.tensor([7, 0, 3, 8, 2, 5])], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_it_gives_the_value_and_the_gradient_that_autograd_gives(name: str, ids: Tensor | None, temperature: float) -> None:
    target, draft = random_logits(1), random_logits(2, VOCABULARY if ids is None else len(ids))
    options = {"temperature": temperature, "draft_token_ids_W": ids}
    expected = by_autograd(DIVERGENCES_WITH_A_FORM[name], target, draft, **options)
    found = by_form(DIVERGENCES_WITH_A_FORM[name], target, draft, **options)
    assert expected[1].abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@every_form
def test_in_float32_it_is_as_near_to_float64_as_autograd_is(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = (3 * torch.randn(3, 5000, generator=generator) for _ in range(2))
    divergence = DIVERGENCES_WITH_A_FORM[name]
    exact = by_autograd(divergence, target.double(), draft.double())
    values, gradient = by_form(divergence, target, draft)
    assert values.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-5, atol=1e-5 * exact[1].abs().max().item())


@every_form
def test_the_gradient_is_zero_where_draft_equals_target(name: str) -> None:
    values, gradient = by_form(DIVERGENCES_WITH_A_FORM[name], random_logits(1), random_logits(1))
    assert values.abs().max() < 1e-14
    assert gradient.abs().max() < 1e-14


@every_form
def test_masked_and_extreme_logits_give_what_autograd_gives_and_nothing_infinite(name: str) -> None:
    big, inf = 1e4, math.inf
    target = [[big, -big, 0.0, 1.0], [1.0, -inf, 0.0, 2.0], [1.0, -inf, 0.0, 2.0], [1.0, 3.0, 0.0, 2.0]]
    draft = [[-big, big, 0.0, 1.0], [0.0, -inf, 0.5, 1.0], [0.0, 3.0, 0.5, 1.0], [0.0, -inf, 0.5, 1.0]]
    rows = torch.tensor(target, dtype=torch.float64), torch.tensor(draft, dtype=torch.float64)
    found = by_form(DIVERGENCES_WITH_A_FORM[name], *rows)
    assert torch.isfinite(found[0]).all()
    assert torch.isfinite(found[1]).all()
    torch.testing.assert_close(found, by_autograd(DIVERGENCES_WITH_A_FORM[name], *rows), rtol=1e-9, atol=1e-9)


@every_form
def test_the_pair_is_left_as_it_was_for_the_next_reader(name: str) -> None:
    pair, untouched = (dense_pair(random_logits(1), random_logits(2)) for _ in range(2))
    form = closed_form(DIVERGENCES_WITH_A_FORM[name])
    assert form is not None
    form(pair)
    for ours, theirs in ((pair.p, untouched.p), (pair.q, untouched.q), (pair.log_p, untouched.log_p)):
        assert torch.equal(ours, theirs)
    assert torch.equal(pair.log_q, untouched.log_q)


def test_every_divergence_but_cross_entropy_has_one() -> None:
    assert set(DIVERGENCES.values()) - set(CLOSED_FORMS) == {cross_entropy}


def test_there_is_none_for_cross_entropy_a_mix_with_it_or_a_function_of_one_s_own() -> None:
    def own(pair: Pair) -> Tensor:
        return forward_kl(pair)

    assert closed_form(cross_entropy) is None
    assert closed_form(mix({"forward_kl": 1.0, "cross_entropy": 0.1})) is None
    assert closed_form(own) is None
    assert closed_form(partial(own)) is None
