"""The decoder: propose, verify, commit. Plain decoding is the same loop with no proposer, and is the baseline.

Every number in a report comes from here, and so does the acceptance that training selects checkpoints by. Rows of a batch
advance by their own accepted lengths; a row that ends leaves the batch. Each round costs one transfer to the host.
B batch, G drafted tokens, K = G + 1 target rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from configs.errors import InputError
from configs.schema import DecodeConfig
from distill.target import Target
from eval.records import AUTOREGRESSIVE, Generation, Round, StopReason, Timing
from eval.verify import Verdict, verify_block, verify_greedy, verify_tokens
from heads.kv_cache import check_rolls_back, new_cache
from heads.law import draw, token_law
from heads.lm_head import head_logits
from heads.proposer import Proposal, Proposer
from heads.streams import Role, Streams
from heads.target_states import forward_states

RULES = {"token": verify_tokens, "block": verify_block}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue. `prompt_id` also names its random numbers, so it gives the same tokens in any batch."""

    prompt_id: str
    category: str
    tokens: tuple[int, ...]


@dataclass
class _Row:
    """One request under way. `tokens` is prompt and answer; the last one is pending: committed, not yet read by the target."""

    request: Request
    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    stop_reason: StopReason | None = None

    @property
    def num_answered(self) -> int:
        return len(self.tokens) - len(self.request.tokens)


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    proposer: Proposer | None = None,
) -> list[list[int]]:
    """Continue prompts (token ids) and return the answers' ids, end-of-text included. The short way in; `decode` tells more."""
    requests = [Request(prompt_id=str(n), category="", tokens=tuple(prompt)) for n, prompt in enumerate(prompts)]
    answers = []
    for start in range(0, len(requests), config.batch_size):
        generations, _ = decode(target, requests[start : start + config.batch_size], config, proposer)
        answers += [list(generation.tokens) for generation in generations]
    return answers


def check_decodable(target: Target, requests: Sequence[Request]) -> None:
    """Refuse what could only fail later, in the middle of a run.

    Raises:
        InputError: the target's cache cannot roll back, a prompt is empty, or prompt and answer do not fit the context.
    """
    check_rolls_back(target.model)
    for request in requests:
        if not request.tokens:
            raise InputError(f"prompt {request.prompt_id} is empty")
        if len(request.tokens) >= target.max_positions:
            raise InputError(
                f"prompt {request.prompt_id} has {len(request.tokens)} tokens; the target's context is {target.max_positions}, "
                "and at least one is needed for the answer"
            )


@torch.inference_mode()
def decode(
    target: Target,
    requests: Sequence[Request],
    config: DecodeConfig,
    proposer: Proposer | None = None,
    *,
    mode: str = AUTOREGRESSIVE,
    repeat: int = 0,
    measure_overlap: bool = False,
) -> tuple[list[Generation], Timing]:
    """Continue a batch of requests together until each has ended.

    Args:
        target: the model whose law the output follows.
        requests: the batch.
        config: how; `batch_size` is not read here.
        proposer: who drafts; None, or `num_speculative_tokens` 0, is plain decoding.
        mode, repeat: labels for the records.
        measure_overlap: also compute sum_v min(p, q) for each judged draft (at temperature 1 when decoding greedily); the
            time for it is kept apart.

    Returns:
        The generations in the order of the requests, and the batch's timing.

    Raises:
        InputError: see `check_decodable`.
    """
    check_decodable(target, requests)
    run = _Run(target, requests, config, proposer if config.num_speculative_tokens else None, measure_overlap)
    clock = run.clock
    with clock.phase("prefill"):
        run.prefill()
    with clock.phase("decode"):
        while run.active:
            run.round()
    generations = [_to_generation(row, mode) for row in run.rows]
    timing = Timing(
        mode=mode,
        repeat=repeat,
        prompt_ids=tuple(request.prompt_id for request in requests),
        num_tokens=sum(max(0, row.num_answered - 1) for row in run.rows),  # no prefill token where the prefill failed
        num_rounds=sum(len(row.rounds) for row in run.rows),
        prefill_seconds=clock.seconds["prefill"],
        decode_seconds=clock.seconds["decode"] - clock.seconds["measure"],
        draft_seconds=clock.seconds["draft"],
        verify_seconds=clock.seconds["verify"],
        sample_seconds=clock.seconds["sample"],
        measure_seconds=clock.seconds["measure"],
    )
    return generations, timing


