"""A batch decoded by particles (SMC-SD, 2604.15672): what `eval.decoder.batch` is to verification, for a mode without any.
LOSSY.

Each request is continued in N places of the batch. A cycle drafts in every place, lets the target read all of it, weighs the
places by the ratio of the two distributions (`eval.lossy.particles`), and adds a token of the target's to each; where few
carry the weight, the heavy ones are copied over the light. Nothing is rolled back. When all of a request's texts have ended
one is drawn by weight. A text that has ended stays as an ancestor: its place drafts on into the void, so that the places stay
in step.

The record is that of the chosen text: a round a cycle, in which everything drafted stays. Left out: sharing the prompt's cache
among places, and comparing distributions. The prompt is read once by the target, but once a place by the draft.
R requests, N places each, B = R N batch rows in that order, G drafts, K = G + 1, V vocabulary.


Sequential Monte Carlo in place of verification (SMC-SD, 2604.15672). LOSSY: the output approaches the target's distribution.

Several particles continue one prompt. Each drafts from q, the target scores what was drafted, and a particle's weight takes up
the ratio of the two; particles of little weight die by resampling, nothing is ever rolled back. Pure functions over
distributions; the distribution of the particle chosen in the end tends to the target's as particles grow in number. A report
on it must say so, and put the task's quality beside the speed. Left out: the caches and the models, which are in
`eval.lossy.particles`.

A cycle: draft G tokens a particle, `weigh` them, `draw_bonus`, `resample` the particles that are worn out; at the end `choose`.
Particles that have ended go on as ancestors, with nothing left to weigh.
B requests, N particles, G drafts, V vocabulary.
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
from eval.decoder.meters import Meter
from eval.decoder.records import Round
from eval.decoder.request import Request, Row
from eval.decoder.verifier import finite_rows
from heads.inference.causal_lm import head_logits, new_cache
from heads.inference.int8_kv_cache import LAYERS
from heads.proposers.protocol import Proposal, Proposer
from heads.sampling.counter_rng import Role, Streams
from heads.sampling.probabilities import draw, token_probabilities
from heads.target.hidden_states import forward_states
from heads.target.loading import Target


def weigh(
    log_weights_BN: Tensor, p_BNGV: Tensor, q_BNGV: Tensor, tokens_BNG: Tensor, num_drafted_BN: Tensor, power: float = 1.0
) -> Tensor:
    """Return the log-weights after a draft: each token adds power log p - log q.

    Args:
        log_weights_BN: up to here, in nats; 0 at the start.
        p_BNGV: the target's distributions, the one a draft is judged by at the draft's place.
        q_BNGV: the distributions the drafts were drawn from.
        tokens_BNG: the drafts.
        num_drafted_BN: drafts that count for each particle.
        power: positive; the distribution aimed at gives a text the product of its p^power, up to a constant. 1 aims at the
            target's.
    """
    counts_BNG = torch.arange(tokens_BNG.shape[-1], device=tokens_BNG.device) < num_drafted_BN.unsqueeze(-1)
    log_p_BNG, log_q_BNG = (_of_tokens(probs_BNGV, tokens_BNG).double().log() for probs_BNGV in (p_BNGV, q_BNGV))
    return log_weights_BN + (power * log_p_BNG - log_q_BNG).masked_fill(~counts_BNG, 0.0).sum(-1)


def draw_bonus(
    log_weights_BN: Tensor, p_BNV: Tensor, uniform_BN: Tensor, ended_BN: Tensor, power: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return a token `[B, N]` from the target's own distribution after each particle's drafts, and the log-weights with it.

    It comes from p^power renormalised, whose normaliser sum_v p^power goes into the weight; that is 1 at power 1.

    Args:
        log_weights_BN, power: as for `weigh`.
        p_BNV: the target's distribution after the drafts.
        uniform_BN: independent uniforms in [0, 1).
        ended_BN: particles that draw nothing; their token means nothing.
    """
    raised_BNV = p_BNV.double() ** power
    gain_BN = raised_BNV.sum(-1).log() if power != 1 else torch.zeros_like(log_weights_BN)
    return draw(raised_BNV, uniform_BN), log_weights_BN + gain_BN.masked_fill(ended_BN, 0.0)


