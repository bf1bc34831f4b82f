"""What a target writes: answers to prompts, and continuations of token ids."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from distill.generation.answers import AnswerJob
from distill.generation.continuation import Request, TargetSource, continue_requests


def answer_prompts(target, prompts, config, *, seed):
    """Answer prompts turn by turn; return a conversation for each answered turn, and the dropped turns by reason."""
    with TemporaryDirectory() as folder:
        job = AnswerJob(target=target, prompts=prompts, config=config, seed=seed, folder=Path(folder), fingerprint="")
        job.work(rank=0, num_processes=1)
        answered = job.collect()
        return [row for prompt in prompts for row in answered.rows_of(prompt)], dict(answered.dropped)


def continue_tokens(target, prompts, sampling, *, max_new_tokens, seed, requests):
    """Continue a batch of token ids; return what was written, the end-of-text token included where there is one."""
    written = {}
    asked = [
        Request(
            prompt_ids=ids,
            limit=min(len(ids) + max_new_tokens, target.max_positions),
            number=number,
            has_ended=lambda request: request.tokens[-1] in target.eos_token_ids,
            on_done=partial(written.__setitem__, place),
        )
        for place, (ids, number) in enumerate(zip(prompts, requests, strict=True))
    ]
    continue_requests(TargetSource(target, sampling), asked, seed=seed)
    return [written[place] for place in range(len(asked))]
