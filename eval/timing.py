"""What is timed after the suite: rounds of other numbers of drafts and batches, and transformers' own `generate`.

The rounds of the sweep are those of `eval.decoder.batch.BatchRun`, so that every part costs what it costs in decoding. Only the
number of accepted drafts is prescribed: none or all, because after all a draft has more to read. Plain rounds take turns with
them, and medians are kept. Rows are not equally long. Trees and stopping rules are left out: their sizes depend on the text.

The tokens of a round follow from the measured chance at each position that a draft is accepted where those before it were. A
round's seconds are interpolated over the logarithm of the batch between those timed; outside of these nothing is said. A batch
is taken to stay full, and answers to have no end. G drafts.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from configs.runtime.errors import InputError, RunFailed
from configs.runtime.terminal import progress
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import CostConfig, EvalConfig
from eval.decoder.batch import BatchRun
from eval.decoder.decode import decode as decode_batch
from eval.decoder.request import Request
from eval.decoder.rules import ChainVerification
from eval.decoder.verifier import Verifier
from eval.measure.interleaved import in_turns
from eval.report.schema import GenerateSection, PredictedSection, PredictedSpeedup, TimedRound
from heads.device import RowInts, synchronize
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposal, Proposer, RoundInputs

SHORTEST = 4  # tokens of the text that a sweep begins with

Samples = defaultdict[str, list[float]]  # what was measured of one kind of round, by the name in `TimedRound`


class ScriptedVerifier(Verifier):
    """Verifies by another verifier, which takes its time, and then keeps as many drafts as it was told: none, or all."""

    keeps_all = False
    num_drafted = 0  # in the round verified last

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier.config)
        self.verifier = verifier

    def chain(self, logits_BKV: Tensor, proposal: Proposal, num_drafted: RowInts, inputs: RoundInputs) -> ChainVerification:
        verified = self.verifier.chain(logits_BKV, proposal, num_drafted, inputs)
        self.num_drafted = max(num_drafted.host)
        kept_B = num_drafted.tensor_B if self.keeps_all else torch.zeros_like(num_drafted.tensor_B)
        return ChainVerification(kept_B, verified.next_token_B)


def check_sweep(target: Target, config: CostConfig) -> None:
    """Refuse a sweep with a context that does not fit the target's."""
    longest = config.num_speculative_tokens
    start, grows_by = _span(config.context_tokens, longest)
    if (needed := start + grows_by + longest + 2) > target.max_positions:
        raise InputError(
            f"cost.context_tokens: rounds of up to {longest} drafts around {config.context_tokens} tokens need a context of"
            f" {needed}, the target's is {target.max_positions}; ask for less there or in cost.num_speculative_tokens"
        )


@torch.inference_mode()
def sweep_rounds(
    target: Target, proposer: Proposer, text: Sequence[int], decode: DecodeConfig, config: CostConfig
) -> list[TimedRound]:
    """Time rounds of every number of drafts, up to as many as the draft can, at the batches asked for.

    The prompts are taken from anywhere in `text`, token ids that are repeated where they end. Empty where nothing is drafted.
    """
    check_sweep(target, config)
    target = replace(target, eos_token_ids=())  # no round may end the text
    first = _Runs(target, proposer, text, decode, config, config.batch_sizes[0])
    run_round(first.drafting, config.num_speculative_tokens)
    if (longest := first.verifier.num_drafted) == 0:
        return []
    samples: dict[tuple[int, int], Samples] = {
        (drafts, batch): defaultdict(list) for batch in config.batch_sizes for drafts in range(longest + 1)
    }
    with progress("timing", len(config.batch_sizes) * (config.repeats + 1), "passes") as advance:
        for repeat in range(config.repeats + 1):
            for batch in config.batch_sizes:
                own = {drafts: samples[drafts, batch] for drafts in range(longest + 1)}
                if repeat == 0:  # it warms up
                    own = {drafts: defaultdict(list) for drafts in own}
                _Runs(target, proposer, text, decode, config, batch).time(own)
                advance(1)
    undrafted = {"draft_seconds": 0.0, "draft_seconds_after_full": 0.0}  # of plain rounds
    return [
        TimedRound(
            num_speculative_tokens=drafts,
            batch_size=batch,
            **undrafted | {name: median(values) for name, values in own.items()},
        )
        for (drafts, batch), own in samples.items()
    ]


