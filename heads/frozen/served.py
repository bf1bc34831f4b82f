"""A target that servers run: the parts of it that are loaded here, and its forward over texts.

The blocks keep their shapes and have no weights (torch's meta device), so that sizes and taps are known; a draft that is made
from one reads it from the checkpoint (`heads.frozen.placement.real_weight`).
B batch, T new tokens, S cache length, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from heads.frozen.hidden_states import TargetStates, blocks
from heads.frozen.model_config import config_of_blocks
from heads.frozen.placement import READ, blocks_name, make_skeleton, parts_outside
from heads.frozen.weights import FloatWeights, read_float_weights
from heads.inference.kv_cache import RowCache
from heads.inference.runner import DecodingForward, Masks, runner_of

StatesOfTexts = Callable[[Sequence[Sequence[int]], int, Sequence[int]], TargetStates]


class ServedForward(DecodingForward):
    """The two halves of a target whose blocks servers run and whose head is here; each forward asks for whole texts.

    The cache holds the rows' token ids in place of keys and values, so that rows end and tokens are rejected as in any other.
    `states_of` gets texts, the number of last tokens that are wanted of each, and the taps.
    """

    def __init__(self, model: PreTrainedModel, states_of: StatesOfTexts) -> None:
        self._head, self._states_of = model.get_output_embeddings(), states_of
        self._taps: Sequence[int] = ()
        self._seen: dict[int, Tensor] = {}

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, masks: Masks, cache: RowCache) -> Tensor:
        if cache.holds_tree:
            raise InputError("decode.tree: servers give the states of texts, and drafts of a tree are none; set tree to null")
        ids_B1T1 = ids_BT[:, None, :, None]
        for layer in range(len(cache.rows)):  # all, since rows are dropped from all
            text_B1S1, _ = cache.update(ids_B1T1, ids_B1T1, layer)
        T, starts = ids_BT.shape[1], cache.rows[0].slots.starts.host
        rows = [row_S[: start + T] for row_S, start in zip(text_B1S1[:, 0, :, 0].tolist(), starts, strict=True)]
        states = self._states_of(rows, T, self._taps)
        self._seen.update(zip(self._taps, states.taps_ABTE, strict=True))
        return states.final_BTE

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self._head(hidden_BTD)
        return logits_BTV

    def watch(self, taps: Sequence[int], seen: dict[int, Tensor]) -> None:
        self._taps, self._seen = taps, seen


def load_ends(path: Path, config: TargetConfig, device: torch.device) -> PreTrainedModel:
    """Return the model in a folder with weights outside its blocks only, which are read as those of a model of one block."""
    model = make_skeleton(path, config)
    layers = blocks(model)
    prefix = blocks_name(model)
    whole = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, local_files_only=True)
    stored = read_float_weights(path)
    kept = {name: each for name, each in stored.items() if not name.startswith(f"{prefix}.") or name.startswith(f"{prefix}.0.")}
    load: Any = type(model).from_pretrained
    first, report = load(
        None, config=_of_first_block(whole), state_dict=kept, dtype=getattr(torch, config.dtype), output_loading_info=True
    )
    first.to(device)
    outside = parts_outside(model, layers)
    missing = [name for name in report["missing_keys"] if any(f"{name}.".startswith(f"{part}.") for part in outside)]
    if missing:
        raise InputError(f"target.name: {path} holds no values for {missing[0]}")
    for name in outside:
        holder, _, own = name.rpartition(".")
        setattr(model.get_submodule(holder), own, getattr(first.get_submodule(holder), own))
    for number, block in enumerate(layers):
        block.__dict__[READ] = partial(_read, stored, f"{prefix}.{number}.")
    runner_of(model).runs_elsewhere = True
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _of_first_block(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a model with the first block alone, to be loaded as if it were not quantised."""
    text = whole.get_text_config()
    cut = config_of_blocks(text, [0])
    if text is not whole:
        name = next(name for name in whole.sub_configs if getattr(whole, name) is text)
        whole = copy.deepcopy(whole)
        setattr(whole, name, cut)
        cut = whole
    for part in (cut, cut.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return cut


def _read(stored: FloatWeights, block: str, name: str) -> torch.Tensor:
    if block + name not in stored:
        raise InputError(
            f"target.states: {block}{name} is kept otherwise than it runs, so no draft can be made from this block alone; make "
            "it from none, or place the blocks by target.device_map ({model.layers: disk}) and target.offload_folder"
        )
    return stored[block + name][...]
