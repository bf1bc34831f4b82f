"""A chain of drafts from a family's logits: the choice of each token, its distribution, and rules that end a round early.

Every family drafts through this, so that verification gets the very distribution that was drawn from, draws use `Role.DRAFT` in
the round named by the row's length, and each row ends by the decoder's stopping rule. A family that drafts one token after
another stops when all rows are `finished`; one that has all distributions from a single forward adds them all.

A stopping rule sees each distribution before a token is drawn from it, or the draft's own estimate of its acceptance, and never
the token, which would bias the output: let p = q put 1/2 on each of a and b, and drop b when it is drawn; then a comes out with
probability 3/4. Given that the drafts before position i were kept, both "draw from q_i, test, take the residual" and "draft
nothing, take the target's own token" put p_i there; `tests/eval/decoder/test_stopping.py` enumerates this, also for block
verification. Rows decide for themselves, so that a request gets the same tokens in any batch. Counts that are mixed in
(`heads.proposers.counted`) change the distribution before anything sees it.
B batch, G drafts, K further drafts, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, SamplingConfig
from configs.schema.drafting import CalibrationPoint, ConfidenceStopping, CostStopping, EntropyStopping
from heads.device import RowNumbers, constant
from heads.proposers.counted import counted_here, mixed
from heads.proposers.protocol import Proposal
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, greedy_token, token_probabilities
from heads.vocabulary import DraftVocabulary, target_ids

AT_ONCE = 8  # drafts whose random numbers are made together, where nothing says how many there will be


class ChainBuilder:
    """A proposal of chains, one draft a row for each call of `add`.

    `lengths` are tokens by row, the pending one included: the first draft stands at that position. `sampling` is the
    distribution to draft by, and in a decoder's settings when to stop; `vocabulary` the tokens of logits, None: the target's.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sampling: SamplingConfig,
        rng: CounterRNG,
        vocabulary: DraftVocabulary | None,
        *,
        keep_logits: bool,
    ) -> None:
        self.sampling, self.rng, self.keep_logits = sampling, rng, keep_logits
        self.vocabulary = vocabulary
        self.lengths, self.device = lengths, rng.device
        self._counted = counted_here()
        self._rule = rule_for(sampling)
        at_1 = self._rule is not None and sampling.temperature == 0  # rules see greedy drafts' distributions at temperature 1
        self._shown = sampling.model_copy(update={"temperature": 1.0}) if at_1 else sampling
        self._open_B = torch.ones(len(self.lengths), dtype=torch.bool, device=self.device)  # rows that still draft
        self._num_drafted_B = torch.zeros(len(self.lengths), dtype=torch.int64, device=self.device)
        self._uniform_BG: Tensor | None = None
        self._drafted: list[Tensor] = []
        self._distributions: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._estimates: list[Tensor] = []

    def add(self, logits_BW: Tensor, estimate_B: Tensor | None = None) -> Tensor:
        """Choose the next draft of every row from its logits; return the target's ids `[B]`.

        Rows that have stopped get one too, which does not count. `estimate_B` is the draft's own estimate of its acceptance
        (`Proposal.estimates_BG`), if it makes one.
        """
        step, greedy = len(self._drafted), self.sampling.temperature == 0
        mixture = mixed(logits_BW, self.vocabulary, self._counted, self.sampling.temperature)
        logits_BW = mixture.logits
        if self._rule is not None or not greedy:
            probs_BW = token_probabilities(logits_BW, self._shown)
        if self._rule is not None:
            drafts_B, continues_B = self._rule.decide(probs_BW, estimate_B)
            self._num_drafted_B += self._open_B & drafts_B
            self._open_B &= continues_B
        chosen_B = greedy_token(logits_BW) if greedy else self._drawn(step, probs_BW)
        drafted_B = mixture.target_ids(chosen_B)
        if not greedy:
            self._distributions.append(mixture.over_target(probs_BW, 0.0))
        self._drafted.append(drafted_B)
        if self._counted is not None:
            self._counted.follow(drafted_B.unsqueeze(1), torch.zeros_like(drafted_B).unsqueeze(1))
        if self.keep_logits:
            self._logits.append(mixture.over_target(logits_BW, float("-inf")))
        if estimate_B is not None:
            self._estimates.append(estimate_B)
        return drafted_B

    def peek(self, logits_BGW: Tensor) -> Tensor:
        """Return the target's ids `[B, G]` that `add` would choose from these logits for the first G drafts; adds none.

        Counts are not mixed in.
        """
        if self.sampling.temperature == 0:
            return target_ids(self.vocabulary, greedy_token(logits_BGW))
        probs_BGW = token_probabilities(logits_BGW, self.sampling)
        drawn = [self._drawn(step, probs_BW) for step, probs_BW in enumerate(probs_BGW.unbind(1))]
        return target_ids(self.vocabulary, torch.stack(drawn, 1))

    @property
    def finished(self) -> bool:
        """Whether every row has stopped. With a stopping rule this waits for the device."""
        return self._rule is not None and not bool(self._open_B.any())

    def proposal(self) -> Proposal:
        """Return the drafts: a token a row for each call of `add`, fewer where the row stopped."""
        num_drafted = RowNumbers.alike(len(self._drafted), len(self.lengths), self.device)
        if self._rule is not None:
            num_drafted = RowNumbers(self._num_drafted_B.tolist(), self.device, lambda: self._num_drafted_B)
        width = max(num_drafted)  # the target computes every column, drafted or not
        probs, logits, estimates = (
            torch.stack(each[:width], 1) if each[:width] else None
            for each in (self._distributions, self._logits, self._estimates)
        )
        return Proposal(
            tokens_BG=torch.stack(self._drafted, 1)[:, :width],
            num_drafted=num_drafted,
            probs_BGV=probs,
            logits_BGV=logits,
            estimates_BG=estimates,
        )

    def _drawn(self, step: int, probs_BW: Tensor) -> Tensor:
        if self._uniform_BG is None or step >= self._uniform_BG.shape[1]:  # in one copy for most rounds
            asked = self.sampling.num_speculative_tokens if isinstance(self.sampling, DecodeConfig) else AT_ONCE
            self._uniform_BG = self.rng.along(Role.DRAFT, self.lengths, max(asked, 2 * step), self.lengths)
        return draw(probs_BW, self._uniform_BG[:, step])


