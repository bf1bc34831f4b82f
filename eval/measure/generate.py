"""transformers' own `generate` beside plain decoding: is what the draft is compared with as fast as a user's own decoding?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from configs.schema.evaluation import EvalConfig
from eval.decoder.decode import Request, decode
from eval.measure.interleaved import in_turns
from heads.device import synchronize
from heads.frozen.loading import Target


def time_generate(target: Target, requests: Sequence[Request], config: EvalConfig) -> dict[str, Any] | None:
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
        "autoregressive": lambda request: len(decode(target, [request], settings, None)[0][0].tokens),
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
    return {"num_prompts": len(chosen), **pace}


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
