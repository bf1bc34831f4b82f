"""What a target writes: answers to prompts, and continuations of token ids."""

from collections import Counter

from distill.dataset.conversations import Conversation
from distill.generation.answers import answer_turns
from distill.generation.continuation import TargetSource, TokenRow, continue_rows, continue_texts


def answer_prompts(target, prompts, config, *, seed):
    """Answer prompts turn by turn; return a conversation for each answered turn, and the dropped turns by reason."""
    rows, dropped = {}, Counter()

    def text(number, prompt):
        piece = yield from answer_turns(target, prompt, config.max_new_tokens)
        rows[number] = [Conversation.from_dict(row, "a piece") for row in piece["rows"]]
        dropped.update(piece["dropped"])

    texts = (text(number, prompt) for number, prompt in enumerate(prompts))
    for _ in continue_texts(target, config, texts, seed=seed, batch_size=config.batch_size):
        pass
    return [row for number in sorted(rows) for row in rows[number]], dict(dropped)


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
