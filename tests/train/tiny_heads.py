"""Settings of small heads, one a family, for targets of three blocks."""

HEADS = {
    "medusa": {"kind": "medusa", "num_depths": 3},
    "hydra": {"kind": "hydra", "num_depths": 3},
    "eagle3": {"kind": "eagle3", "taps": [1, 2, 3], "num_depths": 3},
    "mtp": {"kind": "mtp", "num_depths": 3},
    "peagle": {"kind": "peagle", "taps": [1, 2, 3], "num_depths": 3, "num_layers": 1, "mask_token_id": 0},
    "dflash": {"kind": "dflash", "taps": [1, 2, 3], "block_size": 4, "mask_token_id": 0},
}
