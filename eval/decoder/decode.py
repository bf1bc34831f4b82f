"""The decoder: propose, verify, commit. Plain decoding is the same loop with no proposer, and is the baseline.

Every number in a report comes from here, and so does the acceptance that training selects checkpoints by. Rows of a batch
advance by their own accepted lengths; a row that ends leaves the batch (`eval.decoder.batch`). One lossy mode has a loop of
its own (`eval.lossy.particles`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from eval.decoder.batch import BatchRun
from eval.decoder.logits_processor import Processor, prepared, renumbered
from eval.decoder.meters import Meter
from eval.decoder.records import AUTOREGRESSIVE, Generation, Timing
from eval.decoder.request import Request
from eval.decoder.verifier import SimulatedJudge
from eval.lossy.particles import ParticleRun
from heads.inference.model_checks import check_rolls_back
from heads.proposers.protocol import Proposer, TreeProposer
from heads.target.loading import Target

__all__ = ["Request", "check_decodable", "decode", "generate"]


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    proposer: Proposer | None = None,
    *,
    logits_processor: Processor | Sequence[Processor] | None = None,
) -> list[list[int]]:
    """Continue prompts (token ids) and return the answers' ids, end-of-text included. The short way in; `decode` tells more.

    A `logits_processor` of transformers, or a list of them, changes the target's distribution; the drafts follow it without
    loss (`eval.decoder.logits_processor`).
    """
    requests = [Request(prompt_id=str(n), category="", tokens=tuple(prompt)) for n, prompt in enumerate(prompts)]
    processor = None if logits_processor is None else prepared(logits_processor)
    answers = []
    for start in range(0, len(requests), config.batch_size):
        batch = requests[start : start + config.batch_size]
        # A processor that is told a row's number is told the prompt's, whatever batch that is in.
        own = renumbered(processor, range(start, start + len(batch)).__getitem__)
        generations, _ = decode(target, batch, config, proposer, logits_processor=own)
        answers += [list(generation.tokens) for generation in generations]
    return answers


def check_decodable(target: Target, requests: Sequence[Request], config: DecodeConfig | None = None) -> None:
    """Refuse what could only fail later, in the middle of a run.

    Raises:
        InputError: the target's cache cannot roll back, more drafts are asked for than its context holds, a prompt is empty,
            or prompt and answer do not fit the context.
    """
    check_rolls_back(target.model)
    if config is not None and config.num_speculative_tokens >= target.max_positions:
        raise InputError(
            f"decode.num_speculative_tokens is {config.num_speculative_tokens}, and the target's context, prompt and answer "
            f"together, is {target.max_positions} tokens; ask for fewer"
        )
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
    meter: Meter | None = None,
    simulate_acceptance: Sequence[float] | None = None,
    logits_processor: Processor | Sequence[Processor] | None = None,
) -> tuple[list[Generation], Timing]:
    """Continue a batch of requests together until each has ended.

    Args:
        target: the model whose distribution the output follows.
        requests: the batch.
        config: how; `batch_size` is not read here.
        proposer: who drafts; None, or `num_speculative_tokens` 0, is plain decoding.
        mode, repeat: labels for the records.
        measure_overlap: also compare the two distributions at each judged draft of a chain
            (`eval.decoder.distribution_comparison`),
            except of
            particles; the time for it is kept apart.
        meter: measures the energy of what is timed as decoding (`eval.decoder.meters`).
        simulate_acceptance: draw how many drafts of a chain stay, at these rates by position (`eval.decoder.verifier`).
        logits_processor: changes the target's logits at every position (`eval.decoder.logits_processor`); overlap cannot be
            measured then.

    Returns:
        The generations in the order of the requests, and the batch's timing.

    Raises:
        InputError: see `check_decodable`; or a tree is asked of a proposer that drafts none, or a processor is given that
            is none or remembers earlier calls, with particles, or where overlap is to be measured.
    """
    check_decodable(target, requests, config)
    proposer = proposer if config.num_speculative_tokens else None
    _check_tree(config, proposer)
    if proposer is None:  # what a lossy mode gives up has no part in plain decoding
        config = config.model_copy(update={"lossy": None})
    processor = None if logits_processor is None else prepared(logits_processor)
    if processor is not None:
        _check_processor(config, proposer, measure_overlap)
    run = _new_run(target, requests, config, proposer, measure_overlap, meter, simulate_acceptance, processor)
    clock = run.clock
    with clock.phase("prefill"):
        run.prefill()
    with clock.phase("decode"):
        while run.active:
            run.round()
    generations = [row.to_generation(mode) for row in run.rows]
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
        decode_joules=None if clock.joules is None else clock.joules["decode"] - clock.joules["measure"],
    )
    return generations, timing


def _new_run(
    target: Target,
    requests: Sequence[Request],
    config: DecodeConfig,
    proposer: Proposer | None,
    measure_overlap: bool,
    meter: Meter | None,
    simulate_acceptance: Sequence[float] | None,
    logits_processor: Processor | None,
) -> BatchRun | ParticleRun:
    """Return the batch about to be decoded: by particles where that is asked for, else by verification."""
    if config.rule == "smc" and proposer is not None:
        return ParticleRun(target, requests, config, proposer, meter)
    run = BatchRun(target, requests, config, proposer, measure_overlap, meter, logits_processor)
    if simulate_acceptance is not None:
        run.judge = SimulatedJudge(config, run.streams, simulate_acceptance)
    return run


def _check_processor(config: DecodeConfig, proposer: Proposer | None, measure_overlap: bool) -> None:
    if config.rule == "smc" and proposer is not None:
        raise InputError(
            "logits_processor: particles weigh drafts by raw logits; set lossy to null, or leave the processor out"
        )
    if measure_overlap:
        raise InputError("logits_processor: the overlap of distributions is measured on raw logits; leave one of the two out")


def _check_tree(config: DecodeConfig, proposer: Proposer | None) -> None:
    if config.tree is not None and proposer is not None and not isinstance(proposer, TreeProposer):
        raise InputError(f"tree: {type(proposer).__name__} drafts chains only; set tree to null, or take another draft")
