"""What a target writes: answers to prompts, and continuations of token ids."""

from collections import Counter

from distill.generation.answers import Dialogue, refilled
from distill.generation.continuation import TargetSource, TokenRow, continue_rows


def answer_prompts(target, prompts, config, *, seed):
    """Answer prompts turn by turn; return a conversation for each answered turn, and the dropped turns by reason."""
    dialogues = [Dialogue(number=number, prompt=prompt) for number, prompt in enumerate(prompts)]
    for _ in refilled(target, iter(dialogues), config, seed=seed):
        pass
    dropped = sum((each.dropped for each in dialogues), Counter())
    return [row for each in dialogues for row in each.rows], dict(dropped)


def continue_tokens(target, prompts, sampling, *, max_new_tokens, seed, requests):
    """Continue a batch of token ids; return what was written, the end-of-text token included where there is one."""
    rows = [
        TokenRow(key=number, prompt_ids=ids, limit=min(len(ids) + max_new_tokens, target.max_positions), request=request)
        for number, (ids, request) in enumerate(zip(prompts, requests, strict=True))
    ]
    source = TargetSource(target, sampling)
    for _ in continue_rows(source, rows, seed=seed, has_ended=lambda row: row.tokens[-1] in target.eos_token_ids):
        pass
    return [row.written for row in rows]
