"""Published Hydra heads (the hubs `ankner/hydra-*`), read.

`hydra_lm_head.pt` holds for each head a stack of blocks, of which the first narrows state and embeddings to the width, and an
output matrix with a bias. Where dropout was in the stack, its places are counted too. Heads of the kind `prefix-mlp` (Hydra++)
hold one Llama layer with its final norm before that; its embedding is never read, because the layer reads states. In the
published code the blocks after the first are one block repeated; here each has its copy.
D width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from configs.runtime.errors import InputError
from heads.formats.importing.external import ExternalDraft
from heads.formats.layout import renamed
from heads.frozen.checkpoint_files import Weights, zeros

KINDS = ("mlp", "prefix-mlp")
BLOCK = re.compile(r"^hydra_mlp\.(\d+)\.(\d+)\.(res_connection|linear)\.(weight|bias)$")
OUTPUT = re.compile(r"^hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)$")
PREFIX = "prefix_embeding_layer."  # spelled so
NEVER_READ = (f"{PREFIX}embed_tokens.weight", f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq")
RENAMED = (
    (f"{PREFIX}layers.0.", "prefix_layer."),
    (f"{PREFIX}norm.", "prefix_norm."),
    ("input_embed_fn.", "embed_tokens."),
)


def read_hydra(config: Mapping[str, Any], weights: Weights) -> ExternalDraft:
    """Return published Hydra heads under our names; an InputError names what ours do not do."""
    kind, num_heads, num_blocks = config.get("hydra_head_arch", "mlp"), config["hydra_num_heads"], config["hydra_num_layers"]
    if kind not in KINDS:
        raise InputError(f"its heads are of the kind {kind!r} (hydra_head_arch), draftsmith has {' and '.join(KINDS)}")
    if not config.get("grounded_heads"):
        raise InputError("its heads do not read the tokens drafted before (grounded_heads false), draftsmith's Hydra heads do")
    if offset := config.get("hidden_state_offset"):
        raise InputError(f"it reads the state of {offset} positions before (hidden_state_offset), draftsmith's heads the last")
    with_prefix = kind == "prefix-mlp"
    settings = {
        "num_depths": num_heads,
        "num_layers": max(1, num_blocks - 1),
        "prefix_attention": with_prefix,
        "prefix_norm": True if with_prefix else None,
        "own_output_heads": True,
        "train_head": True,
    }
    named = _named(weights)
    return ExternalDraft(
        form="Hydra",
        kind="hydra",
        settings=settings,
        layer="target" if with_prefix else None,
        weights=named,
        num_speculative_tokens=num_heads,
        optional=_idle_blocks(named, num_heads) if num_blocks == 1 else {},
    )


def _named(weights: Weights) -> Weights:
    """Return the tensors under our names; those of no known name keep theirs, and are complained of later."""
    places = {(int(found[1]), int(found[2])) for name in weights if (found := BLOCK.match(name))}
    order = {place: sum(head == place[0] and number < place[1] for head, number in places) for place in places}
    return renamed({_name(name, order): stored for name, stored in weights.items() if name not in NEVER_READ}, RENAMED)


def _name(name: str, order: Mapping[tuple[int, int], int]) -> str:
    if found := BLOCK.match(name):
        head, number, part, leaf = found.groups()
        if (block := order[int(head), int(number)]) == 0:
            return f"blocks.{head}.{part}.{leaf}"
        return f"blocks.{head}.blocks.layers.{block - 1}.{leaf}" if part == "linear" else name
    if found := OUTPUT.match(name):
        return f"lm_heads.{found[1]}.{found[2]}"
    return name


def _idle_blocks(named: Weights, num_heads: int) -> Weights:
    """Return a block that adds nothing for each head that ends with its first one: ours have one more at least."""
    blocks: Weights = {}
    for head in range(num_heads):
        if first := named.get(f"blocks.{head}.linear.weight"):
            stem, width = f"blocks.{head}.blocks.layers.0", first.shape[0]
            blocks |= {f"{stem}.weight": zeros((width, width), first.dtype), f"{stem}.bias": zeros((width,), first.dtype)}
    return blocks
