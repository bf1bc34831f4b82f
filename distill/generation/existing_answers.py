"""Answers that a data set brings, as conversations: the target lends its chat template and tokenizer.

Such answers are often not what the target would say, so a draft learns less from them that serves (METHODS D.3). They are
here for comparison, and for targets that are too slow to write.

Left out on purpose: answers that stand in a column or key of their own; a prompt must end with the assistant's message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from configs.runtime.errors import InputError
from distill.dataset.conversations import Conversation
from distill.generation.answers import EMPTY, Answered, up_to_end
from distill.generation.prompts import Prompt, encode_prompt
from heads.target.loading import Target

# The chat template writes the conversation before an answer otherwise than it does to open one, or a token reaches across.
NOT_A_CONTINUATION = "answer_does_not_continue_its_prompt"


def check_given(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that bring no answer.

    Raises:
        InputError: one of them, named, does not.
    """
    without = [prompt.prompt_id for prompt in prompts if prompt.answer is None]
    if without:
        raise InputError(
            f"answers.written_by is 'dataset', and {len(without)} of {len(prompts)} prompts bring no answer, the first is "
            f"{without[0]}: expected chat messages that end with one by the assistant; mend or leave out those rows, or set "
            "answers.written_by=target"
        )


def given_answers(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> Answered:
    """Encode prompts and the answers they bring, as the target would have read and written them.

    Args:
        target: whose template, tokenizer and end-of-text tokens count.
        prompts: each with an answer, see `check_given`.
        max_new_tokens: longer answers are cut off.

    Raises:
        InputError: a prompt fills the target's context, or its template refuses the conversation.
    """
    conversations: list[Conversation] = []
    dropped = Counter[str]()
    for prompt in prompts:
        outcome = _encode(target, prompt, max_new_tokens)
        if isinstance(outcome, str):
            dropped[outcome] += 1
        else:
            conversations.append(outcome)
    return Answered(conversations=tuple(conversations), dropped=dict(sorted(dropped.items())))


def _encode(target: Target, prompt: Prompt, max_new_tokens: int) -> Conversation | str:
    """Return a prompt's conversation, or the reason why there is none."""
    prompt_ids = encode_prompt(target, prompt)
    messages = (*prompt.messages, {"role": "assistant", "content": str(prompt.answer)})
    whole = target.encode_chat(messages, answer_follows=False)
    if tuple(whole[: len(prompt_ids)]) != prompt_ids:
        return NOT_A_CONTINUATION
    longest = min(max_new_tokens, target.max_positions - len(prompt_ids))
    answer_ids = up_to_end(whole[len(prompt_ids) :], target.eos_token_ids)[:longest]
    ended = bool(answer_ids) and answer_ids[-1] in target.eos_token_ids
    if len(answer_ids) == ended:  # nothing, or nothing but the end
        return EMPTY
    return Conversation(
        prompt_id=prompt.prompt_id,
        category=prompt.category,
        turn=0,
        messages=messages,
        prompt_ids=prompt_ids,
        answer_ids=tuple(answer_ids),
        ended=ended,
    )
