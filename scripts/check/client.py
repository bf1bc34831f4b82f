"""A client of an OpenAI-compatible server: chat requests in, streamed answers out, each with its times.

Run by the Python of vLLM's environment, which has the `openai` package and none of this project's. Standard input holds a job,
`{"url", "timeout_seconds", "requests": [{"messages": [...], "max_tokens": 64, ...}]}`, a request being what
`chat.completions.create` takes. An answer is a line of JSON on standard output; so is an error, which ends it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from openai import OpenAI, OpenAIError

# vLLM's own: the ids of the tokens beside their text, and greedy tokens that no setting of the target's own penalises.
EXTRA = {"return_token_ids": True, "return_tokens_as_token_ids": True, "repetition_penalty": 1.0}


def main() -> None:
    job = json.load(sys.stdin)
    try:
        client = OpenAI(base_url=job["url"], api_key="none", timeout=job["timeout_seconds"], max_retries=0)
        model = client.models.list().data[0].id
        for request in job["requests"]:
            print(json.dumps(answer(client, model, request)), flush=True)
    except OpenAIError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


def answer(client: OpenAI, model: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask greedily; return the tokens, when the first and the last of them came, and log-probabilities where asked for."""
    tokens: list[int] = []
    alternatives: list[dict[str, float]] = []
    first_seconds, first_tokens = 0.0, 0
    started = time.perf_counter()
    for chunk in client.chat.completions.create(model=model, temperature=0, stream=True, extra_body=EXTRA, **request):
        for choice in chunk.choices:
            tokens += getattr(choice, "token_ids", None) or []
            if choice.logprobs is not None:
                alternatives += [
                    {each.token: each.logprob for each in one.top_logprobs} for one in choice.logprobs.content or ()
                ]
        if tokens and not first_tokens:
            first_seconds, first_tokens = time.perf_counter() - started, len(tokens)
    seconds = time.perf_counter() - started
    times = {"first_seconds": first_seconds, "first_tokens": first_tokens, "seconds": seconds}
    return {"tokens": tokens, "alternatives": alternatives, **times}


if __name__ == "__main__":
    main()
