"""Suffix lookup that knows some answers, written as a package that vLLM imports; it has no weights."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs.runtime.errors import InputError
from configs.runtime.files import new_folder, write_text
from heads.formats.exporting.exporter import SERVE_FILE
from heads.proposers import suffixes, vllm_suffix_lookup

PACKAGE = "draftsmith_suffix_lookup"
DRAFTS = 6  # a round at most, where nothing else is asked for; a chain ends by its probability
NOTE = (
    "vLLM calls its interface for a user's own class experimental; this one is written for 0.32. A target of several kinds of "
    "attention, and pipeline parallelism, were not run."
)


def export_suffix_lookup(
    answers: Sequence[Sequence[int]], target: str, out: Path, *, engine: str = "vllm", num_speculative_tokens: int | None = None
) -> None:
    """Write a new folder, and in it the line that serves a target with it."""
    if engine != "vllm":
        raise InputError(f"suffix lookup is written for vllm only, not for {engine}: no other engine takes a proposer's code")
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    config = {
        "method": "custom_class",
        "model": f"{PACKAGE}.{vllm_suffix_lookup.VllmSuffixLookup.__name__}",
        "num_speculative_tokens": num_speculative_tokens or DRAFTS,
    }
    line = shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)])
    with new_folder(out) as scratch:
        package = scratch / PACKAGE
        package.mkdir()
        for module, name in ((vllm_suffix_lookup, "__init__.py"), (suffixes, "suffixes.py")):
            write_text(package / name, Path(str(module.__file__)).read_text(encoding="utf-8"))
        tokens = np.concatenate([np.asarray(answer, np.int32) for answer in answers])
        np.savez(package / vllm_suffix_lookup.ANSWERS, tokens=tokens, lengths=np.asarray([len(answer) for answer in answers]))
        served = f"PYTHONPATH={shlex.quote(str(out.resolve()))} {line}"
        write_text(scratch / SERVE_FILE, f"Serve with vllm:\n\n{served}\n\n- {NOTE}\n")
