"""The commands and lines that serve an export, by engine; each function returns what makes them from the export's folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

from heads.formats.exporting.source import Source

Serve = Callable[[str], str]
# vLLM 0.32 gives a draft the cache blocks of one kind of layer; without the hybrid manager layers that attend are of one kind
APART = "--disable-hybrid-kv-cache-manager"
UNTRIED = "Format-checked only: names, shapes and ids were compared with what the engine reads; it was not run."


def vllm_command(source: Source, method: str, *options: str, stitched: bool = False, **more: Any) -> Serve:
    """Return how vLLM serves a target with a draft, or, stitched, a target that has the draft in it.

    `options` go into the command, `more` joins the method in its config.
    """

    def line(out: str) -> str:
        model = {} if stitched else {"model": out}
        config = {"method": method, **model, "num_speculative_tokens": source.num_speculative_tokens, **more}
        target = out if stitched else source.target.name
        return shlex.join(["vllm", "serve", target, *options, "--speculative-config", json.dumps(config, ensure_ascii=False)])

    return line


def sglang_command(source: Source, algorithm: str, tokens: int | None) -> Serve:
    """Return how SGLang serves a target with a draft; `tokens` are drafted a round in a chain (None: the draft's own)."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", source.target.name, "--speculative-algorithm", algorithm]
    chain: list[str] = []
    if tokens is not None:
        chain = ["--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"]
        chain += ["--speculative-num-draft-tokens", str(tokens + 1)]
    return lambda out: shlex.join([*words, "--speculative-draft-model-path", out, *chain])


def transformers_lines(source: Source, draft_class: str, options: str) -> Serve:
    dtype = source.dtype_name

    def lines(out: str) -> str:
        target = f"target = AutoModelForCausalLM.from_pretrained({source.target.name!r}, dtype=torch.{dtype})"
        draft = f"draft = {draft_class}.from_pretrained({out!r}, dtype=torch.{dtype})"
        return "\n".join([target, draft, f"target.generate(**inputs, assistant_model=draft{options})"])

    return lines


def speculators_line(out: str) -> str:
    return shlex.join(
        ["python", "-c", f"from speculators import SpeculatorModel; SpeculatorModel.from_pretrained({json.dumps(out)})"]
    )
