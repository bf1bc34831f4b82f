"""The objective of heads against the same thing written out row by row, from whole rows of logits in float64."""

import math

import pytest
import torch
from torch import nn

from configs.schema.training import LossConfig
from distill.loss.objectives import HeadObjective
from heads.frozen.hidden_states import read_states
from heads.inference.causal_lm import head_logits
from heads.modules.interface import NO_DOCUMENT, Batch, Depth, labelled_origins

WIDTH, NUM_DEPTHS, VOCAB_SIZE = 6, 3, 64
IDS_W = torch.tensor([1, 4, 9, 14, 33, 57, 60, 63])  # three of them are what the target below likes best, now and then
# Two conversations in the first row, of which parts are the target's; one with padding in the second.
DOCUMENTS_BT = torch.tensor([[0] * 7 + [1] * 5, [0] * 9 + [-1] * 3])
LABELS = [[2, 3, 4, 5, 6, 8, 9, 10, 11], [2, 3, 5, 6, 7, 8]]
REDUCED = pytest.mark.parametrize("token_ids_W", [None, IDS_W], ids=["whole vocabulary", "reduced vocabulary"])


class RandomHead(nn.Module):
    """Says something random, but always the same, at every place and depth."""

    taps = ()
    weighs_by_acceptance = False

    def __init__(self, token_ids_W=None, *, row_weights=False, confidence=False, keep=lambda depth, origins_N: origins_N):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        num_tokens = VOCAB_SIZE if token_ids_W is None else len(token_ids_W)
        self.token_ids_W, self.keep, self.confidence = token_ids_W, keep, confidence
        self.states_KPD = nn.Parameter(torch.randn(NUM_DEPTHS, 24, WIDTH, generator=generator, dtype=torch.float64))
        self.weight_WD = nn.Parameter(torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64))
        self.row_weights_KP = torch.rand(NUM_DEPTHS, 24, generator=generator).double() if row_weights else None

    def forward(self, batch, states):
        depths = []
        for depth in range(NUM_DEPTHS):
            origins_N = self.keep(depth, labelled_origins(batch, depth))
            depths.append(
                Depth(
                    hidden_ND=self.states_KPD[depth, origins_N],
                    origins_N=origins_N,
                    target_places_N=origins_N + depth + 1,
                    logits_of=lambda hidden_CD: hidden_CD @ self.weight_WD.T,
                    parameters=(self.weight_WD,),
                    weight=0.5**depth,
                    row_weights_N=None if self.row_weights_KP is None else self.row_weights_KP[depth, origins_N],
                    confidence_N=self.states_KPD[depth, origins_N].sum(-1) if self.confidence else None,
                    confidence_weight=0.7,
                )
            )
        return depths


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=2, spread=4.0))


