"""How near plain decoding comes to the least time it could take: that of reading every weight once for each token.

The bandwidth is measured, by summing a block of memory far larger than any cache with the threads that decoding uses. Left
out: the keys and values, which for short texts are little beside the weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

READ_BYTES = 2**28
READS = 5


def floor_shares(model: PreTrainedModel, seconds_per_token: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes a token reads, the bandwidth, and which share of the floor's speed each forward reaches.

    Args:
        model: the target.
        seconds_per_token: of plain decoding at batch 1, by the name of the forward.

    Returns:
        `bytes_per_token`, `gigabytes_per_second`, and `share_NAME` by forward, 1 being as fast as memory can be read.
    """
    bytes_per_token = weight_bytes(model)
    bandwidth = read_bandwidth(model.device)
    shares = {f"share_{name}": bytes_per_token / bandwidth / seconds for name, seconds in seconds_per_token.items()}
    return {"bytes_per_token": bytes_per_token, "gigabytes_per_second": bandwidth / 1e9, **shares}


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a token's forward reads: all but an input embedding that is no output matrix too."""
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    read = [parameter for parameter in model.parameters() if parameter is output or parameter is not embedding]
    return sum(parameter.nbytes for parameter in read)


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes a second at which memory is read, the best of several readings."""
    block = torch.ones(READ_BYTES // 4, device=device)
    seconds = []
    for _ in range(READS):
        started = time.perf_counter()
        float(block.sum())  # waits for the device
        seconds.append(time.perf_counter() - started)
    return READ_BYTES / min(seconds)