class StopDecision(NamedTuple):
    """A rule's decision about one distribution, bool by row."""

    drafts_B: Tensor  # a token drawn from this distribution is worth a row of the target's
    continues_B: Tensor  # and after it, a further draft step is worth its time


def rule_for(sampling: SamplingConfig) -> ThresholdRule | CostRule | None:
    """Return a rule for one round; None: draft to the full length, as by sampling settings that are no decoder's."""
    stopping = sampling.stopping if isinstance(sampling, DecodeConfig) else None
    if isinstance(sampling, DecodeConfig) and isinstance(stopping, CostStopping):
        return CostRule(stopping, sampling.num_speculative_tokens)
    return ThresholdRule(stopping) if isinstance(stopping, ConfidenceStopping | EntropyStopping) else None


def confidence(distribution: Tensor) -> Tensor:
    """Return the largest probability `[...]` of distributions `[..., V]`."""
    return distribution.amax(-1)


def _confidence_by(by: str, probs_BW: Tensor, estimate_B: Tensor | None) -> Tensor:
    """Return the confidence `[B]` that a rule reads."""
    if by == "distribution":
        return confidence(probs_BW)
    if estimate_B is None:
        raise InputError(
            "decode.stopping.by is estimate, and this draft makes no estimate of its acceptance (dspark does): set it to "
            "distribution"
        )
    return estimate_B


class ThresholdRule:
    """Stop after the first distribution that is unsure: of less confidence, or more entropy in nats, than the threshold.

    That distribution's own token is drafted too: the step that made the distribution is paid for, and the token costs only a
    row. By entropy this is the idea of SVIP (arXiv 2411.18462), which stops before that token.
    """

    def __init__(self, stopping: ConfidenceStopping | EntropyStopping) -> None:
        self.stopping = stopping

    def decide(self, probs_BW: Tensor, estimate_B: Tensor | None = None) -> StopDecision:
        """Decide by the distributions `[B, W]` that the next token would be drawn from, or the draft's estimates.

        Called once for each draft position of a round, in order. A distribution of NaN never stops a row: the decoder has to
        see and report it.
        """
        if isinstance(self.stopping, EntropyStopping):
            unsure_B = torch.special.entr(probs_BW).sum(-1) > self.stopping.threshold
        else:
            unsure_B = _confidence_by(self.stopping.by, probs_BW, estimate_B) < self.stopping.threshold
        return StopDecision(torch.ones_like(unsure_B), ~unsure_B)