def make_batch():
    ids_BT = torch.randint(1, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.zeros(2, 12, dtype=torch.bool)
    for row, places in enumerate(LABELS):
        mask_BT[row, places] = True
    return Batch(
        input_ids_BT=ids_BT,
        loss_mask_BT=mask_BT,
        position_ids_BT=torch.arange(12).expand(2, -1),
        document_ids_BT=DOCUMENTS_BT,
        conversations_BC=torch.tensor([[0, 1], [2, NO_DOCUMENT]]),
    )


BATCH = make_batch()


@pytest.fixture(scope="module")
def states(target):
    return read_states(target.model, BATCH.input_ids_BT, ())


def origins_by_hand(depth):
    """Return the flat origins b * 12 + j whose label x_{j+2+depth} is the target's and of the same document."""
    found = []
    for row, places in enumerate(LABELS):
        for label in places:
            origin = label - 2 - depth
            if origin >= 0 and DOCUMENTS_BT[row, origin] == DOCUMENTS_BT[row, label]:
                found.append(row * 12 + origin)
    return found


def distributions(head, states, target, depth, place):
    """Return the target's distribution over all V tokens and the head's, 0 where it cannot speak, for one origin."""
    judged = place + depth + 1
    p_V = head_logits(target.model, states.final_BTE.flatten(0, 1)[judged]).detach().softmax(-1)
    q_W = (head.weight_WD @ head.states_KPD[depth, place]).softmax(-1)
    if head.token_ids_W is None:
        return p_V, q_W
    return p_V, torch.zeros_like(p_V).index_put((head.token_ids_W,), q_W)


def naive_value(name, p_V, q_V, judged):
    can_say = q_V > 0
    if name == "forward_kl":  # what the draft cannot say it cannot learn: p among the tokens of the draft
        within = p_V[can_say] / p_V[can_say].sum()
        return (within * (within / q_V[can_say]).log()).sum()
    if name == "total_variation":
        return (p_V - q_V).abs().sum() / 2
    if name == "negative_log_acceptance":
        return -torch.minimum(p_V, q_V).sum().log()
    label = BATCH.input_ids_BT.flatten()[judged + 1]
    return -q_V[label].log() if can_say[label] else torch.zeros(())


@REDUCED
@pytest.mark.parametrize("name", ["forward_kl", "total_variation", "negative_log_acceptance", "cross_entropy"])
@pytest.mark.parametrize("row_weights", [False, True], ids=["rows alike", "weighted rows"])
def test_value_and_gradient_are_those_of_the_sum_written_out(target, states, name, token_ids_W, row_weights):
    head = RandomHead(token_ids_W, row_weights=row_weights)
    config = LossConfig(divergence=name, chunk_size=3)
    found = HeadObjective(head, target, config)(BATCH, states)
    expected, values = torch.zeros((), dtype=torch.float64), []
    for depth in range(NUM_DEPTHS):
        values.append(0.0)
        seen = [overlap_and_agreement(head, states, target, depth, place) for place in origins_by_hand(depth)]
        assert found.labels_K[depth] == len(seen)
        assert float(found.acceptance_K[depth]) == pytest.approx(sum(overlap for overlap, _ in seen), rel=1e-5)
        assert found.agrees_K[depth] == sum(agrees for _, agrees in seen)
        for place in origins_by_hand(depth):
            value = naive_value(name, *distributions(head, states, target, depth, place), place + depth + 1)
            row_weight = head.row_weights_KP[depth, place] if row_weights else 1.0
            expected = expected + 0.5**depth / 1.75 * row_weight * value
            values[-1] += float(value.detach())
    torch.testing.assert_close(found.loss.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.values_K.double(), torch.tensor(values, dtype=torch.float64), atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(loss, list(head.parameters())) for loss in (found.loss, expected))
    for gradient, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)


@REDUCED
def test_a_block_weighs_its_rows_by_the_chances_of_being_accepted_so_far(target, states, token_ids_W):
    head = RandomHead(token_ids_W)
    head.weighs_by_acceptance = True
    objective = HeadObjective(head, target, LossConfig(divergence="forward_kl", chunk_size=3))
    found, expected = objective(BATCH, states), torch.zeros((), dtype=torch.float64)
    for place in origins_by_hand(0):
        smoothed, values = [], []
        for depth in range(NUM_DEPTHS):
            if place not in origins_by_hand(depth):
                break  # what is drafted after the end of an answer weighs nothing
            p_V, q_V = distributions(head, states, target, depth, place)
            smoothed.append((1 + float(torch.minimum(p_V, q_V).sum().detach())) / 2)
            values.append(0.5**depth / 1.75 * naive_value("forward_kl", p_V, q_V, place + depth + 1))
        for depth, value in enumerate(values):
            expected = expected + value * sum(math.prod(smoothed[: end + 1]) for end in range(depth, len(values)))
    torch.testing.assert_close(found.loss.double(), expected, atol=1e-6, rtol=1e-6)
    ours, theirs = (torch.autograd.grad(loss, list(head.parameters())) for loss in (found.loss, expected))
    for gradient, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)
    # Held-out rows all weigh the same.
    head.weighs_by_acceptance = False
    plain = objective.eval()(BATCH, states).loss
    head.weighs_by_acceptance = True
    torch.testing.assert_close(objective(BATCH, states).loss, plain)


@torch.no_grad()
def overlap_and_agreement(*place):
    p_V, q_V = distributions(*place)
    return float(torch.minimum(p_V, q_V).sum()), bool(p_V.argmax() == q_V.argmax())


