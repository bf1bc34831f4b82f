"""Tensor names of other programs that both importing and exporting need."""

from __future__ import annotations

from collections.abc import Iterable

# Prefixes of an MTP module's tensors: ours, and those of speculators (with `model.` before them, MiMo's).
MTP_PARTS = (
    ("layers.0.eh_proj.", "mtp_layers.0.input_proj."),
    ("layers.0.enorm.", "mtp_layers.0.token_layernorm."),
    ("layers.0.hnorm.", "mtp_layers.0.hidden_layernorm."),
    ("layers.0.post_norm.", "mtp_layers.0.final_layernorm."),
    ("layers.0.mtp_block.", "mtp_layers.0."),
)
# Prefixes of DFlash tensors: ours, and those of transformers' own class.
TRANSFORMERS_DFLASH = (("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc."))
# Keys of DFlash2's, XPress's and Domino's configs that are settings of ours.
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
XPRESS_KEYS = ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes")
DOMINO_KEYS = ("gru_hidden_dim", "emb_dim")
MTP_SIGNS = ("mtp", "eh_proj")


def has_mtp_modules(names: Iterable[str]) -> bool:
    """Return whether some tensors, by their names, look like those of an MTP module."""
    return any(sign in name for name in names for sign in MTP_SIGNS)