class _Clock:
    """Wall-clock seconds by phase. On a GPU the queue is drained at the borders, so that a phase's work is counted in it."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(("prefill", "decode", "draft", "verify", "sample", "measure"), 0.0)
        self._on_gpu = device.type == "cuda"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


class _Run:
    """The state of one batch: its rows, the target's cache, the random streams."""

    def __init__(
        self,
        target: Target,
        requests: Sequence[Request],
        config: DecodeConfig,
        proposer: Proposer | None,
        measure_overlap: bool,
    ) -> None:
        self.target, self.config, self.proposer, self.measure_overlap = target, config, proposer, measure_overlap
        self.rows = [_Row(request, list(request.tokens)) for request in requests]
        self.active = list(self.rows)
        self.clock = _Clock(target.device)
        self.streams = Streams(config.seed, [_number(request.prompt_id) for request in requests], target.device)
        longest = max(len(request.tokens) for request in requests)
        self.capacity = min(longest + config.max_new_tokens, target.max_positions) + config.num_speculative_tokens + 1
        self.cache = new_cache(target.model, self.capacity)
        self.taps = () if proposer is None else proposer.taps

    def prefill(self) -> None:
        """Read the prompts and commit each row's first token, which becomes pending."""
        lengths = [len(row.tokens) for row in self.active]
        ids_BT = self._tensor([row.tokens + [0] * (max(lengths) - len(row.tokens)) for row in self.active])
        states = forward_states(self.target.model, self.cache, ids_BT, [0] * len(lengths), self.taps)
        last_B1D = states.final_BTE[torch.arange(len(lengths)), self._tensor(lengths) - 1].unsqueeze(1)
        logits_B1V = head_logits(self.target.model, last_B1D)
        tokens_B1 = self._target_tokens(logits_B1V, self._tensor(lengths).unsqueeze(1))
        finite_B = torch.isfinite(logits_B1V.amax((1, 2)))
        for row, token, finite in zip(self.active, tokens_B1.squeeze(1).tolist(), finite_B.tolist(), strict=True):
            self._commit(row, [token] if finite else [], finite)
        keep = self._drop_ended()
        if self.proposer is not None and self.active:
            states = states.map(lambda state_BTE: state_BTE[keep])
            self.proposer.start([row.tokens for row in self.active], self.capacity, states)

    def round(self) -> None:
        """Run one target step: draft, verify, commit."""
        room = [self._room(row) for row in self.active]
        with self.clock.phase("draft"):
            proposal = self._propose(room)
        with self.clock.phase("verify"):
            ids_BK = torch.cat([self._tensor([[row.tokens[-1]] for row in self.active]), proposal.tokens_BG], 1)
            starts = [len(row.tokens) - 1 for row in self.active]
            states = forward_states(self.target.model, self.cache, ids_BK, starts, self.taps)
            logits_BKV = head_logits(self.target.model, states.final_BTE)
        with self.clock.phase("sample"):
            num_drafted = [min(*pair) for pair in zip(proposal.num_drafted, room, strict=True)]
            verdict = self._verify(logits_BKV, proposal, num_drafted)
            finite_B = torch.isfinite(logits_BKV.amax((1, 2)))
            if proposal.probs_BGV is not None:  # a draft without a law was drawn from nothing, and so would the residual be
                finite_B &= torch.isfinite(proposal.probs_BGV.sum((1, 2)))
            summary_B3 = torch.stack([verdict.num_accepted_B, verdict.next_token_B, finite_B.long()], 1)
            outcome = torch.cat([summary_B3, proposal.tokens_BG], 1).tolist()
        overlaps = self._overlaps(logits_BKV, proposal, num_drafted) if self.measure_overlap else None
        if self.proposer is not None and max(room) > 0:
            with self.clock.phase("draft"):
                self.proposer.commit([accepted for accepted, *_ in outcome], states)
        for number, (row, (accepted, next_token, finite, *drafts)) in enumerate(zip(self.active, outcome, strict=True)):
            drafted = drafts[: num_drafted[number]]
            committed = self._commit(row, [*drafted[:accepted], next_token], bool(finite))
            # A judged draft left one token, itself or the one in its place; what came after an end of text was not judged.
            judged = overlaps[number][: min(len(committed), len(drafted))] if overlaps is not None else None
            row.rounds.append(
                Round(
                    drafted=tuple(drafted),
                    num_accepted=min(accepted, len(committed)),
                    committed=tuple(committed),
                    overlap=tuple(judged) if judged is not None else None,
                )
            )
        self._drop_ended()

    def _propose(self, room: Sequence[int]) -> Proposal:
        """Ask for as many drafts as the roomiest row can use; without a proposer or room, for none."""
        num_tokens = min(self.config.num_speculative_tokens, max(room))
        if self.proposer is None or num_tokens == 0:
            return Proposal(tokens_BG=self._tensor([[] for _ in room]).long(), num_drafted=[0] * len(room))
        tokens = [row.tokens for row in self.active]
        return self.proposer.propose(tokens, num_tokens, self.config, self.streams, keep_logits=self.measure_overlap)

    def _verify(self, logits_BKV: Tensor, proposal: Proposal, num_drafted: Sequence[int]) -> Verdict:
        """Apply the rule in force. Row i of the logits predicts the token at position (row's length + i)."""
        num_drafted_B = self._tensor(num_drafted)
        first_B1 = self._tensor([len(row.tokens) for row in self.active]).unsqueeze(1)
        positions_BK = first_B1 + torch.arange(logits_BKV.shape[1], device=logits_BKV.device)
        q_BGV = proposal.probs_BGV
        if self.config.temperature == 0 or self.config.verification == "match" or q_BGV is None:
            return verify_greedy(self._target_tokens(logits_BKV, positions_BK), proposal.tokens_BG, num_drafted_B)
        p_BKV = token_law(logits_BKV, self.config)
        accept_BG = self.streams.uniform(Role.ACCEPT, positions_BK[:, :-1], first_B1)
        residual_B = self.streams.uniform(Role.RESIDUAL, first_B1).squeeze(1)
        bonus_B = self.streams.uniform(Role.TARGET, first_B1 + num_drafted_B.unsqueeze(1)).squeeze(1)
        rule = RULES[self.config.verification]
        q_BGV = _pad_vocabulary(q_BGV, p_BKV)
        return rule(p_BKV, q_BGV, proposal.tokens_BG, num_drafted_B, accept_BG, residual_B, bonus_B)

    def _target_tokens(self, logits_BKV: Tensor, positions_BK: Tensor) -> Tensor:
        """Return what the target itself would put at each position: its greedy choice, or a draw from its own stream."""
        if self.config.temperature == 0:
            return logits_BKV.argmax(-1)
        return draw(token_law(logits_BKV, self.config), self.streams.uniform(Role.TARGET, positions_BK))

    def _overlaps(self, logits_BKV: Tensor, proposal: Proposal, num_drafted: Sequence[int]) -> list[list[float]] | None:
        """Return sum_v min(p, q) by row and draft, the exact acceptance rate of sampling; None for drafts without a law.

        A law that is not finite overlaps with nothing.
        """
        if proposal.logits_BGV is None or not any(num_drafted):
            return None
        with self.clock.phase("measure"):
            sampling = self.config if self.config.temperature else self.config.model_copy(update={"temperature": 1.0})
            p_BGV = token_law(logits_BKV[:, :-1], sampling)
            q_BGV = _pad_vocabulary(token_law(proposal.logits_BGV, sampling), p_BGV)
            return torch.minimum(p_BGV, q_BGV).sum(-1).nan_to_num(0.0).tolist()

    def _room(self, row: _Row) -> int:
        """Return how many drafts a row can use: one token a round is the target's own."""
        answer = self.config.max_new_tokens - row.num_answered
        context = self.target.max_positions - len(row.tokens)
        return max(0, min(answer, context) - 1)

    def _commit(self, row: _Row, tokens: list[int], finite: bool) -> list[int]:
        """Append tokens up to the first end-of-text, and note why the row ended if it did. Return what was appended."""
        if not finite:
            row.stop_reason = "non_finite"
            return []
        ends = [index for index, token in enumerate(tokens) if token in self.target.eos_token_ids]
        committed = tokens[: ends[0] + 1] if ends else tokens
        row.tokens += committed
        if ends:
            row.stop_reason = "eos"
        elif row.num_answered >= self.config.max_new_tokens:
            row.stop_reason = "length"
        elif len(row.tokens) >= self.target.max_positions:
            row.stop_reason = "context"
        return committed

    def _drop_ended(self) -> list[int]:
        """Let rows that ended leave the batch; return the numbers of those that stay."""
        keep = [number for number, row in enumerate(self.active) if row.stop_reason is None]
        if len(keep) == len(self.active):
            return keep
        self.active = [self.active[number] for number in keep]
        if not keep:
            return keep
        self.cache.keep_rows(keep)
        self.streams.keep_rows(keep)
        if self.proposer is not None and any(row.rounds for row in self.active):  # before the first round it has not started
            self.proposer.keep_rows(keep)
        return keep

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, device=self.target.device)


def _pad_vocabulary(q_BGV: Tensor, like_BKV: Tensor) -> Tensor:
    """Give a law over fewer tokens zeros for the rest: a draft never proposes what it does not know."""
    missing = like_BKV.shape[-1] - q_BGV.shape[-1]
    return torch.nn.functional.pad(q_BGV, (0, missing)) if missing else q_BGV


def _number(prompt_id: str) -> int:
    """Return a 63-bit number for a request's name, the same in every process."""
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big") >> 1


def _to_generation(row: _Row, mode: str) -> Generation:
    if row.stop_reason is None:
        raise RuntimeError(f"prompt {row.request.prompt_id} left the decoder without a reason")
    return Generation(
        prompt_id=row.request.prompt_id,
        category=row.request.category,
        mode=mode,
        prompt_tokens=row.request.tokens,
        tokens=tuple(row.tokens[len(row.request.tokens) :]),
        rounds=tuple(row.rounds),
        stop_reason=row.stop_reason,
    )
