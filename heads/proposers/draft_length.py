"""How many tokens to draft: rules that end a round's draft early, row by row, and leave the output's distribution alone.

A rule sees each distribution before a token is drawn from it, or the draft's own estimate of its acceptance, and never the
token. It says whether a token of this distribution is worth one of the target's rows, and whether a further draft step is worth
its time. A rule that saw the token would bias the output: let p = q put 1/2 on each of a and b, and drop b when it is drawn;
then a comes out with probability 1/2 + 1/2 * 1/2 = 3/4. Tokens drafted earlier may be seen, since they are in the block.

This is enough for token-wise rejection: given that the drafts before position i were kept, both "draw from q_i, test, take the
residual" and "draft nothing, take the target's own token" put p_i there. For block verification the chance that a prefix is
kept, given its tokens, is its P_i (`eval.decoder.chain_rules`), by induction from the end where drafting went on and by
definition where it did not. `tests/eval/decoder/test_stopping.py` enumerates both.

Rows decide for themselves, so that a request gets the same tokens in any batch.
B batch, V vocabulary of the draft, K further drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from configs.schema.decoding import DecodeConfig, SamplingConfig
from configs.schema.drafting import CalibrationPoint, ConfidenceStopping, CostStopping, EntropyStopping
from heads.uploads import constant


class StopDecision(NamedTuple):
    """A rule's decision about one distribution, bool by row."""

    drafts_B: Tensor  # a token drawn from this distribution is worth a row of the target's
    continues_B: Tensor  # and after it, a further draft step is worth its time


def rule_for(sampling: SamplingConfig) -> ThresholdRule | CostRule | None:
    """Return a rule for one round; None: draft to the full length.

    Proposers get a decoder's settings as the sampling they draft by; other sampling settings have no rule.
    """
    stopping = sampling.stopping if isinstance(sampling, DecodeConfig) else None
    if isinstance(stopping, ConfidenceStopping):
        minimum = stopping.threshold
        return ThresholdRule(lambda probs_BV: confidence(probs_BV) < minimum)
    if isinstance(stopping, EntropyStopping):
        maximum = stopping.threshold  # nats
        return ThresholdRule(lambda probs_BV: torch.special.entr(probs_BV).sum(-1) > maximum)
    if isinstance(sampling, DecodeConfig) and isinstance(stopping, CostStopping):
        return CostRule(stopping, sampling.num_speculative_tokens)
    return None


def reads_estimate(sampling: SamplingConfig) -> bool:
    """Return whether the rule in force reads the draft's own estimate of its acceptance in place of the distribution."""
    return isinstance(sampling, DecodeConfig) and getattr(sampling.stopping, "by", None) == "estimate"


def sampling_for_stopping(sampling: SamplingConfig) -> SamplingConfig:
    """Return the sampling of the distributions that rules see: that of the drafts, at temperature 1 where drafts are greedy."""
    return sampling if sampling.temperature else sampling.model_copy(update={"temperature": 1.0})


def confidence(distribution: Tensor) -> Tensor:
    """Return the largest probability `[...]` of distributions `[..., V]`."""
    return distribution.amax(-1)


class ThresholdRule:
    """Stop after the first distribution that is unsure.

    That distribution's own token is drafted too: the step that made the distribution is paid for, and the token costs only a
    row. By entropy this is the idea of SVIP (arXiv 2411.18462), which stops before that token.

    Args:
        is_unsure: gives bool `[B]` of distributions `[B, V]`.
    """

    def __init__(self, is_unsure: Callable[[Tensor], Tensor]) -> None:
        self.is_unsure = is_unsure

    def decide(self, probs_BV: Tensor) -> StopDecision:
        """Decide by the distributions `[B, V]` that the next token would be drawn from.

        Called once for each draft position of a round, in order. A distribution of NaN never stops a row: the decoder has to
        see and report it.
        """
        unsure_B = self.is_unsure(probs_BV)
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

    def decide(self, probs_BV: Tensor) -> StopDecision:
        """See `ThresholdRule.decide`."""
        self._step += 1
        acceptance_B = calibrated(self.costs.calibration, confidence(probs_BV))
        self._alive_B = acceptance_B if self._alive_B is None else self._alive_B * acceptance_B
        gains, costs = self._ahead(self._step)
        gains_K, costs_K = (constant(tuple(each), probs_BV.dtype, probs_BV.device) for each in (gains, costs))
        worth_BK = self._alive_B.unsqueeze(-1) * gains_K - self.rho * costs_K
        ahead_B = worth_BK.amax(-1).clamp(min=0)
        row_cost = self.rows[self._step] - self.rows[self._step - 1]
        # Written as negations: a distribution of NaN stops nothing.
        drafts_B = ~(self._alive_B - self.rho * row_cost + ahead_B <= 0)
        return StopDecision(drafts_B, drafts_B & ~(ahead_B <= 0))

    def _ahead(self, drafted: int) -> tuple[list[float], list[float]]:
        """Return a + ... + a^k and the cost of k more drafts in milliseconds, for k = 0, 1, ..., after `drafted` drafts."""
        counts = range(len(self.rows) - drafted)
        gains = list(accumulate(self.costs.acceptance**k for k in counts[1:]))
        step = self.costs.draft_step_milliseconds
        return [0.0, *gains], [k * step + self.rows[drafted + k] - self.rows[drafted] for k in counts]


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
