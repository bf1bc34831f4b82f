"""What tests know of a small target's folder."""

import json
from pathlib import Path

from safetensors.torch import load_file


def last_on_disk(folder, number):
    """Return settings of a target by which its last blocks, so many, lie on disk while they do not run."""
    tensors = load_file(Path(folder) / "model.safetensors")
    block = sum(each.nbytes for name, each in tensors.items() if name.startswith("model.layers.0."))
    num_blocks = json.loads((Path(folder) / "config.json").read_text())["num_hidden_layers"]
    outside = sum(each.nbytes for each in tensors.values()) - num_blocks * block
    return {"device_map": "auto", "max_memory": {"cpu": outside + (num_blocks - number + 1) * block}}  # and one that runs
