"""The peak memory of exports and imports, which read and write tensors in blocks of rows.

A target and an EAGLE-3 head with its own embedding and output head are made in an empty folder; the head is exported, exported
in another dtype, and imported. Each step prints a JSON line: the peak growth of resident memory, and the limit: 1.2 times the
largest tensor, for an import plus the head. Linux only.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from configs.runtime.command import DONE, GATE_FAILED
from configs.schema.heads import Eagle3Settings
from heads.artifact import head_metadata, save_head
from heads.families.registry import FAMILIES
from heads.formats.exporting.exporter import export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.formats.importing.importer import fit, write_artifact
from heads.formats.importing.reading import read_external
from heads.frozen.identity import TargetIdentity, hash_weights
from scripts.lab.bench.harness import measure_growth
from scripts.lab.settings import ExchangeMemoryConfig

MIB = 2**20
ALLOWED = 1.2  # times the largest tensor
WIDTH = 512


def measure_exchange(config: ExchangeMemoryConfig) -> int:
    """Make the folders, take the steps, print what each took; return the exit code."""
    with TemporaryDirectory(prefix="exchange-") if config.folder is None else nullcontext(config.folder) as folder:
        return DONE if _measure_in(Path(folder), config.vocab_size) else GATE_FAILED


def _measure_in(folder: Path, vocab_size: int) -> bool:
    identity = write_draft(folder, vocab_size)
    target_folder = TargetFolder(folder / "target", "target")
    largest = vocab_size * WIDTH * 4
    head = (folder / "artifact" / "model.safetensors").stat().st_size

    def exported(name: str, dtype: torch.dtype | None) -> None:
        export(read_source(folder / "artifact", target_folder, dtype=dtype), "speculators", folder / name)

    def imported() -> None:
        fitted = fit(read_external(folder / "exported"), model)
        write_artifact(fitted, folder / "back", identity, vocab_size=vocab_size, num_speculative_tokens=3, provenance={})

    good = measure_step("export", lambda: exported("exported", None), ALLOWED * largest)
    good &= measure_step("export in bfloat16", lambda: exported("cast", torch.bfloat16), ALLOWED * largest)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.sum()  # reads the mapped file, so that its pages count as resident before the step
    return good & measure_step("import", imported, head + ALLOWED * largest)


def measure_step(name: str, work: Callable[[], None], allowed: float) -> bool:
    """Do a step and print its peak growth in MiB; return whether it stayed below `allowed` bytes."""
    gc.collect()
    _, growth = measure_growth(work)
    print(json.dumps({"step": name, "peak_mib": round(growth / MIB, 1), "allowed_mib": round(allowed / MIB, 1)}))
    return growth <= allowed


def write_draft(folder: Path, vocab_size: int) -> TargetIdentity:
    """Write `target/` and `artifact/`; return the target's identity."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    model.save_pretrained(folder / "target")
    settings = Eagle3Settings(kind="eagle3", taps=[0, 1], own_embedding=True, train_head=True)
    head = FAMILIES["eagle3"].build(settings, model, None)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(1.0)
    identity = TargetIdentity(
        name="target",
        revision=None,
        weights_sha256=hash_weights(folder / "target"),
        tokenizer_sha256="",
        chat_template_sha256="",
    )
    metadata = head_metadata(settings, [0, 1], identity, None, vocab_size, num_speculative_tokens=3, training={}, provenance={})
    save_head(folder / "artifact", head, metadata)
    return identity
