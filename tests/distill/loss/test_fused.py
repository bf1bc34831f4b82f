"""The fused loss against the same loss in one piece: values, every gradient, precision, what it skips and what it compiles."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.schema.training import LossConfig
from distill.loss import fused
from distill.loss.divergences import DIVERGENCES, configured_divergence, cross_entropy, forward_kl
from distill.loss.fused import DraftRows, TargetRows, compare, fused_loss, model_head, normalise
from heads.inference.causal_lm import HeadRows, head_logits
from heads.sampling.draws import BLOCK
from tests.support import family_checks as checks
from tests.support.losses import linear_head, random_logits, textbook

ROWS, DRAFT_WIDTH, TARGET_WIDTH, VOCABULARY = 7, 6, 10, 23
IDS_W = torch.tensor([11, 0, 22, 3, 5, 17, 8])
DRAFT_LABELS = torch.tensor([1, 0, 2, -1, 3, 4, -1])  # positions of the labels of `Inputs` in IDS_W; 9 is not in it
MIX = {"jsd": 0.3, "total_variation": 2.0, "cross_entropy": 0.1}
MIXED = LossConfig(divergence=MIX, settings={"jsd": {"beta": 0.9}})


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

    def fused(self, divergence, chunk_size, head=None, **options):
        head = head or linear_head(self.draft_weight_WD, self.draft_bias_W)
        target = self.target_hidden_NE, linear_head(self.target_weight_VE)
        return loss_of(self.draft_hidden_ND, head, *target, divergence, self.weights_N, chunk_size, self.labels_N, **options)

    def unfused(self, name, labels=None, **options):
        """Return the loss and the values, from whole logits and ordinary autograd."""
        labels = self.labels_N if labels is None else labels
        logits = F.linear(self.target_hidden_NE, self.target_weight_VE), F.linear(*self.trained)
        names = {"jsd": {"beta": 0.9}, "total_variation": {}, "cross_entropy": {}} if name == "mix" else {name: {}}
        values = sum(
            (MIX[each] if name == "mix" else 1.0) * textbook(each, *logits, labels=labels, **options, **settings)
            for each, settings in names.items()
        )
        return (values * self.weights_N).sum(), values


def loss_of(hidden_ND, head, target_NE, target_head, divergence, weights_N, chunk_size, labels_N=None, **options):
    """Return the loss of one part that has all of the target's rows, and its statistics."""
    places_N = torch.arange(len(hidden_ND))
    rows = DraftRows(hidden_ND=hidden_ND, head=head, weights_N=weights_N, places_N=places_N, labels_N=labels_N)
    target = TargetRows(hidden_PE=target_NE, logits_of=target_head.logits_of)
    loss, (statistics,) = fused_loss(target, [rows], divergence, chunk_size=chunk_size, **options)
    return loss, statistics


