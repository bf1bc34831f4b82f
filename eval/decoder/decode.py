"""The decoder's entry: `generate` returns token ids, `decode` records and timings of one batch.

Plain decoding is the same loop with no proposer, and is the baseline. The numbers of a report and the acceptance by which
training selects checkpoints come from here. What a round does is in `eval.decoder.batch`, and in `eval.decoder.particles` where
particles take the place of verification. Decoding is lossless unless `config.lossy` is set.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence

import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from eval.decoder.batch import BatchRun
from eval.decoder.particles import ParticleRun
from eval.decoder.records import AUTOREGRESSIVE, BatchRow, Generation, Request, Timing
from heads.frozen.loading import Target
from heads.inference.model_checks import check_rolls_back
from heads.proposers.protocol import Proposer, TreeProposer

__all__ = ["Request", "check_decodable", "decode", "generate", "start_run"]


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    proposer: Proposer | None = None,
) -> list[list[int]]:
    """Continue prompts and return the answers' token ids, end-of-text included.

    Args:
        target: the model whose distribution the output follows.
        prompts: token ids, `config.batch_size` of them decoded together.
        config, proposer: as for `decode`.

    Raises:
        TypeError: the prompts are no lists of token ids.
        InputError: as for `decode`.
    """
    requests = [Request(prompt_id=str(n), category="", tokens=row) for n, row in enumerate(_token_rows(prompts))]
    answers = []
    for start in range(0, len(requests), config.batch_size):
        generations, _ = decode(target, requests[start : start + config.batch_size], config, proposer)
        answers += [list(generation.tokens) for generation in generations]
    return answers


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
        target, requests: the model whose distribution the output follows, and the batch.
        config: how; `requests` are one batch whatever `batch_size` says, which `check_decodable` alone reads.
        proposer: the draft; None, or `num_speculative_tokens` 0, is plain decoding.
        mode, repeat: labels for the records.
        measure_overlap: also compare the two distributions at each verified draft of a chain
            (`eval.decoder.verifier.compare_distributions`), which takes time.

    Returns:
        The generations in the order of the requests, and the batch's timing.

    Raises:
        InputError: see `check_decodable`; or the proposer cannot draft the tree asked for.
    """
    check_decodable(target, requests, config)
    proposer = proposer if config.num_speculative_tokens else None
    if proposer is not None:
        check_drafts(proposer, config)
    run = start_run(target, requests, config, proposer, measure_overlap)
    with run.clock.phase("prefill"):
        run.prefill()
    with run.clock.phase("decode"):
        while run.active:
            run.round()
    return [row.to_generation(mode) for row in run.rows], _timing(run.rows, run.clock.seconds, mode, repeat)


def start_run(
    target: Target,
    requests: Sequence[Request],
    config: DecodeConfig,
    proposer: Proposer | None,
    measure_overlap: bool = False,
) -> BatchRun:
    """Start a batch by the rule of `config`; for the arguments see `decode`. Particles compare no distributions."""
    if config.rule != "smc" or proposer is None:
        return BatchRun(target, requests, config, proposer, measure_overlap)
    return ParticleRun(target, requests, config, proposer)


def check_drafts(proposer: Proposer, config: DecodeConfig) -> None:
    """Refuse, by an InputError, a draft that cannot draft the tree asked for."""
    if config.tree is not None and not isinstance(proposer, TreeProposer):
        raise InputError(f"tree: {type(proposer).__name__} drafts chains only; set tree to null, or take another draft")


def check_decodable(target: Target, requests: Sequence[Request], config: DecodeConfig | None = None) -> None:
    """Refuse what could only fail later, in the middle of a run.

    Raises:
        InputError: the target's cache cannot roll back, or not with these batches or trees; more drafts are asked for than its
            context holds; a prompt is empty, does not fit, or holds a token that the target does not have.
    """
    check_rolls_back(target.model)
    if config is not None:
        num_drafts = config.num_speculative_tokens
        # Particles of one prompt need no batches: they are equally long in every cycle.
        target.runner.check_forwards(batches=config.batch_size > 1, trees=config.tree is not None and num_drafts > 0)
        if num_drafts >= target.max_positions:
            raise InputError(
                f"decode.num_speculative_tokens is {num_drafts}, and the target's context, prompt and answer together, is "
                f"{target.max_positions} tokens; ask for fewer"
            )
    for request in requests:
        if not request.tokens:
            raise InputError(f"prompt {request.prompt_id} is empty")
        unknown = [token for token in (min(request.tokens), max(request.tokens)) if not 0 <= token < target.vocab_size]
        if unknown and request.media_prompt is None:  # some families mark media by ids beyond their text's
            raise InputError(
                f"prompt {request.prompt_id} holds token {unknown[0]}; the target has {target.vocab_size}, counted from 0"
            )
        if len(request.tokens) >= target.max_positions:
            raise InputError(
                f"prompt {request.prompt_id} has {len(request.tokens)} tokens; the target's context is {target.max_positions}, "
                "and at least one is needed for the answer"
            )


def _token_rows(prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    try:
        return [tuple(map(operator.index, prompt)) for prompt in prompts]
    except TypeError:
        raise TypeError(
            f"prompts: expected a list of lists of token ids, got {reprlib.repr(prompts)}; a chat's are "
            "[target.encode_chat([{'role': 'user', 'content': 'Hello'}])], a text's [target.tokenizer('Hello').input_ids]"
        ) from None


def _timing(rows: Sequence[BatchRow], seconds: Mapping[str, float], mode: str, repeat: int) -> Timing:
    return Timing(
        mode=mode,
        repeat=repeat,
        prompt_ids=tuple(row.request.prompt_id for row in rows),
        num_tokens=sum(max(0, row.num_answered - 1) for row in rows),  # no prefill token where the prefill failed
        num_rounds=sum(len(row.rounds) for row in rows),
        prefill_seconds=seconds["prefill"],
        decode_seconds=seconds["decode"],
        draft_seconds=seconds["draft"],
        verify_seconds=seconds["verify"],
        sample_seconds=seconds["sample"],
    )
