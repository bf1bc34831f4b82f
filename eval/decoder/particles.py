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
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, ParticleSampling
from eval.decoder.logits_processor import Processor
from eval.decoder.records import Clock
from eval.decoder.request import BatchRow, Request
from eval.decoder.verifier import finite_rows
from heads.device import TokenRows, Uploads, constant, shifted, widest_float
from heads.frozen.hidden_states import forward_states
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits, new_cache
from heads.inference.kv_cache import LAYERS
from heads.proposers.protocol import Proposal, Proposer
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, token_probabilities, values_at


@dataclass
class Particle:
    """One place of the batch: the row of its text, and the `tokens` in its cache, which go on after the text has ended."""

    row: BatchRow
    tokens: list[int]

    @property
    def ended(self) -> bool:
        """Whether the text is complete."""
        return self.row.stop_reason is not None

    def copied(self) -> Particle:
        """Return an independent copy."""
        return Particle(self.row.copied(), list(self.tokens))


class ParticleRun:
    """The state of one batch; driven like `eval.decoder.batch.BatchRun`. The proposer must draw its tokens.

    Raises:
        InputError: a processor is given.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[Request],
        config: DecodeConfig,
        proposer: Proposer,
        *,
        logits_processor: Processor | None = None,
        clock: Clock | None = None,
    ) -> None:
        if logits_processor is not None:
            raise InputError(
                "logits_processor: particles weigh drafts by raw logits; set lossy to null, or leave the processor out"
            )
        self.target, self.config, self.proposer = target, config, proposer
        self.settings, self.taps = cast(ParticleSampling, config.lossy), proposer.taps
        self.clock = Clock(target.device) if clock is None else clock
        self._chosen: dict[int, BatchRow] = {}
        self._numbers = list(range(len(requests)))  # of the requests under way
        self._particles = [
            [Particle(BatchRow(request, target, config), list(request.tokens)) for _ in range(self.settings.num_particles)]
            for request in requests
        ]
        self._log_weights_RN = torch.zeros(
            len(requests), self.settings.num_particles, dtype=widest_float(target.device), device=target.device
        )
        self._request_rng = CounterRNG(config.seed, [request.number for request in requests], target.device)
        self._rng = CounterRNG(config.seed, [n for request in requests for n in self._place_numbers(request)], target.device)
        longest = max(len(request.tokens) for request in requests)
        self.capacity = min(longest + config.max_new_tokens, target.max_positions) + config.num_speculative_tokens + 1
        self.cache = new_cache(target.model, self.capacity, LAYERS[config.kv_cache])

    @property
    def active(self) -> list[Particle]:
        """The places of the requests under way, in the order of the batch."""
        return [particle for places in self._particles for particle in places]

    @property
    def rows(self) -> list[BatchRow]:
        """The chosen texts, in the order of the requests, when none is under way."""
        return [self._chosen[number] for number in sorted(self._chosen)]

    def prefill(self) -> None:
        """Read each prompt once, and draw the first token of every place from the target's distribution."""
        prompts = [places[0].tokens for places in self._particles]
        longest = max(map(len, prompts))
        ids_RT = self._tensor([row + [0] * (longest - len(row)) for row in prompts])
        media = self.target.media_inputs([places[0].row.request.media_prompt for places in self._particles], prompts)
        states = forward_states(self.target.model, self.cache, ids_RT, [0] * len(prompts), self.taps, media=media)
        last_R = self._tensor([[len(row) - 1] for row in prompts]).squeeze(1)
        rows_R = torch.arange(len(prompts), device=self.target.device)
        logits_RV = head_logits(self.target.model, states.final_BTE[rows_R, last_R])
        N = self.settings.num_particles
        uniform_B1 = self._rng.uniform(Role.TARGET, (last_R + 1).repeat_interleave(N).unsqueeze(1))
        tokens_B = draw(token_probabilities(logits_RV, self.config).repeat_interleave(N, 0), uniform_B1.squeeze(1))
        finite_B = torch.isfinite(logits_RV.amax(1)).repeat_interleave(N)
        table = torch.stack([tokens_B, finite_B.long()], 1).tolist()
        for particle, (token, finite) in zip(self.active, table, strict=True):
            particle.row.commit([token], finite=bool(finite))
            particle.tokens.append(token)
        ancestors = [row for row, _ in enumerate(prompts) for _ in range(N)]
        under_way = self._choose_ended()
        places = [number * N + place for number in under_way for place in range(N)]
        kept = [ancestors[place] for place in places]
        if kept:
            self.cache.keep_rows(kept)
            states = states.map(lambda state_BTE: state_BTE[kept])
            self.proposer.start([particle.tokens for particle in self.active], self.capacity, states)

    def round(self) -> None:
        """Run one cycle: draft, weigh, add the target's token, choose where all has ended, resample the others."""
        # Where resampling left copies of ended texts only, a cycle without drafts follows, after which one of them is chosen.
        room = [max((each.row.room for each in places if not each.ended), default=0) for places in self._particles]
        text = TokenRows([particle.tokens for particle in self.active], self.target.device)
        live = text.uploads.numbers([not particle.ended for particle in self.active])
        with self.clock.phase("draft"):
            proposal = self._propose(text, max(room))
        counts = text.uploads.numbers(self._counts(proposal, room))
        with self.clock.phase("verify"):
            ids_BK, starts = torch.cat([text.pending_B1, proposal.tokens_BG], 1), shifted(text.lengths, -1)
            states = forward_states(self.target.model, self.cache, ids_BK, starts, self.taps)
            logits_BKV = head_logits(self.target.model, states.final_BTE)
        with self.clock.phase("sample"):
            table = self._weigh(logits_BKV, proposal, counts.tensor_B, text.lengths.tensor_B, live.tensor_B.bool())
        if max(room) > 0:
            with self.clock.phase("draft"):
                self.proposer.commit(counts, states)
        for particle, count, (finite, bonus, *drafts) in zip(self.active, counts, table, strict=True):
            particle.tokens += [*drafts[:count], bonus]
            if not particle.ended:
                particle.row.commit([*drafts[:count], bonus], finite=bool(finite))
        with self.clock.phase("sample"):
            num_requests = len(self._particles)
            self._resample(self._choose_ended(), num_requests)

    def _propose(self, text: TokenRows, room: int) -> Proposal:
        num_tokens = min(self.config.num_speculative_tokens, room)
        if num_tokens == 0:
            return Proposal(tokens_BG=text.pending_B1[:, :0], num_drafted=[0] * len(text))
        proposal = self.proposer.propose(text, num_tokens, self.config, self._rng, keep_logits=False)
        if proposal.probs_BGV is None:
            name = type(self.proposer).__name__
            raise InputError(
                f"lossy smc weighs drafts by the distribution they were drawn from, and {name} draws none; take another draft"
            )
        return proposal

    def _counts(self, proposal: Proposal, room: Sequence[int]) -> list[int]:
        """Return by place how many drafts count: as many for all places of a request."""
        N = self.settings.num_particles
        fewest = [min(proposal.num_drafted[start : start + N]) for start in range(0, len(proposal.num_drafted), N)]
        return [min(pair) for pair in zip(fewest, room, strict=True) for _ in range(N)]

    def _weigh(
        self, logits_BKV: Tensor, proposal: Proposal, counts_B: Tensor, lengths_B: Tensor, live_B: Tensor
    ) -> list[list[int]]:
        """Weigh all places and draw their next tokens; return `[finite, token, drafts...]` by place, in one transfer."""
        R, N = self._log_weights_RN.shape
        p_BKV = token_probabilities(logits_BKV, self.config)
        read_B = self._read_before_the_end(proposal.tokens_BG, counts_B * live_B)
        if proposal.probs_BGV is not None:
            q_BGV = functional.pad(proposal.probs_BGV, (0, p_BKV.shape[-1] - proposal.probs_BGV.shape[-1]))
            p_RNGV, q_RNGV = (distribution.unflatten(0, (R, N)) for distribution in (p_BKV[:, : q_BGV.shape[1]], q_BGV))
            tokens_RNG, read_RN = proposal.tokens_BG.unflatten(0, (R, N)), read_B.unflatten(0, (R, N))
            self._log_weights_RN = weigh(self._log_weights_RN, p_RNGV, q_RNGV, tokens_RNG, read_RN)
        after_BV = p_BKV[torch.arange(R * N, device=counts_B.device), counts_B]
        positions_B1 = (lengths_B + counts_B).unsqueeze(1)
        next_B = draw(after_BV.to(widest_float(after_BV.device)), self._rng.uniform(Role.TARGET, positions_B1).squeeze(1))
        # What a place computes after its text has ended is not used.
        finite_B = finite_rows(logits_BKV, proposal) | ~live_B
        return torch.cat([torch.stack([finite_B.long(), next_B], 1), proposal.tokens_BG], 1).tolist()

    def _read_before_the_end(self, tokens_BG: Tensor, counts_B: Tensor) -> Tensor:
        """Return how many drafts count, up to and with the first end of text."""
        ends = constant(tuple(self.target.eos_token_ids), torch.int64, tokens_BG.device)
        places_G = torch.arange(tokens_BG.shape[1], device=tokens_BG.device)
        ends_BG = torch.isin(tokens_BG, ends) & (places_G < counts_B.unsqueeze(1))
        first_B = torch.where(ends_BG, places_G + 1, tokens_BG.shape[1]).amin(1) if len(places_G) else counts_B
        return torch.minimum(first_B, counts_B)

    def _choose_ended(self) -> list[int]:
        """Draw the answer of each request whose texts have all ended, and drop it. Return which of the requests go on.

        A request in which a live text met logits that are not finite ends there, with that text.
        """
        lengths_R1 = self._tensor([[len(places[0].tokens)] for places in self._particles])
        chosen_R = choose(self._log_weights_RN, self._request_rng.uniform(Role.TARGET, lengths_R1).squeeze(1))
        under_way = []
        for index, (places, chosen) in enumerate(zip(self._particles, chosen_R.tolist(), strict=True)):
            failed = [particle.row for particle in places if particle.row.stop_reason == "non_finite"]
            if failed or all(particle.ended for particle in places):
                self._chosen[self._numbers[index]] = failed[0] if failed else places[chosen].row
            else:
                under_way.append(index)
        self._numbers = [self._numbers[index] for index in under_way]
        self._particles = [self._particles[index] for index in under_way]
        if 0 < len(under_way) < len(chosen_R):
            N, kept = self.settings.num_particles, Uploads(self.target.device).numbers(under_way)
            self._log_weights_RN = self._log_weights_RN[kept.tensor_B]
            self._request_rng.keep_rows(kept)
            self._rng.keep_rows([index * N + place for index in under_way for place in range(N)])
        return under_way

    def _resample(self, under_way: Sequence[int], num_requests: int) -> None:
        """Let each place go on from its ancestor, in the caches too, which hold `num_requests`; `under_way` are those left."""
        if not under_way:
            return
        lengths_R1 = self._tensor([[len(places[0].tokens)] for places in self._particles])
        uniform_R = self._request_rng.uniform(Role.RESIDUAL, lengths_R1).squeeze(1)
        ancestors_RN, self._log_weights_RN = resample(self._log_weights_RN, uniform_R, self.settings.resample_below)
        ancestors, N = ancestors_RN.tolist(), self.settings.num_particles
        places = [index * N + place for index, row in zip(under_way, ancestors, strict=True) for place in row]
        kept = Uploads(self.target.device).numbers(places)
        if kept != list(range(num_requests * N)):
            self.cache.keep_rows(kept)
            self.proposer.keep_rows(kept)
        self._particles = [
            [places[ancestor] if ancestor == place else places[ancestor].copied() for place, ancestor in enumerate(row)]
            for places, row in zip(self._particles, ancestors, strict=True)
        ]

    def _place_numbers(self, request: Request) -> list[int]:
        """Return a number for each place of a request, by which its draws differ from its neighbours'."""
        places = range(self.settings.num_particles)
        return [replace(request, prompt_id=f"{request.prompt_id}\0{place}").number for place in places]

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return Uploads(self.target.device).rows(rows).tensor


