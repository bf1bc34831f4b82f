"""An export in transformers: `generate` without and with the draft, as its `serve.txt` says, in this process."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

from configs.runtime.errors import InputError
from configs.runtime.terminal import progress
from configs.schema.commands.release import CheckConfig
from distill.generation.prompts import Prompt
from heads.device import choose_device
from heads.frozen.identity import locate
from heads.frozen.tokenizer import in_template, load_tokenizer
from scripts.check.comparison import Answer, EngineCheck

WARM_UP_TOKENS = 8
CLASSES: dict[str, Any] = {"AutoModel": AutoModel, "AutoModelForCausalLM": AutoModelForCausalLM}


def check_transformers(serve: str, prompts: Sequence[Prompt], config: CheckConfig) -> EngineCheck:
    """Generate without and with the draft of a `serve.txt`, and compare. T positions."""
    (lines, arguments), device = read_lines(serve), choose_device("auto")
    dtype = config.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    (name, *_), (_, place) = lines, next(iter(lines.values()))
    settings = config.target_at(place)
    tokenizer = load_tokenizer(locate(settings), settings)
    texts = [in_template(tokenizer, place, prompt.messages) for prompt in prompts]
    inputs = [tokenizer(text, add_special_tokens=False, return_tensors="pt").to(device) for text in texts]
    models = {each: load(*what, dtype, device) for each, what in lines.items()}
    model = models[name]
    own = model.generation_config
    # From scratch, so that nothing of the model's own changes what is generated.
    model.generation_config = GenerationConfig(
        do_sample=False, use_cache=True, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    steps: list[int] = []
    model.register_forward_pre_hook(lambda *_: steps.append(1))
    drafting = {key: models.get(str(value), value) for key, value in arguments.items()}
    model.generate(**inputs[0], max_new_tokens=WARM_UP_TOKENS)
    plain = generate(model, inputs, config, {}, "plain")
    steps.clear()
    drafted = generate(model, inputs, config, drafting, "with the draft")
    result = EngineCheck(
        engine="transformers",
        checked=True,
        version=transformers.__version__,
        dtype=dtype,
        max_new_tokens=config.max_new_tokens,
        tokens_per_target_step=sum(len(answer.tokens) for answer in drafted) / len(steps),
    )
    result.compare(plain, drafted)
    for each in result.differences:
        if each.plain is not None and each.drafted is not None:
            shared = torch.tensor([drafted[each.prompt].tokens[: each.position]], dtype=torch.long, device=device)
            ids_1T = torch.cat([inputs[each.prompt]["input_ids"], shared], dim=1)
            with torch.inference_mode():
                likely_V = model(ids_1T).logits[0, -1].float().log_softmax(-1)
            each.weigh(float(likely_V[each.drafted] - likely_V[each.plain]), dtype)
    result.judge()
    return result


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


def load(kind: str, place: str, dtype: str, device: torch.device) -> Any:
    """Return a model that a line loads."""
    if Path(place).is_absolute() and not Path(place).is_dir():
        raise InputError(f"serve.txt names {place}, which is not there: export the draft again where it is to be used")
    return CLASSES[kind].from_pretrained(place, dtype=getattr(torch, dtype)).to(device).eval()


def generate(model: Any, inputs: Sequence[Any], config: CheckConfig, drafting: dict[str, Any], what: str) -> list[Answer]:
    """Answer prompts greedily, one after the other; a time holds the prompt's forward too."""
    answers = []
    with progress(f"transformers {what}", len(inputs), "prompts") as advance, torch.inference_mode():
        for each in inputs:
            started = time.perf_counter()
            output_1T = model.generate(**each, max_new_tokens=config.max_new_tokens, **drafting)
            tokens = output_1T[0, each["input_ids"].shape[1] :].tolist()
            answers.append(Answer(tokens=tokens, seconds=time.perf_counter() - started))
            advance(1)
    return answers


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