class CostRule:
    """Draft on while the tokens to be expected are worth their time.

    Rounds follow one another, so what decoding maximises is E[tokens of a round] / E[time of a round]. Its best value rho is
    the price of time: the best policy also maximises E[tokens] - rho E[time], round by round (Dinkelbach 1967; the renewal
    reward theorem), and there each decision stands alone.

    Draft j is kept if it and all before it are accepted. With c_j the calibrated confidence of distribution j, that is
    A_j = c_1 ... c_j, the tokens to be expected are 1 + A_1 + ... + A_g, and the time is o + g d + t(g + 1), where o is the
    overhead of a round, d a draft step and t(n) a target step on n rows. Of k further drafts, whose distributions are not
    known yet and are accepted at the mean rate a, the worth after i drafts is

        W_i(k) = A_i (a + ... + a^k) - rho (k d + t(i + 1 + k) - t(i + 1)),    W_i = max(0, max_k W_i(k)).

    The step of distribution i is paid for once it is known. Its token is drafted if A_i - rho (t(i + 1) - t(i)) + W_i > 0, and
    a further step follows if W_i > 0. The maximum over k looks across the stairs that t(n) has on real machines. The rule is
    one step of policy improvement over the fixed lengths: with true costs it is worth no less than the best of them.
    """

    def __init__(self, costs: CostStopping, num_drafts: int) -> None:
        self.costs = costs
        self.rho = tokens_per_millisecond(costs, num_drafts)
        self.rows = costs.target_step_milliseconds[: num_drafts + 1]
        self._step = 0
        self._alive_B: Tensor | None = None

    def decide(self, probs_BW: Tensor, estimate_B: Tensor | None = None) -> StopDecision:
        """See `ThresholdRule.decide`."""
        self._step += 1
        acceptance_B = calibrated(self.costs.calibration, _confidence_by(self.costs.by, probs_BW, estimate_B))
        self._alive_B = acceptance_B if self._alive_B is None else self._alive_B * acceptance_B
        # a + ... + a^k and the cost of k more drafts in milliseconds, for k = 0, 1, ...
        counts = range(len(self.rows) - self._step)
        gains = 0.0, *accumulate(self.costs.acceptance**k for k in counts[1:])
        costs = (k * self.costs.draft_step_milliseconds + self.rows[self._step + k] - self.rows[self._step] for k in counts)
        gains_K, costs_K = (constant(tuple(each), acceptance_B.dtype, acceptance_B.device) for each in (gains, costs))
        ahead_B = (self._alive_B.unsqueeze(-1) * gains_K - self.rho * costs_K).amax(-1).clamp(min=0)
        row_cost = self.rows[self._step] - self.rows[self._step - 1]
        # Written as negations: a distribution of NaN stops nothing.
        drafts_B = ~(self._alive_B - self.rho * row_cost + ahead_B <= 0)
        return StopDecision(drafts_B, drafts_B & ~(ahead_B <= 0))


def tokens_per_millisecond(costs: CostStopping, num_drafts: int) -> float:
    """Return the price of time: as configured, or the rate of the best fixed length up to `num_drafts` at mean acceptance."""
    if costs.tokens_per_second is not None:
        return costs.tokens_per_second / 1000
    rows, step = costs.target_step_milliseconds, costs.draft_step_milliseconds
    tokens = accumulate(costs.acceptance**k for k in range(num_drafts + 1))
    return max(count / (costs.round_milliseconds + k * step + rows[k]) for k, count in enumerate(tokens))


def calibrated(points: Sequence[CalibrationPoint], confidence_B: Tensor) -> Tensor:
    """Return the acceptance at each confidence, interpolated linearly between the points and constant beyond them."""
    pairs = tuple(point.confidence for point in points), tuple(point.acceptance for point in points)
    x, y = (constant(values, confidence_B.dtype, confidence_B.device) for values in pairs)
    if len(points) == 1:
        return torch.where(confidence_B.isnan(), confidence_B, y)
    right_B = torch.bucketize(confidence_B, x).clamp(1, len(points) - 1)
    share_B = ((confidence_B - x[right_B - 1]) / (x[right_B] - x[right_B - 1])).clamp(0, 1)
    return torch.lerp(y[right_B - 1], y[right_B], share_B)