# --- weights ------------------------------------------------------------------------------------------------------


def weigh(log_weights_RN: Tensor, p_RNGV: Tensor, q_RNGV: Tensor, tokens_RNG: Tensor, num_drafted_RN: Tensor) -> Tensor:
    """Return the log-weights after a draft: each token adds log p - log q.

    Args:
        log_weights_RN: up to here, in nats; 0 at the start.
        p_RNGV: the target's distribution at the place of each draft.
        q_RNGV: the distributions the drafts were drawn from.
        tokens_RNG: the drafts.
        num_drafted_RN: drafts that count for each particle.
    """
    counts_RNG = torch.arange(tokens_RNG.shape[-1], device=tokens_RNG.device) < num_drafted_RN.unsqueeze(-1)
    log_p_RNG, log_q_RNG = (
        values_at(probs_RNGV, tokens_RNG).to(widest_float(p_RNGV.device)).log() for probs_RNGV in (p_RNGV, q_RNGV)
    )
    return log_weights_RN + (log_p_RNG - log_q_RNG).masked_fill(~counts_RNG, 0.0).sum(-1)


def weight_shares(log_weights_RN: Tensor) -> Tensor:
    """Return the weights as shares of 1, as wide as the device has them; equal ones where all particles are impossible."""
    none_R1 = torch.isneginf(log_weights_RN).all(-1, keepdim=True)
    return log_weights_RN.to(widest_float(log_weights_RN.device)).masked_fill(none_R1, 0.0).softmax(-1)


