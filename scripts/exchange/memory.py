"""What exports and imports hold in memory at most: `python scripts/exchange/memory.py FOLDER --vocab-size 131072`.

Makes a target and an EAGLE-3 head with an embedding and an output head of its own in an empty folder, exports the head, exports
it in another dtype, and imports it. Prints a JSON line a step: the peak of resident memory above what was held before the step,
and what may be held: 1.2 times the largest tensor, and for an import the head beside it. Linux only, whose kernel lets a
process reset its peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[2])

MIB = 2**20
ALLOWED = 1.2  # times the largest tensor
WIDTH = 512


def main(folder: Path, vocab_size: int) -> None:
    """Make the folders, take the steps, print what each held."""
    # torch takes seconds to import; help comes before that.
    import torch
    from transformers import AutoModelForCausalLM

    from heads.formats.exporting.exporter import export
    from heads.formats.exporting.source import TargetFolder, read_source
    from heads.formats.importing.importer import fit, write_artifact
    from heads.formats.importing.reading import read_foreign

    identity = write_draft(folder, vocab_size)
    target_folder = TargetFolder(folder / "target", "target")
    largest = vocab_size * WIDTH * 4
    head = (folder / "artifact" / "model.safetensors").stat().st_size

    def exported(name: str, dtype: torch.dtype | None) -> None:
        export(read_source(folder / "artifact", target_folder, dtype=dtype), "speculators", folder / name)

    def imported() -> None:
        fitted = fit(read_foreign(folder / "exported"), model)
        write_artifact(fitted, folder / "back", identity, vocab_size=vocab_size, num_speculative_tokens=3, provenance={})

    tell("export", lambda: exported("exported", None), ALLOWED * largest)
    tell("export in bfloat16", lambda: exported("cast", torch.bfloat16), ALLOWED * largest)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    model.requires_grad_(False)
    touch(model)
    tell("import", imported, head + ALLOWED * largest)


def write_draft(folder: Path, vocab_size: int) -> Any:
    """Write `target/` and `artifact/`; return the target's identity."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from configs.schema.heads import Eagle3Settings
    from heads.artifact import HiddenStates, Metadata, save_head
    from heads.families.registry import FAMILIES
    from heads.target.identity import TargetIdentity, hash_weights

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
    metadata = Metadata(
        kind="eagle3",
        target=identity.to_dict(),
        hidden_states=HiddenStates(taps=[0, 1], concat_order=["h_0", "h_1"], last_is_post_norm=True),
        head=settings.model_dump(mode="json"),
        draft_vocab_size=vocab_size,
        num_speculative_tokens=3,
        training={},
        provenance={},
    )
    save_head(folder / "artifact", head, metadata)
    return identity


def touch(model: Any) -> None:
    """Read all weights once, so that pages of a mapped file count as held."""
    for parameter in model.parameters():
        parameter.sum()


def tell(step: str, take: Callable[[], None], allowed: float) -> None:
    """Take a step; print the peak of what it held beyond what was held before, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = held("VmRSS")
    take()
    print(
        json.dumps({"step": step, "peak_mib": round((held("VmHWM") - before) / MIB, 1), "allowed_mib": round(allowed / MIB, 1)})
    )


def held(name: str) -> int:
    """Return a figure of the process's memory in bytes, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what exports and imports hold in memory at most.")
    parser.add_argument("folder", type=Path, help="an empty folder; about ten times the largest tensor is written to it")
    parser.add_argument("--vocab-size", type=int, default=131_072, help="rows of the largest tensors, of 2 KiB each")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.vocab_size)
