"""Whether an engine's greedy answers with the draft are the target's: judged as an evaluation judges its own.

The target is loaded here, after the engine has ended, and reads each answer once more (`eval.lossless`); the engine's plain
answers are the control, so that rounding of its kernels is not taken for a fault of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from configs.runtime.errors import InputError, first_line
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from distill.generation.prompts import UNCATEGORISED
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation
from eval.lossless import judge_lossless
from heads.frozen.loading import Target, load_target
from scripts.check.comparison import Answer, EngineCheck


def judge_answers(result: EngineCheck, target: TargetConfig, plain: Sequence[Answer], drafted: Sequence[Answer]) -> None:
    """Fill in what the target says of the answers of two runs on the same prompts, and decide whether the draft passes.

    Of a target that this machine cannot run nothing is decided.
    """
    try:
        loaded = load_target(target)
        result.lossless = judge_lossless(
            loaded,
            _generations(loaded, plain, AUTOREGRESSIVE),
            {SPECULATIVE: _generations(loaded, drafted, SPECULATIVE)},
            DecodeConfig(max_new_tokens=result.max_new_tokens),
            LosslessConfig(num_answers=len(plain)),
            None,
        )
    except (InputError, torch.OutOfMemoryError) as error:
        result.checked, result.reason = False, f"the target does not run here to judge the answers: {first_line(error)}"
        return
    result.same_answers = result.num_prompts - len(result.lossless["divergences"])
    result.judge()


def _generations(target: Target, answers: Sequence[Answer], mode: str) -> list[Generation]:
    return [
        Generation(
            prompt_id=answer.prompt_id,
            category=UNCATEGORISED,
            mode=mode,
            prompt_tokens=tuple(answer.prompt_tokens),
            tokens=tuple(answer.tokens),
            rounds=(),
            stop_reason="eos" if answer.tokens[-1] in target.eos_token_ids else "length",
        )
        for answer in answers
    ]
