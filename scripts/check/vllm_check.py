"""An export in vLLM: a server without the draft, then one with it, the same chats to both, and the engine's own counts."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx2

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_object, write_text
from configs.runtime.terminal import progress
from configs.schema.commands.release import CheckConfig
from configs.schema.decoding import SamplingConfig
from configs.schema.target import TargetConfig
from distill.generation.prompts import Prompt
from heads.frozen.identity import locate
from heads.frozen.tokenizer import load_tokenizer
from scripts.check.answers import judge_answers
from scripts.check.comparison import Answer, EngineCheck, counts_of
from scripts.check.vllm_server import INSTALL, EngineFailed, find_vllm, open_vllm, serving, settled_counters

LINE = "vllm serve "
DRAFT = "--speculative-config"
WARM_UP_TOKENS = 8
GREEDY = SamplingConfig()
# vLLM's own: the ids of prompt and answer beside the text, and greedy tokens that no setting of the target's own penalises.
EXTRA = {"return_token_ids": True, "repetition_penalty": 1.0}


@dataclass(frozen=True, kw_only=True)
class ServeLine:
    """The line of an export that serves it."""

    options: tuple[str, ...]  # the target first
    draft: Mapping[str, Any]  # the speculative config
    variables: Mapping[str, str]  # of the environment, for the draft

    @property
    def plain(self) -> tuple[str, ...]:
        """The options without the draft."""
        place = self.options.index(DRAFT)
        return self.options[:place] + self.options[place + 2 :]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The answers of one server, and what its counters gained by them."""

    answers: list[Answer]
    counts: Counter[str]


def check_vllm(
    result: EngineCheck, serve: str, prompts: Sequence[Prompt], config: CheckConfig, *, vllm: str | None, out: Path
) -> None:
    """Serve the target without and with the draft of a `serve.txt`, and compare; no verdict where it does not serve alone."""
    line, command = read_line(serve), find_vllm(vllm)
    if command is None:
        result.checked, result.reason = False, f"not installed: {INSTALL}"
        return
    engine = open_vllm(command)
    dtype = config.dtype or ("float32" if engine.is_cpu else None)
    more = [] if dtype is None else ["--dtype", dtype]
    if config.chat_template is not None or config.chat_template_kwargs is not None:
        more += ["--chat-template", write_template(line.options[0], config, out)]
    result.version, result.dtype = engine.version, dtype or "auto"
    try:
        with serving(engine, (*line.plain, *more), out / "plain.log", seconds=config.start_seconds) as url:
            plain = ask(url, prompts, config, "plain")
    except EngineFailed as error:
        result.checked, result.reason = False, f"vLLM without the draft {error}"
        return
    try:
        log = out / "draft.log"
        with serving(engine, (*line.options, *more), log, seconds=config.start_seconds, variables=line.variables) as url:
            drafted = ask(url, prompts, config, "with the draft")
            if config.sampling is not None:
                sampled = ask(url, prompts, config, "as it is served", config.sampling)
                result.sampling, result.sampled_per_prompt = config.sampling.model_dump(), counts_of(sampled.answers)
    except EngineFailed as error:
        result.passed, result.reason = False, f"vLLM with the draft {error}"
        return
    result.compare(plain.answers, drafted.answers)
    rounds, positions = drafted.counts["drafts"], range(line.draft["num_speculative_tokens"])
    result.acceptance = [drafted.counts[f"position {position}"] / rounds for position in positions] if rounds else []
    settings = config.target_at(line.options[0])
    judge_answers(result, settings.model_copy(update={"dtype": dtype or own_dtype(settings)}), plain.answers, drafted.answers)


def own_dtype(target: TargetConfig) -> str:
    """Return the dtype in which vLLM runs a target where none is asked for: of 16 bits, its own if it has such a one."""
    config = read_object(locate(target) / "config.json", "config of the target")
    return "float16" if "float16" in (config.get("dtype"), config.get("torch_dtype")) else "bfloat16"


def read_line(serve: str) -> ServeLine:
    """Return the line of a `serve.txt` by which vLLM serves its draft; what it names must be there."""
    words = next((shlex.split(line) for line in serve.splitlines() if LINE in line and DRAFT in line), [])
    variables = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, words))
    words = words[len(variables) :]
    if DRAFT not in words:
        raise InputError(f"serve.txt has no line `{LINE}TARGET {DRAFT} ...`; export the draft with --to vllm")
    draft = json.loads(words[words.index(DRAFT) + 1])
    for place in (words[2], draft.get("model", words[2])):
        if Path(place).is_absolute() and not Path(place).is_dir():
            raise InputError(f"serve.txt names {place}, which is not there: export the draft again where it is to be served")
    return ServeLine(options=tuple(words[2:]), draft=draft, variables=variables)


def write_template(target: str, config: CheckConfig, out: Path) -> str:
    """Write the chat template that the config names into a file, for vLLM; return its path."""
    settings = config.target_at(target)
    path = out / "chat_template.jinja"
    write_text(path, load_tokenizer(locate(settings), settings).get_chat_template())
    return str(path)


def ask(url: str, prompts: Sequence[Prompt], config: CheckConfig, what: str, sampling: SamplingConfig = GREEDY) -> Run:
    """Send chats one after the other, after a warm-up."""
    answers: list[Answer] = []
    with progress(f"vLLM {what}", len(prompts), "prompts") as advance, connected(url, config, sampling) as answer:
        answer(prompts[0], WARM_UP_TOKENS)
        before = first = settled_counters(url)
        for prompt in prompts:
            said = answer(prompt, config.max_new_tokens)
            now = settled_counters(url)
            gained, before = now - before, now
            answers.append(Answer(**said, rounds=gained["drafts"], accepted=gained["accepted_tokens"]))
            advance(1)
    if not all(each.tokens and each.prompt_tokens for each in answers):
        raise EngineFailed("answers without the ids of tokens: it is too old to know return_token_ids")
    return Run(answers=answers, counts=before - first)


@contextmanager
def connected(url: str, config: CheckConfig, sampling: SamplingConfig) -> Iterator[Callable[[Prompt, int], dict[str, Any]]]:
    """Give a function that sends a chat, to be answered in at most so many tokens; see `_answer`."""
    asked = {"temperature": sampling.temperature, "top_k": sampling.top_k or -1, "top_p": sampling.top_p or 1.0, "seed": 0}
    try:
        # A proxy is for other machines.
        with httpx2.Client(base_url=url, timeout=config.answer_seconds, trust_env=False) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            always = {"model": model, "stream": True, "min_p": sampling.min_p or 0.0, **asked, **EXTRA}
            yield lambda prompt, most: {
                "prompt_id": prompt.prompt_id,
                **_answer(client, always | {"messages": prompt.messages, "max_tokens": most}),
            }
    except httpx2.HTTPError as error:
        raise EngineFailed(f"does not answer: {type(error).__name__}: {first_line(error)}") from error


def _answer(client: httpx2.Client, request: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of prompt and answer, and when the first and the last came."""
    prompt_tokens: list[int] = []
    tokens: list[int] = []
    first_seconds, first_tokens = 0.0, 0
    started = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        for line in response.raise_for_status().iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            prompt_tokens += piece.get("prompt_token_ids") or []
            for choice in piece["choices"]:
                tokens += choice.get("token_ids") or []
            if tokens and not first_tokens:
                first_seconds, first_tokens = time.perf_counter() - started, len(tokens)
    times = {"first_seconds": first_seconds, "first_tokens": first_tokens, "seconds": time.perf_counter() - started}
    return {"prompt_tokens": prompt_tokens, "tokens": tokens, **times}
