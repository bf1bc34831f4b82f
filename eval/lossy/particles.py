"""Particles in place of verification (SMC-SD, 2604.15672). LOSSY: the output approaches the target's distribution.

Each request is continued in N places of the batch, its particles. A cycle drafts in every place, runs the target over all of
it, weighs the places by the ratio of the two distributions (`weigh`), adds a token of the target's to each (`draw_bonus`), and
copies heavy places over light ones (`resample`). When all texts of a request have ended, one is drawn by weight (`choose`). A
text that has ended stays as an ancestor, and drafts go on in its place so that the places stay in step. No draft is accepted or
refused, so cycles are no rounds of the records, and the report has no acceptance and no tokens per target step of them.
R requests, N particles each, B = R N batch rows in that order, G drafts, K = G + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, ParticleSampling
from eval.decoder.clock import Clock
from eval.decoder.logits_processor import Processor
from eval.decoder.request import BatchRow, Request
from eval.decoder.verifier import finite_rows
from eval.lossy.particle_weights import choose, draw_bonus, resample, weigh
from heads.device import widest_float
from heads.frozen.hidden_states import forward_states
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits, new_cache
from heads.inference.int8_kv_cache import LAYERS
from heads.proposers.protocol import Proposal, Proposer
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, token_probabilities
from heads.uploads import TokenRows, Uploads, constant, shifted


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
        ValueError: `config.lossy` is not particles.
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
        if not isinstance(config.lossy, ParticleSampling):
            raise ValueError(f"lossy must be set to particles, got {config.lossy}")
        if logits_processor is not None:
            raise InputError(
                "logits_processor: particles weigh drafts by raw logits; set lossy to null, or leave the processor out"
            )
        self.target, self.config, self.proposer = target, config, proposer
        self.settings, self.taps = config.lossy, proposer.taps
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
            _extend(particle, drafts[:count], bonus, finite=bool(finite))
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
        read_B, ends_B = self._read_before_the_end(proposal.tokens_BG, counts_B * live_B)
        log_weights_RN = self._log_weights_RN
        if proposal.probs_BGV is not None:
            q_BGV = functional.pad(proposal.probs_BGV, (0, p_BKV.shape[-1] - proposal.probs_BGV.shape[-1]))
            p_RNGV, q_RNGV = (distribution.unflatten(0, (R, N)) for distribution in (p_BKV[:, : q_BGV.shape[1]], q_BGV))
            tokens_RNG, read_RN = proposal.tokens_BG.unflatten(0, (R, N)), read_B.unflatten(0, (R, N))
            log_weights_RN = weigh(log_weights_RN, p_RNGV, q_RNGV, tokens_RNG, read_RN)
        after_RNV = p_BKV[torch.arange(R * N, device=counts_B.device), counts_B].unflatten(0, (R, N))
        positions_B1 = (lengths_B + counts_B).unsqueeze(1)
        uniform_RN = self._rng.uniform(Role.TARGET, positions_B1).reshape(R, N)
        ended_RN = (ends_B | ~live_B).unflatten(0, (R, N))
        next_RN, self._log_weights_RN = draw_bonus(log_weights_RN, after_RNV, uniform_RN, ended_RN)
        # What a place computes after its text has ended is not used.
        finite_B = finite_rows(logits_BKV, proposal) | ~live_B
        return torch.cat([torch.stack([finite_B.long(), next_RN.flatten()], 1), proposal.tokens_BG], 1).tolist()

    def _read_before_the_end(self, tokens_BG: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many drafts count up to and with the first end of text, and whether there is one."""
        ends = constant(tuple(self.target.eos_token_ids), torch.int64, tokens_BG.device)
        places_G = torch.arange(tokens_BG.shape[1], device=tokens_BG.device)
        ends_BG = torch.isin(tokens_BG, ends) & (places_G < counts_B.unsqueeze(1))
        first_B = torch.where(ends_BG, places_G + 1, tokens_BG.shape[1]).amin(1) if len(places_G) else counts_B
        return torch.minimum(first_B, counts_B), ends_BG.any(1)

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


def _extend(particle: Particle, drafts: list[int], bonus: int, *, finite: bool) -> None:
    """Add what a cycle brought to a place, and to its text where that has not ended."""
    particle.tokens += [*drafts, bonus]
    if particle.ended:
        return
    particle.row.commit([*drafts, bonus], finite=finite)
