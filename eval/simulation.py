"""Acceptance drawn at given rates in place of judged: how fast would a draft be that the target took so often?

Everything costs what it costs, the judging included; only how many drafts stay is drawn, so that the text is nobody's. A report
made with it is marked as simulated, and no gate takes it. Left out: trees and lossy modes.
B batch, G drafts, K = G + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.decoding import DecodeConfig
from eval.judging import Judge
from eval.verify import Verdict
from heads.proposer import Proposal
from heads.streams import Role, Streams


class SimulatedJudge(Judge):
    """Keeps the draft at position i, if all before it were kept, with probability `rates[i]`.

    Args:
        config, streams: see `eval.judging.Judge`.
        rates: by position, from 0; the last one holds for those beyond.
    """

    def __init__(self, config: DecodeConfig, streams: Streams, rates: Sequence[float]) -> None:
        super().__init__(config, streams)
        self.rates = list(rates)

    def chain(self, logits_BKV: Tensor, proposal: Proposal, num_drafted: Sequence[int], lengths: Sequence[int]) -> Verdict:
        verdict = super().chain(logits_BKV, proposal, num_drafted, lengths)
        device, num_drafts = logits_BKV.device, proposal.tokens_BG.shape[1]
        rates_G = torch.tensor([self.rates[min(place, len(self.rates) - 1)] for place in range(num_drafts)], device=device)
        first_B1 = torch.tensor(lengths, device=device).unsqueeze(1)
        places_G = torch.arange(num_drafts, device=device)
        uniform_BG = self.streams.uniform(Role.ACCEPT, first_B1 + places_G, first_B1)
        stays_BG = (uniform_BG < rates_G) & (places_G < torch.tensor(num_drafted, device=device).unsqueeze(1))
        return verdict._replace(num_accepted_B=stays_BG.long().cumprod(1).sum(1))