def gradients(loss, inputs):
    return torch.autograd.grad(3.0 * loss, inputs)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("name", [*DIVERGENCES, "mix"])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "reduced"),
    [(torch.float64, 1e-12, False), (torch.float32, 1e-5, False), (torch.float64, 1e-12, True)],
)
def test_value_and_gradients_are_those_of_the_loss_in_one_piece(name, chunk_size, dtype, tolerance, reduced):
    inputs = Inputs(dtype, num_drafted=len(IDS_W) if reduced else VOCABULARY)
    divergence = configured_divergence(MIXED) if name == "mix" else DIVERGENCES[name]
    options = {"temperature": 1.7, "token_ids_W": IDS_W if reduced else None}
    expected, expected_values = inputs.unfused(name, labels=DRAFT_LABELS if reduced else None, **options)
    expected_gradients = gradients(expected, inputs.trained)
    loss, statistics = inputs.fused(divergence, chunk_size, **options)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    weighed = inputs.weights_N != 0
    torch.testing.assert_close(statistics.values_N[weighed], expected_values[weighed].detach(), rtol=tolerance, atol=tolerance)
    assert not any(tensor.requires_grad for tensor in statistics)
    for keep in (True, False):  # a second backward through a kept graph gives the same
        found_gradients = torch.autograd.grad(3.0 * loss, inputs.trained, retain_graph=keep)
        for ours, theirs in zip(found_gradients, expected_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@pytest.mark.parametrize("num_drafted", [VOCABULARY, len(IDS_W)])
def test_acceptance_and_top1_agreement_are_those_at_temperature_one(num_drafted):
    inputs = Inputs(num_drafted=num_drafted)
    inputs.weights_N[:] = 1
    ids_W = None if num_drafted == VOCABULARY else IDS_W
    _, found = inputs.fused(forward_kl, 2, temperature=4.0, token_ids_W=ids_W)
    q_NV = torch.zeros(ROWS, VOCABULARY, dtype=torch.float64)
    q_NV[:, torch.arange(VOCABULARY) if ids_W is None else ids_W] = F.linear(*inputs.trained).softmax(-1).detach()
    p_NV = F.linear(inputs.target_hidden_NE, inputs.target_weight_VE).softmax(-1)
    torch.testing.assert_close(found.acceptance_N, torch.minimum(p_NV, q_NV).sum(-1))
    assert torch.equal(found.top1_agrees_N, p_NV.argmax(-1) == q_NV.argmax(-1))


# --- heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [(0,), (1, 2)], ids=["a frozen head", "a frozen trunk"])
def test_frozen_parts_get_no_gradient_and_the_others_the_same_one(trained):
    inputs = Inputs()
    expected = gradients(inputs.unfused("forward_kl")[0], inputs.trained)
    for number, tensor in enumerate(inputs.trained):
        tensor.requires_grad_(number in trained)
    (3 * inputs.fused(forward_kl, 2)[0]).backward()
    for number, (tensor, gradient) in enumerate(zip(inputs.trained, expected, strict=True)):
        assert (tensor.grad is None) == (number not in trained)
        if number in trained:
            torch.testing.assert_close(tensor.grad, gradient)


# --- a reduced vocabulary's log-sums ------------------------------------------------------------------------------

HIDDEN_PE = torch.randn(8, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2


@pytest.mark.parametrize("name", sorted(checks.CONFIGS))
def test_rows_of_the_drafts_tokens_with_log_sums_over_all_give_the_same_loss(name):
    model, ids_W = checks.tiny_target(name), torch.tensor([0, 3, 17, 40, 63])
    logits_PV = head_logits(model, HIDDEN_PE)
    for chunk_size in (1, 3, 100):
        known = normalise(model, HIDDEN_PE, chunk_size=chunk_size)
        torch.testing.assert_close(known.log_sum_P, logits_PV.logsumexp(-1))
        assert torch.equal(known.top1_P, logits_PV.argmax(-1))
    head = linear_head(torch.randn(5, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    rows = DraftRows(hidden_ND=HIDDEN_PE, head=head, weights_N=torch.ones(8), places_N=torch.arange(8))
    targets = (
        TargetRows(hidden_PE=HIDDEN_PE, logits_of=model_head(model).logits_of),
        TargetRows(hidden_PE=HIDDEN_PE, logits_of=HeadRows.of(model, ids_W).logits, known=known),
    )
    for divergence in (forward_kl, DIVERGENCES["total_variation"]):
        (whole, (expected,)), (loss, (found,)) = (
            fused_loss(target, [rows], divergence, chunk_size=3, token_ids_W=ids_W) for target in targets
        )
        torch.testing.assert_close(loss, whole)
        torch.testing.assert_close(found, expected)


# --- precision ----------------------------------------------------------------------------------------------------


def test_under_bfloat16_autocast_it_computes_what_the_loss_in_one_piece_computes_there():
    inputs = Inputs(torch.float32)
    inputs.target_hidden_NE, inputs.target_weight_VE = inputs.target_hidden_NE.bfloat16(), inputs.target_weight_VE.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, _ = inputs.unfused("forward_kl")
        loss, _ = inputs.fused(forward_kl, 3)
    torch.testing.assert_close(loss, expected.float(), rtol=1e-6, atol=0)  # the same bfloat16 logits
    for ours, theirs in zip(gradients(loss, inputs.trained), gradients(expected, inputs.trained), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * theirs.abs().max().item())


def test_many_chunks_add_up_in_float32_where_the_head_is_bfloat16():
    num_rows = 768  # in bfloat16 a running sum stops growing after 256 equal terms
    hidden_ND = torch.ones(num_rows, 2, dtype=torch.bfloat16)
    weight_VD = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    target = linear_head(torch.tensor([[20.0, 20.0], [0, 0], [0, 0], [0, 0]], dtype=torch.bfloat16))
    loss, _ = loss_of(hidden_ND, linear_head(weight_VD), hidden_ND, target, forward_kl, torch.ones(num_rows), 1)
    (gradient,) = torch.autograd.grad(loss, weight_VD)
    assert gradient.dtype == torch.bfloat16
    assert gradient[0].tolist() == pytest.approx([-0.75 * num_rows] * 2, rel=0.01)


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
        loss_of(hidden_ND, heads[0], hidden_ND.detach(), heads[1], forward_kl, torch.ones(ROWS), 1)
        casts = [given for func, given, _ in operations.seen if func is torch.ops.aten._to_copy.default]
    assert casts.count((64, 32)) == 1 + ROWS * trained  # each chunk's gradient of a trained weight comes back to float32


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
    loss, _ = inputs.fused(forward_kl, 3)
    expected = gradients(loss, inputs.trained)
    inputs.draft_hidden_ND.data[[1, 4]] = 3.0
    inputs.target_hidden_NE[[1, 4]] = -2.0
    other, statistics = inputs.fused(forward_kl, 3)
    assert other.item() == loss.item()
    assert all(torch.equal(one, two) for one, two in zip(gradients(other, inputs.trained), expected, strict=True))
    assert statistics.values_N[[1, 4]].tolist() == statistics.acceptance_N[[1, 4]].tolist() == [0, 0]
    assert not statistics.top1_agrees_N[[1, 4]].any()


@pytest.mark.parametrize("num_rows", [0, ROWS])
def test_without_any_weighed_row_the_loss_is_zero_and_so_is_its_gradient(num_rows):
    inputs = Inputs()
    hidden_ND, weight_WD = inputs.draft_hidden_ND[:num_rows].detach().requires_grad_(), inputs.draft_weight_WD
    target = inputs.target_hidden_NE[:num_rows], linear_head(inputs.target_weight_VE)
    loss, _ = loss_of(hidden_ND, linear_head(weight_WD), *target, forward_kl, torch.zeros(num_rows), 4)
    loss.backward()
    assert loss.item() == 0
    for tensor in (hidden_ND, weight_WD):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_no_tensor_holds_the_logits_of_more_rows_than_a_chunk():
    with Operations() as operations:
        loss, _ = Inputs().fused(cross_entropy, 2)
        loss.backward()
    shapes = {shape for *_, made in operations.seen for shape in made}
    assert (2, VOCABULARY) in shapes
    assert (ROWS, VOCABULARY) not in shapes


# --- compiled -----------------------------------------------------------------------------------------------------


@pytest.fixture
def captured(monkeypatch):
    """Graphs are captured and run without being compiled further."""
    torch._dynamo.reset()
    fused._compiled.cache_clear()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **options: compile(run, **options, backend="eager"))
    yield
    torch._dynamo.reset()
    fused._compiled.cache_clear()


def compared(divergence, num_rows=ROWS, columns=11, ids_W=None, **options):
    target, draft = (random_logits(seed, size).float()[:num_rows] for seed, size in ((1, columns), (2, columns)))
    draft = draft if ids_W is None else draft[:, : len(ids_W)].contiguous()
    return compare(divergence, target, draft, torch.ones(num_rows), token_ids_W=ids_W, **options)


@pytest.mark.parametrize("ids_W", [None, torch.arange(3)], ids=["whole", "reduced"])
def test_a_compiled_chunk_is_one_graph_with_the_same_values_and_gradients(ids_W, captured):
    divergence = configured_divergence(LossConfig(divergence={name: 0.3 + 0.1 * n for n, name in enumerate(DIVERGENCES)}))
    labels = torch.tensor([0, 2, 1, -1, 2, 0, 2])
    for num_rows in (ROWS, 3):  # the last chunk of a batch is a shorter one
        (found, gradient), (expected, their_gradient) = (
            compared(divergence, num_rows, ids_W=ids_W, labels_C=labels[:num_rows], temperature=2.0, compiled=compiled)
            for compiled in (True, False)
        )
        for one, other in zip((*found, gradient), (*expected, their_gradient), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("columns", [11, 2 * BLOCK])
def test_chunks_of_any_number_of_rows_and_divergences_made_anew_share_a_few_graphs(columns, captured):
    """Beyond a limit of graphs torch.compile ends the run."""
    counters.clear()
    for num_rows in (7, 7, 5, 7, 3, 1, 2, 6, 4, 7, 5):
        divergence = configured_divergence(LossConfig(divergence={"forward_kl": 1.0, "total_variation": 0.5}))
        compared(divergence, num_rows, columns, compiled=True)
    assert counters["stats"]["unique_graphs"] <= 4


@pytest.mark.parametrize(
    ("has_compiler", "columns", "is_compiled"), [(True, 1024, True), (True, 1023, False), (False, 1024, False)]
)
def test_the_loss_of_a_large_vocabulary_is_compiled_where_there_is_a_compiler(
    has_compiler, columns, is_compiled, captured, monkeypatch
):
    monkeypatch.setattr(fused, "has_compiler", lambda device: has_compiler)
    counters.clear()
    compared(forward_kl, columns=columns)
    assert counters["stats"]["unique_graphs"] == is_compiled
