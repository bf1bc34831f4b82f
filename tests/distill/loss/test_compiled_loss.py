"""Chunks of the loss compiled: one graph, the values of the tiles, few graphs for all shapes, and where it is done."""

import pytest
import torch
from torch._dynamo.utils import counters

from configs.schema.training import LossConfig
from distill.loss import chunked
from distill.loss.chunked import compare
from distill.loss.divergences import DIVERGENCES, Mix, configured_divergence, forward_kl
from distill.loss.pairs import DenseChunk
from heads.sampling.probabilities import BLOCK
from tests.support.losses import random_logits

ROWS = 7


@pytest.fixture
def captured(monkeypatch):
    """Graphs are captured and run without being compiled further."""
    torch._dynamo.reset()
    chunked._compiled.cache_clear()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **options: compile(run, **options, backend="eager"))
    yield
    torch._dynamo.reset()
    chunked._compiled.cache_clear()


@pytest.mark.parametrize(("num_drafted", "temperature"), [(11, 1.0), (3, 2.0)], ids=["whole", "reduced and softer"])
@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "cross_entropy"])
def test_a_compiled_chunk_is_one_graph_with_the_values_and_gradients_of_the_tiles(name, num_drafted, temperature, captured):
    divergence = Mix([(DIVERGENCES[name], 0.7), (forward_kl, 0.3)])
    target, draft = (random_logits(seed, size).float() for seed, size in ((1, 11), (2, num_drafted)))
    ids_W = None if num_drafted == 11 else torch.arange(num_drafted)
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(3))
    options = {"temperature": temperature, "draft_token_ids_W": ids_W}
    for rows in (slice(None), slice(0, 3)):  # the last chunk of a batch is a shorter one
        part = DenseChunk(logits_CX=target[rows]), draft[rows], weights[rows]
        (found, gradient), (expected, their_gradient) = (
            compare(divergence, *part, **options, compiled=compiled) for compiled in (True, False)
        )
        for one, other in zip((*found, gradient), (*expected, their_gradient), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_tokens", [11, 2 * BLOCK])
def test_chunks_of_any_number_of_rows_and_divergences_made_anew_share_a_few_graphs(num_tokens, captured):
    """Beyond a limit of graphs torch.compile ends the run."""
    counters.clear()
    for num_rows in (7, 7, 5, 7, 3, 1, 0, 2, 6, 4, 7, 5):
        target, draft = (random_logits(seed, num_tokens).float()[:num_rows] for seed in (1, 2))
        divergence = configured_divergence(LossConfig(mix={"forward_kl": 1.0, "total_variation": 0.5}, divergence=None))
        compare(divergence, DenseChunk(logits_CX=target), draft, torch.ones(num_rows), compiled=True)
    assert counters["stats"]["unique_graphs"] <= 4


@pytest.mark.parametrize(
    ("has_compiler", "num_tokens", "is_compiled"), [(True, 1024, True), (True, 1023, False), (False, 1024, False)]
)
def test_the_loss_of_a_large_vocabulary_is_compiled_where_there_is_a_compiler(
    has_compiler, num_tokens, is_compiled, captured, monkeypatch
):
    monkeypatch.setattr(chunked, "has_compiler", lambda device: has_compiler)
    counters.clear()
    target, draft = (random_logits(seed, num_tokens).float() for seed in (1, 2))
    statistics, gradient = compare(forward_kl, DenseChunk(logits_CX=target), draft, None)
    assert counters["stats"]["unique_graphs"] == is_compiled
    assert gradient is None
    expected, _ = compare(forward_kl, DenseChunk(logits_CX=target), draft, None, compiled=False)
    for one, other in zip(statistics, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
