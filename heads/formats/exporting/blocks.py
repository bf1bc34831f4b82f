"""What families made of DFlash add to its form in the speculators library: keys of the config, and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from configs.runtime.errors import InputError
from configs.schema.heads import DFlash2Settings, DSparkSettings, XPressSettings
from heads.formats.exporting.source import Source
from heads.formats.layout import Shapes
from heads.formats.names import DFLASH2_KEYS, XPRESS_KEYS

Parts = tuple[dict[str, Any], Shapes]


def dspark(source: Source) -> Parts:
    """Return DSpark's: the bias of the token before, and the confidence head."""
    settings: DSparkSettings = source.settings
    rank, width = settings.markov_rank, source.shape.width
    options = {
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return options, {
        "markov_head.markov_w1.weight": (source.target.vocab_size, rank),
        "markov_head.markov_w2.weight": (source.draft_vocab_size, rank),
        "confidence_head.proj.weight": (1, width + rank),
        "confidence_head.proj.bias": (1,),
    }


def dflash2(source: Source) -> Parts:
    """Return DFlash2's: the convolutions of each layer, and the selector."""
    settings: DFlash2Settings = source.settings
    if source.vocabulary is not None:
        raise InputError("its draft vocabulary is reduced, and the form's selector has a code for every token of the target's")
    width, size, rank = source.shape.width, settings.conv_kernel_size, settings.selector_rank
    shapes: Shapes = {
        "candidate_selector.predecessor_codebook": (source.target.vocab_size, rank),
        "candidate_selector.successor_codebook": (source.target.vocab_size, rank),
        "candidate_selector.hidden_projection.weight": (rank, width),
    }
    for prefix in (f"layers.{n}.{part}_conv." for n in range(settings.num_layers) for part in ("attention", "mlp")):
        shapes[f"{prefix}base_kernel"] = (2, size, width)
        shapes[f"{prefix}kernel_projection.weight"] = (2 * size * (width // settings.conv_group_size), width)
    return {key: getattr(settings, key) for key in DFLASH2_KEYS}, shapes


def xpress(source: Source) -> Parts:
    """Return XPress's refiner."""
    settings: XPressSettings = source.settings
    width, rank, slots = source.shape.width, settings.xpress_rank, settings.block_size
    inner = rank * settings.xpress_mlp_ratio
    shapes: Shapes = {
        "token_embed.weight": (source.target.vocab_size, rank),
        "down_h.weight": (rank, width),
        "down_g.weight": (rank, width),
        "in_proj.weight": (rank, 3 * rank),
        "mix_l": (rank, slots, slots),
        "mlp_gate.weight": (inner, rank),
        "mlp_up.weight": (inner, rank),
        "mlp_down.weight": (rank, inner),
        "readout.weight": (source.draft_vocab_size, rank),
    }
    options = {key: getattr(settings, key) for key in XPRESS_KEYS}
    return options, {f"refiner_head.{name}": size for name, size in shapes.items()}


PARTS: dict[str, Callable[[Source], Parts]] = {
    "dflash": lambda _: ({}, {}),
    "dspark": dspark,
    "dflash2": dflash2,
    "xpress": xpress,
}
