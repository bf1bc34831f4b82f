"""Particles in place of verification (SMC-SD, 2604.15672). LOSSY: the output approaches the target's distribution.

Each request is continued in N places of the batch, its particles. A cycle drafts in every place, runs the target over all of
it, weighs the places by the ratio of the two distributions (`weigh`), adds a token of the target's to each, and copies heavy
places over light ones (`resample`). When all texts of a request have ended, one is drawn by weight (`choose`). A text that has
ended stays as an ancestor, and drafts go on in its place so that the places stay in step. No draft is accepted or refused, so
cycles are no rounds of the records, and the report has no acceptance and no tokens per target step of them.
R requests, N particles each, B = R N batch rows in that order, G drafts, K = G + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, ParticleSampling
from eval.decoder.batch import BatchRun
from eval.decoder.records import BatchRow, Request
from eval.decoder.verifier import finite_rows
from heads.device import RowInts, constant, row_ints, row_tensor, widest_float
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits
from heads.proposers.protocol import Proposal, Proposer, RoundInputs
from heads.sampling.draws import ChainUniforms, CounterRNG, Role, draw, token_probabilities, values_at


class ParticleRun(BatchRun):
    """A batch with N places for each request; the proposer must draw its tokens. `rows` are the chosen texts, at the end."""

    def __init__(self, target: Target, requests: Sequence[Request], config: DecodeConfig, proposer: Proposer) -> None:
        self.settings = cast(ParticleSampling, config.lossy)
        N = self.settings.num_particles
        super().__init__(target, [request for request in requests for _ in range(N)], config, proposer)
        # The draws of a place differ from its neighbours' by its number.
        places = [replace(each, prompt_id=f"{each.prompt_id}\0{place}").number for each in requests for place in range(N)]
        self.rng = CounterRNG(config.seed, places, target.device)
        self._texts: list[list[int]] = []  # what is in the cache by place, which goes on after a text has ended
        self._chosen: dict[int, BatchRow] = {}
        self._numbers = list(range(len(requests)))  # of the requests under way
        self._request_rng = CounterRNG(config.seed, [request.number for request in requests], target.device)
        self._log_weights_RN = torch.zeros(len(requests), N, dtype=widest_float(target.device), device=target.device)

    def round(self) -> None:
        """Run one cycle: draft, weigh, add the target's token, choose where all has ended, resample the others."""
        N, is_live = self.settings.num_particles, [row.stop_reason is None for row in self.active]
        # Where resampling left copies of ended texts only, a cycle without drafts follows, after which one of them is chosen.
        room = [row.room if live else 0 for row, live in zip(self.active, is_live, strict=True)]
        inputs = RoundInputs.of(self._texts, self.rng, room=room, num_drafts=self.config.num_speculative_tokens)
        with self.clock.phase("draft"):
            proposal = self._propose(inputs, None)
        # As many drafts count for all places of a request.
        starts = range(0, len(room), N)
        fewest = [min(max(room[start : start + N]), *proposal.num_drafted.host[start : start + N]) for start in starts]
        counts = [count for count in fewest for _ in range(N)]
        with self.clock.phase("verify"):
            states = self._read(torch.cat([inputs.pending_B1, proposal.tokens_BG], 1), inputs.lengths + (-1))
            logits_BKV = head_logits(self.target.model, states.final_BTE)
        with self.clock.phase("sample"):
            sent_B2 = row_tensor(list(zip(counts, is_live, strict=True)), self.target.device)
            table = self._weigh(logits_BKV, proposal, sent_B2[:, 0], inputs, sent_B2[:, 1].bool())
        if self.proposer is not None and max(room) > 0:
            with self.clock.phase("draft"):
                self.proposer.commit(counts, states)
        for row, own, count, (finite, bonus, *drafts) in zip(self.active, self._texts, counts, table, strict=True):
            own += [*drafts[:count], bonus]
            if row.stop_reason is None:
                row.commit((*drafts[:count], bonus) if finite else ())
        with self.clock.phase("sample"):
            if len(self._drop_ended()):
                self._resample()

    def _weigh(
        self, logits_BKV: Tensor, proposal: Proposal, counts_B: Tensor, inputs: RoundInputs, live_B: Tensor
    ) -> list[list[int]]:
        """Weigh all places and draw their next tokens; return `[finite, token, drafts...]` by place, in one transfer."""
        R, N = self._log_weights_RN.shape
        tokens_BG = proposal.tokens_BG
        p_BKV = token_probabilities(logits_BKV, self.config)
        if proposal.probs_BGV is not None:
            q_BGV = functional.pad(proposal.probs_BGV, (0, p_BKV.shape[-1] - proposal.probs_BGV.shape[-1]))
            given = (p_BKV[:, : q_BGV.shape[1]], q_BGV, tokens_BG, self._up_to_the_end(tokens_BG, counts_B * live_B))
            self._log_weights_RN = weigh(self._log_weights_RN, *(values.unflatten(0, (R, N)) for values in given))
        elif tokens_BG.shape[1]:
            name = type(self.proposer).__name__
            raise InputError(
                f"lossy smc weighs drafts by the distribution they were drawn from, and {name} draws none; take another draft"
            )
        after_BV = p_BKV[torch.arange(R * N, device=counts_B.device), counts_B]
        uniform_B = values_at(cast(ChainUniforms, inputs.uniforms).target_BK, counts_B)
        next_B = draw(after_BV.to(widest_float(after_BV.device)), uniform_B)
        # What a place computes after its text has ended is not used.
        finite_B = finite_rows(logits_BKV, proposal) | ~live_B
        return torch.cat([torch.stack([finite_B.long(), next_B], 1), tokens_BG], 1).tolist()

    def _up_to_the_end(self, tokens_BG: Tensor, counts_B: Tensor) -> Tensor:
        """Return how many drafts count, up to and with the first end of text."""
        ends = constant(tuple(self.target.eos_token_ids), torch.int64, tokens_BG.device)
        places_G = torch.arange(tokens_BG.shape[1], device=tokens_BG.device)
        ends_BG = torch.isin(tokens_BG, ends) & (places_G < counts_B.unsqueeze(1))
        return torch.minimum(torch.where(ends_BG, places_G + 1, tokens_BG.shape[1]).amin(1), counts_B)

    def _drop_ended(self) -> RowInts:
        """Draw the answer of each request whose texts have all ended, and drop it. Return the places that stay.

        A request in which a live text met logits that are not finite ends there, with that text.
        """
        N, has_started = self.settings.num_particles, bool(self._texts)
        if not has_started:  # after the prefill
            self._texts = [list(row.tokens) for row in self.active]
        chosen_R = choose(self._log_weights_RN, self._request_rng.along(Role.TARGET, self._lengths(), 1).squeeze(1))
        under_way = []
        for index, chosen in enumerate(chosen_R.tolist()):
            places = self.active[index * N : (index + 1) * N]
            failed = [row for row in places if row.stop_reason == "non_finite"]
            if failed or all(row.stop_reason for row in places):
                self._chosen[self._numbers[index]] = failed[0] if failed else places[chosen]
            else:
                under_way.append(index)
        keep = row_ints([index * N + place for index in under_way for place in range(N)], self.target.device)
        if len(keep) == len(self.active):
            return keep
        self._numbers = [self._numbers[index] for index in under_way]
        self.active, self._texts = [self.active[place] for place in keep.host], [self._texts[place] for place in keep.host]
        self.rows = [self._chosen[number] for number in sorted(self._chosen)]
        if keep.host:
            requests = row_ints(under_way, self.target.device)
            self._log_weights_RN = self._log_weights_RN[requests.tensor_B]
            self._request_rng.keep_rows(requests)
            self.rng.keep_rows(keep)
            self._keep_caches(keep, has_started)
        return keep

    def _resample(self) -> None:
        """Let each place go on from its ancestor, in the caches too."""
        uniform_R = self._request_rng.along(Role.RESIDUAL, self._lengths(), 1).squeeze(1)
        ancestors_RN, self._log_weights_RN = resample(self._log_weights_RN, uniform_R, self.settings.resample_below)
        N = self.settings.num_particles
        places = [index * N + place for index, row in enumerate(ancestors_RN.tolist()) for place in row]
        if places != list(range(len(places))):
            self._keep_caches(row_ints(places, self.target.device))
            rows = self.active
            self.active = [rows[old] if old == new else rows[old].copied() for new, old in enumerate(places)]
            self._texts = [list(self._texts[old]) for old in places]

    def _keep_caches(self, places: RowInts, has_started: bool = True) -> None:
        self.cache.keep_rows(places)
        if self.proposer is not None and has_started:
            self.proposer.keep_rows(places)

    def _lengths(self) -> list[int]:
        """Return the length of each request's texts, which are in step."""
        return [len(text) for text in self._texts[:: self.settings.num_particles]]


