"""MTP inside a copy of its target, for targets whose checkpoints have MTP weights: what vLLM serves with `--to vllm`.

The folder is the target's own with exactly the MTP tensors new; files in which there are none are links to the target's. vLLM
finds its model class by the target's config, as for the original checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from configs.runtime.files import read_json
from heads.formats.exporting.source import Source
from heads.formats.exporting.speculators import vllm_command
from heads.formats.layout import ExportLayout
from heads.frozen.checkpoint_files import Weights
from heads.frozen.mtp_checkpoint import NativeMtp

OURS = "transformers"  # a naming that transformers' `use_mtp` reads; vLLM has no model class for it
HYBRID = ("qwen3_next", "qwen3_5")  # vLLM 0.32 on a CPU fails to decode these with prefix caching (Qwen3-Next tried)


class LoadedAtUse(Mapping[str, Tensor]):
    """Stored tensors as a mapping to their values, each read on access and not kept."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def stitched(source: Source) -> ExportLayout:
    """Return the target's checkpoint with the head's modules in the place of its own, where vLLM runs them as trained."""
    target = source.target
    native = NativeMtp(target.folder)
    if native.naming.families == OURS:
        raise InputError(
            f"{target.folder} has MTP weights under names that transformers alone reads; export beside the original"
        )
    reads = native.naming.reads
    if source.settings.reads != reads:
        raise InputError(
            f"it reads the target's last state {source.settings.reads} (head.reads), and vLLM gives modules of "
            f"{native.naming.families} the one {reads}"
        )
    modules = {name: stored for name, stored in source.body().items() if name.startswith("layers.")}
    own = len({name.split(".")[1] for name in modules})
    if own != native.num_layers:
        raise InputError(f"it has {own} MTP modules, and {target.folder} has places for {native.num_layers}")
    hidden_first = source.settings.concat_order == "hidden_first"
    like = {name: torch.empty(stored.shape, device="meta") for name, stored in modules.items()}
    places = native.places(like, hidden_first=hidden_first)
    weights = {piece.key: target.weights[piece.key] for pieces in places.values() for piece in pieces}
    options = ("--no-enable-prefix-caching",) if target.config.model_type.startswith(HYBRID) else ()
    return ExportLayout(
        config=read_json(target.folder / "config.json", "config of the target"),
        weights=weights,
        expected={name: stored.shape for name, stored in weights.items()},
        serve=vllm_command(source, "mtp", *options, stitched=True),
        notes=(
            "The folder is the target with new MTP weights, in the dtype of the old ones; it shares files with the target's "
            "folder, so change neither in place.",
            *source.whole_vocabulary_note("vLLM"),
        ),
        holds_target=True,
        make=partial(native.stitch_into, tensors=LoadedAtUse(modules), places=places),
    )