class _Runs:
    """A plain run and one with the draft, of one batch, which take turns."""

    def __init__(
        self, target: Target, proposer: Proposer, text: Sequence[int], decode: DecodeConfig, config: CostConfig, batch: int
    ) -> None:
        longest = config.num_speculative_tokens
        start, grows_by = _span(config.context_tokens, longest)
        settings = decode.model_copy(
            update={
                "num_speculative_tokens": longest,
                "max_new_tokens": grows_by + longest + 2,
                "batch_size": batch,
                "stop": None,  # no round may end the text
            }
        )
        # The plain rounds, of a token each, all stand near the middle.
        self.plain, _ = _start(target, text, batch, start + grows_by // 2, settings, None)
        self.drafting, self.verifier = _start(target, text, batch, start, settings, proposer)

    def time(self, samples: dict[int, Samples]) -> None:
        """Time four rounds of each number of drafts, and four plain ones before each of those numbers.

        A draft reads more after a fully accepted round, so each setting runs twice and the second run is timed. Numbers fall:
        MTP modules of a depth each draft no more, in a batch, than they once did, as what they did not read is lost to them.
        """
        for drafts in sorted(samples, reverse=True)[:-1]:
            for _ in range(4):  # as many as with drafts: what other rounds left in the processor's caches slows the first
                _time_round(self.plain, 0, samples[0])
            for keeps_all in (False, True):
                self.verifier.keeps_all = keeps_all
                _time_round(self.drafting, drafts, samples[drafts])
                draft_seconds = _time_round(self.drafting, drafts, samples[drafts])
                samples[drafts]["draft_seconds_after_full" if keeps_all else "draft_seconds"].append(draft_seconds)


def _time_round(run: BatchRun, drafts: int, samples: Samples) -> float:
    """Run a round, keep what it took, and return the seconds of drafting."""
    before = dict(run.clock.seconds)
    with run.clock.phase("decode"):
        run_round(run, drafts)
    took = {phase: seconds - before[phase] for phase, seconds in run.clock.seconds.items()}
    samples["verify_seconds"].append(took["verify"])
    samples["other_seconds"].append(took["decode"] - took["draft"] - took["verify"])
    return took["draft"]


def run_round(run: BatchRun, drafts: int) -> None:
    """Run a round of so many drafts."""
    run.config = run.config.model_copy(update={"num_speculative_tokens": drafts})
    run.round()
    if len(run.active) < len(run.rows):
        raise RunFailed("target or draft computed NaN or infinity while rounds were timed")


def _span(context: int, longest: int) -> tuple[int, int]:
    """Return how many tokens a run begins with and by how many it grows, so that `context` lies halfway if it can."""
    grows_by = 2 * sum(range(longest + 1)) + 4 * longest + 4  # what the rounds of `_Runs.time` commit
    return max(SHORTEST, context - grows_by // 2), grows_by


def _start(
    target: Target, text: Sequence[int], batch: int, context: int, settings: DecodeConfig, proposer: Proposer | None
) -> tuple[BatchRun, ScriptedVerifier]:
    """Return a run that has read its prompts, and its verifier; every other row is a token shorter."""
    requests = []
    for row in range(batch):
        length = context - row % 2
        tokens = tuple(text[position % len(text)] for position in range(row * length, (row + 1) * length))
        requests.append(Request(prompt_id=str(row), category="", tokens=tokens))
    run = BatchRun(target, requests, settings, proposer)
    run.verifier = verifier = ScriptedVerifier(run.verifier)
    run.prefill()
    return run, verifier


# --- prediction -----------------------------------------------------------------------------------------------------


class Prediction:
    """Decode speedups by number of drafts and batch, from a sweep and the share accepted at each position."""

    def __init__(self, sweep: Sequence[TimedRound], conditional: Sequence[float | None]) -> None:
        shares = [share for share in conditional if share is not None]
        self.sweep, self.longest = sweep, max(each.num_speculative_tokens for each in sweep)
        # A position that was not measured takes the last one's share.
        self.reached_G = np.cumprod(
            [*shares, *shares[-1:] * self.longest][: self.longest]
        )  # the chance to keep at least so many

    def speedup(self, drafts: int, batch: int) -> float:
        """Return plain decoding's seconds a token over those with as many drafts a round; both were timed around `batch`."""
        # The row that kept most decides what the draft reads next.
        after_full = 1 - (1 - float(self.reached_G[drafts - 1])) ** batch
        tokens = 1 + float(self.reached_G[:drafts].sum())
        return tokens * self._seconds(0, batch, 0.0) / self._seconds(drafts, batch, after_full)

    def best(self, batch: int) -> int | None:
        """Return the fastest number of drafts; None where plain decoding is faster."""
        drafts = max(range(1, self.longest + 1), key=lambda each: self.speedup(each, batch))
        return drafts if self.speedup(drafts, batch) > 1 else None

    def batches(self, own: int) -> list[int]:
        """Return batch sizes within those timed: these, the powers of two, and the run's own."""
        timed = {each.batch_size for each in self.sweep}
        powers = {2**power for power in range(max(timed).bit_length())}
        return sorted(each for each in timed | powers | {own} if min(timed) <= each <= max(timed))

    def _seconds(self, drafts: int, batch: int, after_full: float) -> float:
        """Return the seconds of a round, `after_full` being the chance that the round before kept all drafts."""
        rounds = sorted((each.batch_size, each) for each in self.sweep if each.num_speculative_tokens == drafts)
        seconds = [
            each.verify_seconds
            + each.other_seconds
            + (1 - after_full) * each.draft_seconds
            + after_full * each.draft_seconds_after_full
            for _, each in rounds
        ]
        return float(np.interp(math.log(batch), [math.log(size) for size, _ in rounds], seconds))


def predict_speed(
    sweep: Sequence[TimedRound], conditional: Sequence[float | None], *, drafts: int, batch: int, context: int
) -> PredictedSection:
    """Return what a sweep, in which something was drafted, says of this run's own drafts and batch, and of others."""
    prediction = Prediction(sweep, conditional)
    batches, numbers = prediction.batches(batch), range(1, prediction.longest + 1)
    paying = [size for size in batches if prediction.best(size) is not None]
    return PredictedSection(
        context_tokens=context,
        settings=[
            PredictedSpeedup(num_speculative_tokens=each, batch_size=size, decode_speedup=prediction.speedup(each, size))
            for size in batches
            for each in numbers
        ],
        decode_speedup=prediction.speedup(drafts, batch) if drafts in numbers and batch in batches else None,
        best_num_speculative_tokens=prediction.best(batch) if batch in batches else None,
        break_even_batch_size=max(paying, default=0),
        sweep=list(sweep),
    )


# --- generate -------------------------------------------------------------------------------------------------------


def time_generate(target: Target, requests: Sequence[Request], config: EvalConfig) -> GenerateSection | None:
    """Return seconds a token of both, greedily and in turns; None where `generate` does not do the same work.

    Prompts are decoded one at a time, the prompt's forward included; the first pair warms up and is not counted.
    """
    chosen = [each for each in requests if each.media_prompt is None][: config.generate_prompts]
    is_split = target.group is not None or target.spread_by is not None or target.states_from is not None
    has_own_cache = config.decode.kv_cache is not None
    if not chosen or config.decode.temperature > 0 or is_split or has_own_cache:
        return None
    settings = config.decode.model_copy(
        update={"num_speculative_tokens": 0, "tree": None, "stopping": None, "lossy": None, "batch_size": 1}
    )
    sides: dict[str, Callable[[Request], int]] = {
        "autoregressive": lambda request: len(decode_batch(target, [request], settings, None)[0][0].tokens),
        # `generate` goes on beyond the context, where learned positions have an end.
        "generate": lambda request: _generate(
            target, request, min(settings.max_new_tokens, target.max_positions - len(request.tokens))
        ),
    }
    seconds, tokens = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0)
    # As `from_pretrained` leaves them: the product of a frozen head in bfloat16 is far slower on a CPU.
    target.model.requires_grad_(True)
    try:
        for request, name, counts in in_turns(chosen, list(sides)):
            synchronize(target.device)
            started = time.perf_counter()
            count = sides[name](request)
            synchronize(target.device)
            if counts:
                seconds[name], tokens[name] = seconds[name] + time.perf_counter() - started, tokens[name] + count
    finally:
        target.model.requires_grad_(False)
    pace = {f"milliseconds_per_token_{name}": 1000 * seconds[name] / max(tokens[name], 1) for name in sides}
    return GenerateSection(num_prompts=len(chosen), **pace)


def _generate(target: Target, request: Request, max_new_tokens: int) -> int:
    """Continue a prompt greedily; return how many tokens came."""
    model: Any = target.model  # the type of a pretrained model does not know `generate`
    eos = list(target.eos_token_ids) or None
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, eos_token_id=eos, pad_token_id=eos[0] if eos else None
    )
    ids_1T = torch.tensor([request.tokens], device=target.device)
    with torch.inference_mode():  # as our decoder does
        output_1T = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=settings)
    return int(output_1T.shape[1] - ids_1T.shape[1])
