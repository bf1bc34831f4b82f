"""An export in transformers: `generate` without and with the draft, as its `serve.txt` says, in this process."""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

from configs.runtime.errors import InputError
from configs.runtime.terminal import progress
from configs.schema.commands.release import CheckConfig
from configs.schema.target import TargetConfig
from distill.generation.prompts import Prompt
from heads.device import choose_device
from heads.frozen.identity import locate
from heads.frozen.tokenizer import in_template, load_tokenizer
from scripts.check.answers import judge_answers
from scripts.check.comparison import Answer, EngineCheck

WARM_UP_TOKENS = 8
CLASSES: dict[str, Any] = {"AutoModel": AutoModel, "AutoModelForCausalLM": AutoModelForCausalLM}


def check_transformers(result: EngineCheck, serve: str, prompts: Sequence[Prompt], config: CheckConfig) -> None:
    """Generate without and with the draft of a `serve.txt`, and compare."""
    (lines, arguments), device = read_lines(serve), choose_device("auto")
    result.version = transformers.__version__
    result.dtype = dtype = config.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    target, trust = next(iter(lines)), config.trust_remote_code
    settings = config.target_at(lines[target][1])
    models = {name: load(*what, dtype, device, name == target and trust) for name, what in lines.items()}
    drafting = {key: models.get(str(value), value) for key, value in arguments.items()}
    inputs = tokenized(prompts, settings, device)
    plain, drafted = run_both(models.pop(target), inputs, config.max_new_tokens, drafting)
    del models, drafting  # the target is loaded once more
    result.compare(plain, drafted)
    judge_answers(result, settings.model_copy(update={"dtype": dtype}), plain, drafted)


def tokenized(prompts: Sequence[Prompt], settings: TargetConfig, device: torch.device) -> dict[str, Any]:
    """Return what a model reads of each prompt, by its id."""
    tokenizer = load_tokenizer(locate(settings), settings)
    texts = {prompt.prompt_id: in_template(tokenizer, settings.name, prompt.messages) for prompt in prompts}
    return {key: tokenizer(text, add_special_tokens=False, return_tensors="pt").to(device) for key, text in texts.items()}


def run_both(model: Any, inputs: Mapping[str, Any], max_new_tokens: int, drafting: dict[str, Any]) -> list[list[Answer]]:
    """Return a model's answers without and with the draft, after a warm-up."""
    own = model.generation_config
    # From scratch, so that nothing of the model's own changes what is generated.
    model.generation_config = GenerationConfig(
        do_sample=False, use_cache=True, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    model.generate(**next(iter(inputs.values())), max_new_tokens=WARM_UP_TOKENS)
    ways: dict[str, dict[str, Any]] = {"plain": {}, "with the draft": drafting}
    return [generate(model, inputs, max_new_tokens, given, what) for what, given in ways.items()]


def read_lines(serve: str) -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    """Return what the lines of a `serve.txt` load, and how they call `generate`.

    By variable, the target's first: class and folder or Hub id; then the arguments, a variable by its name.
    """
    models, arguments = {}, {}
    for line in serve.splitlines():
        if line.startswith("- ") or not any(part in line for part in (".from_pretrained(", ".generate(")):
            continue
        statement: Any = ast.parse(line).body[0]
        if isinstance(statement, ast.Assign):
            call: Any = statement.value
            models[ast.unparse(statement.targets[0])] = (ast.unparse(call.func.value), ast.literal_eval(call.args[0]))
        else:
            given = [each for each in statement.value.keywords if each.arg is not None]
            arguments = {each.arg: _value(each.value) for each in given}
    if not models or not arguments or any(kind not in CLASSES for kind, _ in models.values()):
        raise InputError("serve.txt has no lines that load and call a model of transformers; export it with --to transformers")
    return models, arguments


def load(kind: str, place: str, dtype: str, device: torch.device, trust_remote_code: bool) -> Any:
    """Return a model that a line loads."""
    if Path(place).is_absolute() and not Path(place).is_dir():
        raise InputError(f"serve.txt names {place}, which is not there: export the draft again where it is to be used")
    model = CLASSES[kind].from_pretrained(place, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)
    return model.to(device).eval()


def generate(model: Any, inputs: Mapping[str, Any], max_new_tokens: int, drafting: dict[str, Any], what: str) -> list[Answer]:
    """Answer prompts, by their ids, greedily, one after the other; a time holds the prompt's forward too, as do the rounds."""
    answers, steps = [], list[int]()
    counting = model.register_forward_pre_hook(lambda *_: steps.append(1))
    with progress(f"transformers {what}", len(inputs), "prompts") as advance, torch.inference_mode():
        for prompt_id, each in inputs.items():
            steps.clear()
            started = time.perf_counter()
            output_1T = model.generate(**each, max_new_tokens=max_new_tokens, **drafting)
            seconds, prompt = time.perf_counter() - started, each["input_ids"][0].tolist()
            tokens = output_1T[0, len(prompt) :].tolist()
            counts = {"rounds": len(steps), "accepted": len(tokens) - len(steps)}
            answers.append(Answer(prompt_id=prompt_id, prompt_tokens=prompt, tokens=tokens, seconds=seconds, **counts))
            advance(1)
    counting.remove()
    return answers


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
