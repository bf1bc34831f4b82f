"""What families made of DFlash add to its form in the speculators library: keys of the config, and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from configs.schema.heads import DSparkSettings
from heads.formats.exporting.source import Source
from heads.formats.layout import Shapes

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


PARTS: dict[str, Callable[[Source], Parts]] = {"dflash": lambda _: ({}, {}), "dspark": dspark}