def effective_sample_size(log_weights_RN: Tensor) -> Tensor:
    """Return 1/sum of the squared shares `[R]`, from 1 (one particle has all the weight) to N (all weigh the same)."""
    return 1 / weight_shares(log_weights_RN).square().sum(-1)


def resample(log_weights_RN: Tensor, uniform_R: Tensor, below: float) -> tuple[Tensor, Tensor]:
    """Return which particle each place goes on from `[R, N]`, and the log-weights after it.

    Only requests whose effective sample size is under `below` times N resample, and start again from equal weights; in the
    others every particle goes on as itself.
    """
    num_particles = log_weights_RN.shape[-1]
    worn_R1 = (effective_sample_size(log_weights_RN) < below * num_particles).unsqueeze(-1)
    # Where every text is impossible under the target, all go on with equal weights.
    worn_R1 = worn_R1 | torch.isneginf(log_weights_RN).all(-1, keepdim=True)
    itself_N = torch.arange(num_particles, device=log_weights_RN.device)
    ancestors_RN = torch.where(worn_R1, systematic_ancestors(log_weights_RN, uniform_R), itself_N)
    return ancestors_RN, log_weights_RN.masked_fill(worn_R1, 0.0)


def systematic_ancestors(log_weights_RN: Tensor, uniform_R: Tensor) -> Tensor:
    """Resample systematically: N equally spaced points with one random offset, read off the cumulated shares.

    Particle n goes into N w_n places on average, and always into that number rounded down or up.
    """
    num_particles = log_weights_RN.shape[-1]
    points_RN = (
        torch.arange(num_particles, device=uniform_R.device) + uniform_R.unsqueeze(-1).to(widest_float(uniform_R.device))
    ) / num_particles
    cumulated_RN = weight_shares(log_weights_RN).cumsum(-1)
    found_RN = torch.searchsorted(cumulated_RN, points_RN * cumulated_RN[:, -1:], right=True)
    # A point can round up to the total; the last particle that has weight then stands for it.
    last_R1 = torch.searchsorted(cumulated_RN, cumulated_RN[:, -1:].contiguous(), right=False)
    return torch.minimum(found_RN, last_R1)


def choose(log_weights_RN: Tensor, uniform_R: Tensor) -> Tensor:
    """Return the particle that becomes the answer `[R]`, drawn by weight; the heaviest would be biased towards likely text."""
    return draw(weight_shares(log_weights_RN), uniform_R)