def weight_shares(log_weights_BN: Tensor) -> Tensor:
    """Return the weights as shares of 1, in float64. Particles that are all impossible under the target share alike."""
    none_B1 = torch.isneginf(log_weights_BN).all(-1, keepdim=True)
    return log_weights_BN.double().masked_fill(none_B1, 0.0).softmax(-1)


def effective_sample_size(log_weights_BN: Tensor) -> Tensor:
    """Return 1/sum of the squared shares `[B]`, from 1 (one particle has all the weight) to N (all weigh the same)."""
    return 1 / weight_shares(log_weights_BN).square().sum(-1)


def resample(log_weights_BN: Tensor, uniform_B: Tensor, below: float) -> tuple[Tensor, Tensor]:
    """Return which particle each place goes on from `[B, N]`, and the log-weights after it.

    Only requests whose effective sample size is under `below` times N resample, and start again from equal weights; in the
    others every particle goes on as itself.

    Args:
        log_weights_BN: before.
        uniform_B: a uniform in [0, 1) a request.
        below: in 0..1; 0 never resamples.
    """
    num_particles = log_weights_BN.shape[-1]
    worn_B1 = (effective_sample_size(log_weights_BN) < below * num_particles).unsqueeze(-1)
    # Where the target has ruled out every text, it would weigh none of them any more: they go on, and alike.
    worn_B1 = worn_B1 | torch.isneginf(log_weights_BN).all(-1, keepdim=True)
    itself_N = torch.arange(num_particles, device=log_weights_BN.device)
    ancestors_BN = torch.where(worn_B1, systematic_ancestors(log_weights_BN, uniform_B), itself_N)
    return ancestors_BN, log_weights_BN.masked_fill(worn_B1, 0.0)


def systematic_ancestors(log_weights_BN: Tensor, uniform_B: Tensor) -> Tensor:
    """Resample systematically: N equally spaced points with one random offset, read off the cumulated shares.

    Particle n goes into N w_n places on average, and always into that number rounded down or up.

    Args:
        log_weights_BN, uniform_B: as for `resample`.
    """
    num_particles = log_weights_BN.shape[-1]
    points_BN = (torch.arange(num_particles, device=uniform_B.device) + uniform_B.unsqueeze(-1).double()) / num_particles
    cumulated_BN = weight_shares(log_weights_BN).cumsum(-1)
    found_BN = torch.searchsorted(cumulated_BN, points_BN * cumulated_BN[:, -1:], right=True)
    # A point can round up to the total; the last particle that has weight then stands for it.
    last_B1 = torch.searchsorted(cumulated_BN, cumulated_BN[:, -1:].contiguous(), right=False)
    return torch.minimum(found_BN, last_B1)


