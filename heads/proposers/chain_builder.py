"""A chain of drafts from a family's logits: the choice of each token, its distribution, and a rule that ends a round early.

Every family drafts through this, so that verification gets the very distribution that was drawn from, draws use `Role.DRAFT` in
the round named by the row's length, and each row ends by the decoder's stopping rule. A family that drafts one token after
another stops when all rows are `finished`; one that has all distributions from a single forward adds them all.

A row ends with the first token whose distribution is less confident than the rule's threshold: the step that made it is paid
for, and the token costs only a row. The rule sees each distribution before a token is drawn from it, or the draft's own
estimate of its acceptance, and never the token, which would bias the output: let p = q put 1/2 on each of a and b, and drop b
when it is drawn; then a comes out with probability 3/4. Given that the drafts before position i were kept, both "draw from q_i,
test, take the residual" and "draft nothing, take the target's own token" put p_i there; `tests/eval/decoder/test_rules.py`
enumerates this, also for block verification. Rows decide for themselves: a request gets the same tokens in any batch.
B batch, G drafts, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, SamplingConfig
from configs.schema.drafting import ConfidenceStopping
from heads.device import RowInts
from heads.proposers.protocol import Proposal, RoundInputs
from heads.sampling.probabilities import draw, greedy_token, token_probabilities
from heads.vocabulary import DraftVocabulary, over_target, target_ids


class ChainBuilder:
    """A proposal of chains, one draft a row for each call of `add`.

    `sampling` is the distribution to draft by, and in a decoder's settings when to stop; `vocabulary` the tokens of logits,
    None: the target's.
    """

    def __init__(
        self,
        inputs: RoundInputs,
        sampling: SamplingConfig,
        vocabulary: DraftVocabulary | None,
        *,
        keep_logits: bool,
    ) -> None:
        self.sampling, self.keep_logits, self.vocabulary = sampling, keep_logits, vocabulary
        self.uniforms, self.device = inputs.uniforms, inputs.rng.device
        self._stopping = sampling.stopping if isinstance(sampling, DecodeConfig) else None
        at_1 = self._stopping is not None and sampling.temperature == 0  # the rule sees greedy drafts' distributions at 1
        self._shown = sampling.model_copy(update={"temperature": 1.0}) if at_1 else sampling
        num_rows = len(inputs.tokens)
        self._open_B = torch.ones(num_rows, dtype=torch.bool, device=self.device)  # rows that still draft
        self._num_drafted_B = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self._drafted: list[Tensor] = []
        self._distributions: list[Tensor] = []
        self._logits: list[Tensor] = []

    def add(self, logits_BW: Tensor, estimate_B: Tensor | None = None) -> Tensor:
        """Choose the next draft of every row from its logits; return the target's ids `[B]`.

        Rows that have stopped get one too, which does not count. `estimate_B` is the draft's own estimate that the token is
        accepted where those before it are, made before it was drawn, if it makes one.
        """
        step, greedy = len(self._drafted), self.sampling.temperature == 0
        if self._stopping is not None or not greedy:
            probs_BW = token_probabilities(logits_BW, self._shown)
        if self._stopping is not None:
            self._num_drafted_B += self._open_B
            self._open_B &= ~self._is_unsure(self._stopping, probs_BW, estimate_B)
        chosen_B = greedy_token(logits_BW) if greedy else self._drawn(step, probs_BW)
        drafted_B = target_ids(self.vocabulary, chosen_B)
        if not greedy:
            self._distributions.append(over_target(self.vocabulary, probs_BW, 0.0))
        self._drafted.append(drafted_B)
        if self.keep_logits:
            self._logits.append(over_target(self.vocabulary, logits_BW, float("-inf")))
        return drafted_B

    def peek(self, logits_BGW: Tensor) -> Tensor:
        """Return the target's ids `[B, G]` that `add` would choose from these logits for the first G drafts; adds none."""
        if self.sampling.temperature == 0:
            return target_ids(self.vocabulary, greedy_token(logits_BGW))
        probs_BGW = token_probabilities(logits_BGW, self.sampling)
        drawn = [self._drawn(step, probs_BW) for step, probs_BW in enumerate(probs_BGW.unbind(1))]
        return target_ids(self.vocabulary, torch.stack(drawn, 1))

    @property
    def finished(self) -> bool:
        """Whether every row has stopped. With a stopping rule this waits for the device."""
        return self._stopping is not None and not bool(self._open_B.any())

    def proposal(self) -> Proposal:
        """Return the drafts: a token a row for each call of `add`, fewer where the row stopped."""
        num_drafted = RowInts.full(len(self._drafted), len(self._open_B), self.device)
        if self._stopping is not None:
            num_drafted = RowInts(self._num_drafted_B.tolist(), self._num_drafted_B)
        width = max(num_drafted.host)  # the target computes every column, drafted or not
        probs, logits = (torch.stack(each[:width], 1) if each else None for each in (self._distributions, self._logits))
        return Proposal(
            tokens_BG=torch.stack(self._drafted, 1)[:, :width],
            num_drafted=num_drafted,
            probs_BGV=probs,
            logits_BGV=logits,
        )

    def _is_unsure(self, stopping: ConfidenceStopping, probs_BW: Tensor, estimate_B: Tensor | None) -> Tensor:
        """Return which rows end with the token of this distribution; not those of NaN, which the decoder has to see."""
        sure_B = probs_BW.amax(-1) if stopping.by == "distribution" else estimate_B
        if sure_B is None:
            raise InputError(
                "decode.stopping.by is estimate, and this draft makes no estimate of its acceptance (dspark does): set it to "
                "distribution"
            )
        return sure_B < stopping.threshold

    def _drawn(self, step: int, probs_BW: Tensor) -> Tensor:
        assert self.uniforms is not None, "a round that draws has random numbers"
        return draw(probs_BW, self.uniforms.draft_BG[:, step])
