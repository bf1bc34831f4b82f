"""vLLM's connector that writes hidden states, for CPUs: the one that comes with vLLM copies by CUDA streams.

Loaded by vLLM's own process from `--kv-transfer-config` (`kv_connector_module_path`), so it imports nothing of this project.
Written for vLLM 0.32; everything but the copy is the parent's.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Copies a finished request's states out of the cache at once, and has them written by the parent's threads."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks_N1 = torch.tensor(pending.block_ids, dtype=torch.long).unsqueeze(1)
        slots_P = (blocks_N1 * self._block_size + torch.arange(self._block_size)).flatten()
        states_TAE = extract_from_kv_cache(self._kv_cache, slots_P, pending.token_ids.shape[0]).clone()
        tensors = {"hidden_states": states_TAE, "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        self._req_copy_events[pending.req_id] = copied = Copied()
        lock = self._lock_fds.pop(pending.req_id, None)
        written = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_futures[pending.req_id] = written
        written.add_done_callback(partial(self._on_write_done, pending.req_id))


class Copied:
    """What stands in the place of the CUDA event of a copy: done from the start."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""