def choose(log_weights_BN: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the particle that becomes the answer `[B]`, drawn by weight; the heaviest would be biased towards likely text.

    Args:
        log_weights_BN, uniform_B: as for `resample`.
    """
    return draw(weight_shares(log_weights_BN), uniform_B)


def _of_tokens(distributions: Tensor, tokens: Tensor) -> Tensor:
    return distributions.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@dataclass
class Particle:
    """One place of the batch: what its text has become, and `tokens` read there, which go on after the text has ended."""

    row: Row
    tokens: list[int]

    @property
    def ended(self) -> bool:
        """Whether the text is complete."""
        return self.row.stop_reason is not None

    def copied(self) -> Particle:
        """Return another that goes on from here by itself."""
        return Particle(self.row.copied(), list(self.tokens))


class ParticleRun:
    """The state of one batch; driven like `eval.decoder.batch.BatchRun`.

    Args:
        target: whose distribution the output approaches.
        requests: the batch.
        config: how to decode, with `lossy` set to particles.
        proposer: who drafts; it must draw its tokens.
        meter: reads the machine's energy counters; None: nobody does.
    """

    def __init__(
        self, target: Target, requests: Sequence[Request], config: DecodeConfig, proposer: Proposer, meter: Meter | None = None
    ) -> None:
        if not isinstance(config.lossy, ParticleSampling):
            raise ValueError(f"lossy must be set to particles, got {config.lossy}")
        self.target, self.config, self.proposer = target, config, proposer
        self.settings, self.clock, self.taps = config.lossy, Clock(target.device, meter), proposer.taps
        self._chosen: dict[int, Row] = {}
        self._numbers = list(range(len(requests)))  # of the requests under way
        self._particles = [
            [Particle(Row(request, target, config), list(request.tokens)) for _ in range(self.settings.num_particles)]
            for request in requests
        ]
        self._log_weights_RN = torch.zeros(
            len(requests), self.settings.num_particles, dtype=torch.float64, device=target.device
        )
        self._request_streams = Streams(config.seed, [request.number for request in requests], target.device)
        self._streams = Streams(config.seed, [n for request in requests for n in self._place_numbers(request)], target.device)
        longest = max(len(request.tokens) for request in requests)
        self.capacity = min(longest + config.max_new_tokens, target.max_positions) + config.num_speculative_tokens + 1
        self.cache = new_cache(target.model, self.capacity, LAYERS[config.kv_cache])

    @property
    def active(self) -> list[Particle]:
        """The places of the requests under way, in the order of the batch."""
        return [particle for places in self._particles for particle in places]

    @property
    def rows(self) -> list[Row]:
        """The chosen texts, in the order of the requests, when none is under way."""
        return [self._chosen[number] for number in sorted(self._chosen)]

    def prefill(self) -> None:
        """Read each prompt once, and draw the first token of every place from the target's distribution."""
        prompts = [places[0].tokens for places in self._particles]
        longest = max(map(len, prompts))
        ids_RT = self._tensor([row + [0] * (longest - len(row)) for row in prompts])
        states = forward_states(self.target.model, self.cache, ids_RT, [0] * len(prompts), self.taps)
        last_R = self._tensor([len(row) - 1 for row in prompts])
        logits_RV = head_logits(self.target.model, states.final_BTE[torch.arange(len(prompts)), last_R])
        N = self.settings.num_particles
        uniform_B1 = self._streams.uniform(Role.TARGET, (last_R + 1).repeat_interleave(N).unsqueeze(1))
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
        with self.clock.phase("draft"):
            proposal = self._propose(max(room))
        counts = self._counts(proposal, room)
        starts = [len(particle.tokens) - 1 for particle in self.active]
        with self.clock.phase("verify"):
            pending_B1 = self._tensor([[particle.tokens[-1]] for particle in self.active])
            ids_BK = torch.cat([pending_B1, proposal.tokens_BG], 1)
            states = forward_states(self.target.model, self.cache, ids_BK, starts, self.taps)
            logits_BKV = head_logits(self.target.model, states.final_BTE)
        with self.clock.phase("sample"):
            table = self._weigh(logits_BKV, proposal, counts, starts)
        if max(room) > 0:
            with self.clock.phase("draft"):
                self.proposer.commit(counts, states)
        for particle, count, (finite, bonus, *drafts) in zip(self.active, counts, table, strict=True):
            _extend(particle, drafts[:count], bonus, finite=bool(finite))
        with self.clock.phase("sample"):
            num_requests = len(self._particles)
            self._resample(self._choose_ended(), num_requests)

    def _propose(self, room: int) -> Proposal:
        num_tokens = min(self.config.num_speculative_tokens, room)
        if num_tokens == 0:
            return Proposal(tokens_BG=self._tensor([[] for _ in self.active]).long(), num_drafted=[0] * len(self.active))
        tokens = [particle.tokens for particle in self.active]
        proposal = self.proposer.propose(tokens, num_tokens, self.config, self._streams, keep_logits=False)
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

    def _weigh(self, logits_BKV: Tensor, proposal: Proposal, counts: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
        """Weigh all places and draw their next tokens; return `[finite, token, drafts...]` by place, in one transfer."""
        (R, N), counts_B = self._log_weights_RN.shape, self._tensor(counts)
        live_B = self._tensor([not particle.ended for particle in self.active])
        p_BKV = token_probabilities(logits_BKV, self.config)
        read_B, ends_B = self._read_before_the_end(proposal.tokens_BG, counts_B * live_B)
        log_weights_RN = self._log_weights_RN
        if proposal.probs_BGV is not None:
            q_BGV = functional.pad(proposal.probs_BGV, (0, p_BKV.shape[-1] - proposal.probs_BGV.shape[-1]))
            p_RNGV, q_RNGV = (distribution.unflatten(0, (R, N)) for distribution in (p_BKV[:, : q_BGV.shape[1]], q_BGV))
            tokens_RNG, read_RN = proposal.tokens_BG.unflatten(0, (R, N)), read_B.unflatten(0, (R, N))
            log_weights_RN = weigh(log_weights_RN, p_RNGV, q_RNGV, tokens_RNG, read_RN)
        after_RNV = p_BKV[torch.arange(R * N), counts_B].unflatten(0, (R, N))
        positions_B1 = (self._tensor(starts) + 1 + counts_B).unsqueeze(1)
        uniform_RN = self._streams.uniform(Role.TARGET, positions_B1).reshape(R, N)
        ended_RN = (ends_B | ~live_B).unflatten(0, (R, N))
        next_RN, self._log_weights_RN = draw_bonus(log_weights_RN, after_RNV, uniform_RN, ended_RN)
        # What a place computes after its text has ended is nobody's concern.
        finite_B = finite_rows(logits_BKV, proposal) | ~live_B
        return torch.cat([torch.stack([finite_B.long(), next_RN.flatten()], 1), proposal.tokens_BG], 1).tolist()

    def _read_before_the_end(self, tokens_BG: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many drafts count up to and with the first end of text, and whether there is one."""
        ends = torch.tensor(self.target.eos_token_ids, dtype=torch.int64, device=tokens_BG.device)
        places_G = torch.arange(tokens_BG.shape[1], device=tokens_BG.device)
        ends_BG = torch.isin(tokens_BG, ends) & (places_G < counts_B.unsqueeze(1))
        first_B = torch.where(ends_BG, places_G + 1, tokens_BG.shape[1]).amin(1) if len(places_G) else counts_B
        return torch.minimum(first_B, counts_B), ends_BG.any(1)

    def _choose_ended(self) -> list[int]:
        """Draw the answer of each request whose texts have all ended, and drop it. Return which of the requests go on.

        A request in which a live text met what is no number ends there, with that text.
        """
        lengths_R1 = self._tensor([[len(places[0].tokens)] for places in self._particles])
        chosen_R = choose(self._log_weights_RN, self._request_streams.uniform(Role.TARGET, lengths_R1).squeeze(1))
        under_way = []
        for index, (places, chosen) in enumerate(zip(self._particles, chosen_R.tolist(), strict=True)):
            failed = [particle.row for particle in places if particle.row.stop_reason == "non_finite"]
            if failed or all(particle.ended for particle in places):
                self._chosen[self._numbers[index]] = failed[0] if failed else places[chosen].row
            else:
                under_way.append(index)
        self._numbers = [self._numbers[index] for index in under_way]
        self._particles = [self._particles[index] for index in under_way]
        if under_way:
            self._keep_requests(under_way)
        return under_way

    def _keep_requests(self, under_way: Sequence[int]) -> None:
        N = self.settings.num_particles
        self._log_weights_RN = self._log_weights_RN[list(under_way)]
        self._request_streams.keep_rows(under_way)
        self._streams.keep_rows([index * N + place for index in under_way for place in range(N)])

    def _resample(self, under_way: Sequence[int], num_requests: int) -> None:
        """Let each place go on from its ancestor, in the caches too, which hold `num_requests`; `under_way` are those left."""
        if not under_way:
            return
        lengths_R1 = self._tensor([[len(places[0].tokens)] for places in self._particles])
        uniform_R = self._request_streams.uniform(Role.RESIDUAL, lengths_R1).squeeze(1)
        ancestors_RN, self._log_weights_RN = resample(self._log_weights_RN, uniform_R, self.settings.resample_below)
        ancestors, N = ancestors_RN.tolist(), self.settings.num_particles
        kept = [index * N + place for index, row in zip(under_way, ancestors, strict=True) for place in row]
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

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]] | Sequence[bool]) -> Tensor:
        return torch.tensor(values, device=self.target.device)


def _extend(particle: Particle, drafts: list[int], bonus: int, *, finite: bool) -> None:
    """Add what a cycle brought to a place, and to its text where that has not ended."""
    particle.tokens += [*drafts, bonus]
    if particle.ended:
        return
    committed = particle.row.commit([*drafts, bonus], finite=finite)
    particle.row.rounds.append(
        Round(drafted=tuple(drafts), num_accepted=min(len(drafts), len(committed)), committed=tuple(committed))
    )