def drop(depth, origins_N):
    """Leave out some origins at depths 1 and 2, not the same ones, as sampling of origins does."""
    return origins_N[origins_N % (4 + depth) != 1] if depth else origins_N


@REDUCED
@pytest.mark.parametrize("keep", [lambda depth, origins_N: origins_N, drop], ids=["all", "some"])
def test_chains_are_followed_from_the_origins_that_drafting_starts_from(target, states, token_ids_W, keep):
    head = RandomHead(token_ids_W, keep=keep)
    with torch.no_grad():  # a head that often agrees, so that chains are longer than a step
        head.states_KPD[:] = head.states_KPD * 0.1
        head.weight_WD /= head.weight_WD.norm(dim=-1, keepdim=True)  # so that a state is likest to its own row
        for depth in range(NUM_DEPTHS):
            for place in labelled_origins(BATCH, depth).tolist():
                liked = int(
                    distributions(head, states, target, depth, place)[0][... if token_ids_W is None else token_ids_W].argmax()
                )
                if place % 3:
                    head.states_KPD[depth, place] += 3 * head.weight_WD[liked] / head.weight_WD[liked].square().sum().sqrt()
    found = HeadObjective(head, target, LossConfig(chunk_size=4))(BATCH, states)
    kept = [set(keep(depth, labelled_origins(BATCH, depth)).tolist()) for depth in range(NUM_DEPTHS)]
    origins, agreed, reached = ([0.0] * NUM_DEPTHS for _ in range(3))
    accepted = [0] * 24
    for row, places in enumerate(LABELS):
        for place in (row * 12 + label - 1 for label in places):  # the pending token is an answer's
            agrees = True
            for depth in range(NUM_DEPTHS):
                if place not in kept[depth]:
                    break
                _, agrees_here = overlap_and_agreement(head, states, target, depth, place)
                origins[depth] += 1
                reached[depth] += agrees
                agrees = agrees and agrees_here
                agreed[depth] += agrees
                accepted[place] += agrees
    assert found.origins_K.tolist() == origins
    assert found.joint_agrees_K.tolist() == agreed
    assert found.reached_K.tolist() == reached
    assert found.accepted_P.tolist() == accepted
    assert 0 < agreed[2] < agreed[0]
    assert max(accepted) == 3


def test_a_head_that_all_depths_share_has_one_gradient_until_the_backward(target, states):
    head, kept = RandomHead(None), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        HeadObjective(head, target, LossConfig(chunk_size=3))(BATCH, states)
    assert kept.count(head.weight_WD.shape) == 1


def test_a_temperature_divides_both_sides_also_of_a_reduced_vocabulary(target, states):
    head = RandomHead(IDS_W)
    found = HeadObjective(head, target, LossConfig(temperature=2.0))(BATCH, states)
    expected = 0.0
    for place in origins_by_hand(0):
        logits_V = head_logits(target.model, states.final_BTE.flatten(0, 1)[place + 1]).detach() / 2
        p_W = logits_V[IDS_W].softmax(-1)
        q_W = (head.weight_WD @ head.states_KPD[0, place] / 2).detach().softmax(-1)
        expected += 4 * float((p_W * (p_W / q_W).log()).sum())
    assert float(found.values_K[0]) == pytest.approx(expected, rel=1e-5)


def test_a_heads_guess_of_its_acceptance_is_trained_beside_the_divergence(target, states):
    plain, guessing = (
        HeadObjective(RandomHead(IDS_W, confidence=confidence), target, LossConfig())(BATCH, states).loss
        for confidence in (False, True)
    )
    head, expected = RandomHead(IDS_W), 0.0
    for depth in range(NUM_DEPTHS):
        for place in origins_by_hand(depth):
            overlap, _ = overlap_and_agreement(head, states, target, depth, place)
            guess = float(head.states_KPD.detach()[depth, place].sum().sigmoid())
            expected -= 0.7 * 0.5**depth / 1.75 * (overlap * math.log(guess) + (1 - overlap) * math.log(1 - guess))
    assert float((guessing - plain).detach()) == pytest.approx(expected, rel=1e-4)
