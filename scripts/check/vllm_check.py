"""An export in vLLM: a server without the draft, then one with it, the same chats to both, and the engine's own counts."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx2

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import write_text
from configs.runtime.terminal import progress
from configs.schema.commands.release import CheckConfig
from distill.generation.prompts import Prompt
from heads.frozen.identity import locate
from heads.frozen.tokenizer import load_tokenizer
from scripts.check.comparison import Answer, EngineCheck
from scripts.check.vllm_server import INSTALL, EngineFailed, find_vllm, open_vllm, serving, settled_counters

LINE = "vllm serve "
DRAFT = "--speculative-config"
WARM_UP_TOKENS = 8
# vLLM's own: the ids of the tokens beside their text, and greedy tokens that no setting of the target's own penalises.
EXTRA = {"return_token_ids": True, "return_tokens_as_token_ids": True, "repetition_penalty": 1.0}
ALTERNATIVES = 5  # of a token, in which the other one is looked for


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


def check_vllm(serve: str, prompts: Sequence[Prompt], config: CheckConfig, *, vllm: str | None, out: Path) -> EngineCheck:
    """Serve the target without and with the draft of a `serve.txt`, and compare; no verdict where it does not serve alone."""
    line, command = read_line(serve), find_vllm(vllm)
    if command is None:
        return EngineCheck(engine="vllm", checked=False, reason=f"not installed: {INSTALL}")
    engine = open_vllm(command)
    dtype = config.dtype or ("float32" if engine.is_cpu else None)
    more = [] if dtype is None else ["--dtype", dtype]
    if config.chat_template is not None or config.chat_template_kwargs is not None:
        more += ["--chat-template", write_template(line.options[0], config, out)]
    known: dict[str, Any] = {"version": engine.version, "dtype": dtype or "auto", "max_new_tokens": config.max_new_tokens}
    result = EngineCheck(engine="vllm", checked=True, **known)
    requests = [request_of(prompt, config.max_new_tokens) for prompt in prompts]
    try:
        with serving(engine, (*line.plain, *more), out / "plain.log", seconds=config.start_seconds) as url:
            plain = ask(url, requests, config, "plain")
    except EngineFailed as error:
        return EngineCheck(engine="vllm", checked=False, reason=f"vLLM without the draft {error}", **known)
    try:
        log = out / "draft.log"
        with serving(engine, (*line.options, *more), log, seconds=config.start_seconds, variables=line.variables) as url:
            drafted = ask(url, requests, config, "with the draft")
            result.compare(plain.answers, drafted.answers)
            weigh(url, requests, result, config)
    except EngineFailed as error:
        result.passed, result.reason = False, f"vLLM with the draft {error}"
        return result
    if rounds := drafted.counts["drafts"]:
        result.tokens_per_target_step = 1 + drafted.counts["accepted_tokens"] / rounds
        positions = range(line.draft["num_speculative_tokens"])
        result.acceptance = [drafted.counts[f"position {position}"] / rounds for position in positions]
    result.judge()
    return result


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
    write_text(path, str(load_tokenizer(locate(settings), settings).chat_template))
    return str(path)


def request_of(prompt: Prompt, max_new_tokens: int) -> dict[str, Any]:
    return {"messages": prompt.messages, "max_tokens": max_new_tokens}


def ask(url: str, requests: Sequence[Mapping[str, Any]], config: CheckConfig, what: str) -> Run:
    """Send requests one after the other, after a warm-up."""
    with progress(f"vLLM {what}", len(requests), "prompts") as advance:
        list(converse(url, [{**requests[0], "max_tokens": WARM_UP_TOKENS}], config))
        before, answers = settled_counters(url), []
        for said in converse(url, requests, config):
            answers.append(Answer(**{name: value for name, value in said.items() if name != "alternatives"}))
            advance(1)
    if not all(answer.tokens for answer in answers):
        raise EngineFailed("answers without the ids of tokens: it is too old to know return_token_ids")
    return Run(answers=answers, counts=settled_counters(url) - before)


def weigh(url: str, requests: Sequence[Mapping[str, Any]], result: EngineCheck, config: CheckConfig) -> None:
    """Ask for the log-probabilities of the tokens in which answers differ, and note which are ties."""
    both = [each for each in result.differences if each.plain is not None and each.drafted is not None]
    asked = [
        {**requests[each.prompt], "max_tokens": each.position + 1, "logprobs": True, "top_logprobs": ALTERNATIVES}
        for each in both
    ]
    for each, said in zip(both, converse(url, asked, config), strict=True):
        likely = said["alternatives"][each.position] if len(said["alternatives"]) > each.position else {}
        plain, drafted = (likely.get(f"token_id:{token}") for token in (each.plain, each.drafted))
        if plain is not None and drafted is not None:
            each.weigh(drafted - plain, str(result.dtype))


def converse(url: str, requests: Sequence[Mapping[str, Any]], config: CheckConfig) -> Iterator[dict[str, Any]]:
    """Yield the answers to greedy requests: tokens, when the first and last came, log-probabilities where asked for."""
    try:
        # A proxy is for other machines.
        with httpx2.Client(base_url=url, timeout=config.answer_seconds, trust_env=False) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            for request in requests:
                yield _answer(client, {"model": model, "temperature": 0, "stream": True, **EXTRA, **request})
    except httpx2.HTTPError as error:
        raise EngineFailed(f"does not answer: {type(error).__name__}: {first_line(error)}") from error


def _answer(client: httpx2.Client, request: dict[str, Any]) -> dict[str, Any]:
    tokens: list[int] = []
    alternatives: list[dict[str, float]] = []
    first_seconds, first_tokens = 0.0, 0
    started = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        for line in response.raise_for_status().iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                tokens += choice.get("token_ids") or []
                for one in (choice.get("logprobs") or {}).get("content") or []:
                    alternatives.append({each["token"]: each["logprob"] for each in one["top_logprobs"]})
            if tokens and not first_tokens:
                first_seconds, first_tokens = time.perf_counter() - started, len(tokens)
    times = {"first_seconds": first_seconds, "first_tokens": first_tokens, "seconds": time.perf_counter() - started}
    return {"tokens": tokens, "alternatives": alternatives, **times}