# --- weights ------------------------------------------------------------------------------------------------------


def weigh(log_weights_RN: Tensor, p_RNGV: Tensor, q_RNGV: Tensor, tokens_RNG: Tensor, num_drafted_RN: Tensor) -> Tensor:
    """Return the log-weights, in nats, after drafts of which so many count: each token adds log p - log q."""
    counts_RNG = torch.arange(tokens_RNG.shape[-1], device=tokens_RNG.device) < num_drafted_RN.unsqueeze(-1)
    log_p_RNG, log_q_RNG = (
        values_at(probs_RNGV, tokens_RNG).to(widest_float(p_RNGV.device)).log() for probs_RNGV in (p_RNGV, q_RNGV)
    )
    return log_weights_RN + (log_p_RNG - log_q_RNG).masked_fill(~counts_RNG, 0.0).sum(-1)


def weight_shares(log_weights_RN: Tensor) -> Tensor:
    """Return the weights as shares of 1, as wide as the device has them; equal ones where all particles are impossible."""
    none_R1 = torch.isneginf(log_weights_RN).all(-1, keepdim=True)
    return log_weights_RN.to(widest_float(log_weights_RN.device)).masked_fill(none_R1, 0.0).softmax(-1)


def resample(log_weights_RN: Tensor, uniform_R: Tensor, below: float) -> tuple[Tensor, Tensor]:
    """Return which particle each place goes on from `[R, N]`, and the log-weights after it.

    Only requests whose effective sample size, 1/sum of the squared shares, is under `below` times N resample, and start again
    from equal weights; in the others every particle goes on as itself.
    """
    num_particles = log_weights_RN.shape[-1]
    effective_R1 = 1 / weight_shares(log_weights_RN).square().sum(-1, keepdim=True)
    # Where every text is impossible under the target, all go on with equal weights.
    worn_R1 = (effective_R1 < below * num_particles) | torch.isneginf(log_weights_RN).all(-1, keepdim=True)
    itself_N = torch.arange(num_particles, device=log_weights_RN.device)
    ancestors_RN = torch.where(worn_R1, systematic_ancestors(log_weights_RN, uniform_R), itself_N)
    return ancestors_RN, log_weights_RN.masked_fill(worn_R1, 0.0)


def systematic_ancestors(log_weights_RN: Tensor, uniform_R: Tensor) -> Tensor:
    """Resample systematically: N equally spaced points with one random offset, read off the cumulated shares.

    Particle n goes into N w_n places on average, and always into that number rounded down or up.
    """
    num_particles = log_weights_RN.shape[-1]
    offsets_R1 = uniform_R.unsqueeze(-1).to(widest_float(uniform_R.device))
    points_RN = (torch.arange(num_particles, device=uniform_R.device) + offsets_R1) / num_particles
    cumulated_RN = weight_shares(log_weights_RN).cumsum(-1)
    found_RN = torch.searchsorted(cumulated_RN, points_RN * cumulated_RN[:, -1:], right=True)
    # A point can round up to the total; the last particle that has weight then stands for it.
    last_R1 = torch.searchsorted(cumulated_RN, cumulated_RN[:, -1:].contiguous(), right=False)
    return torch.minimum(found_RN, last_R1)


def choose(log_weights_RN: Tensor, uniform_R: Tensor) -> Tensor:
    """Return the particle that becomes the answer `[R]`, drawn by weight; the heaviest would be biased towards likely text."""
    return draw(weight_shares(log_weights_RN), uniform_R)
