"""Sizes of a head's own layers, where they are not those of the target's blocks. Imports no torch.

A head that is trained here takes over the sizes of the target's blocks. One that another program trained may have its own, and
keeps them in its artifact under `layer`. The width is always the target's, whose states and embedding the layers read.
"""

from __future__ import annotations

from typing import Any

from configs.settings import PositiveFloat, PositiveInt, Settings


class LayerSettings(Settings):
    """Sizes of draft layers; None: as the target's blocks have it."""

    mlp_width: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_width: PositiveInt | None = None
    norm_epsilon: PositiveFloat | None = None
    rope_theta: PositiveFloat | None = None
    # How rotary frequencies are scaled (llama3, yarn, linear), in the keys of transformers' `rope_parameters`; None: not.
    rope_scaling: dict[str, Any] | None = None
    max_positions: PositiveInt | None = None
