"""Where the blocks of a target lie: on several devices, in memory, on disk, or on servers; and how to read weights from there.

Only blocks lie elsewhere: what else there is stays on the one device that computes. accelerate maps blocks to devices; its
hooks move states, and load offloaded weights while a block runs. Between two runs an offloaded module's weights are on torch's
meta device, and so are those of blocks that servers run, so code that starts from a block reads them by `real_weight` or
copies it by `own_copy`.
B batch, T new tokens, S cache length, D width.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import get_balanced_memory, get_max_memory, infer_auto_device_map
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from configs.runtime.errors import ConfigError, InputError
from configs.schema.target import TargetConfig
from heads.frozen.hidden_states import TargetStates, blocks, config_of_blocks
from heads.frozen.weights import FloatWeights, auto_class, read_float_weights
from heads.inference.kv_cache import RowCache
from heads.inference.runner import DecodingForward, Masks, runner_of

DeviceName = int | str
MEMORY = "cpu"
NOT_NUMBERED = ("cpu", "mps", "meta")  # by accelerate
GIBIBYTE = 2**30
READ = "_read_weight"  # attribute of a block that was not loaded: returns a weight of it by name
# Attributes of a block that is split over processes: the block before it was split, without weights; and the first copy of it.
UNSPLIT, COPIED = "_unsplit", "_copied"


def place_parts(path: Path, config: TargetConfig, device: torch.device) -> dict[str, DeviceName]:
    """Return the device map of the target in a folder, by module name; `device` is that of what is no block."""
    if (num_processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(
            f"target.device_map: each of {num_processes} processes would spread a target of its own over the same devices; "
            "start one process, which uses all of them"
        )
    skeleton, home = make_skeleton(path, config), _name_of(device)
    layers, prefix = blocks(skeleton), blocks_name(skeleton)
    places = spread_blocks(layers, _bytes_of(skeleton) - _bytes_of(layers), _room(config, home), home)
    return dict.fromkeys(parts_outside(skeleton, layers), home) | {
        f"{prefix}.{number}": place for number, place in enumerate(places)
    }


def spread_blocks(layers: nn.ModuleList, outside: int, room: Mapping[DeviceName, int], home: DeviceName) -> list[DeviceName]:
    """Return the device of each block, in order, by accelerate's map: GPUs evenly, then memory, then the disk.

    `room` and `outside`, which lies on `home`, are in bytes. Room for one block that is loaded stays free on the first device.
    """
    free = room.get(home, 0) - outside
    if free < 0:
        raise InputError(
            f"target.device_map: embedding, norm and head take {outside / GIBIBYTE:.2f} GiB, and {home} has "
            f"{room.get(home, 0) / GIBIBYTE:.2f}; raise target.max_memory there, or set target.device to a larger one"
        )
    kinds = sorted({type(block).__name__ for block in layers})
    left = get_balanced_memory(layers, {**room, home: free}, no_split_module_classes=kinds)
    found = infer_auto_device_map(layers, left, no_split_module_classes=kinds)
    return [found[str(number)] if "" not in found else found[""] for number in range(len(layers))]


def real_weight(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a module's state dict with its values, read from memory or disk where they are offloaded.

    Of a target that is split over processes all of a group must call this. A block that was not loaded
    (`load_ends`) may be kept in a form in which it cannot be read alone, and then this raises an InputError.
    """
    if isinstance(tensor, DTensor):
        whole: Tensor = tensor.full_tensor()
        return whole.detach()
    path, _, own = name.rpartition(".")
    hook = module.get_submodule(path).__dict__.get("_hf_hook")
    if not tensor.is_meta:
        return tensor
    if not isinstance(hook, AlignDevicesHook):
        steps = name.split(".")
        for cut in range(len(steps)):
            if (read := module.get_submodule(".".join(steps[:cut])).__dict__.get(READ)) is not None:
                return cast(Tensor, read(".".join(steps[cut:]))).to(tensor.dtype)
        return tensor
    weight: Tensor = hook.weights_map[own]
    return weight.to(tensor.dtype)


def real_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: real_weight(module, name, tensor) for name, tensor in module.state_dict().items()}


@torch.no_grad()
def own_copy(module: nn.Module) -> nn.Module:
    """Return a copy of one of the target's modules that holds its own weights, without hooks.

    Where the target is split over processes, all of a group must ask for the first copy of a block; later ones are made of it.
    """
    copied = _copy_without_accelerate(module)
    for part in copied.modules():  # those that collect the target's states
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return copied


def _copy_without_accelerate(module: nn.Module) -> nn.Module:
    if UNSPLIT in module.__dict__:
        if COPIED not in module.__dict__:
            module.__dict__[COPIED] = _joined_block(module, module.__dict__[UNSPLIT])
        return copy.deepcopy(cast(nn.Module, module.__dict__[COPIED]))
    hooks = [each.__dict__[name] for each in module.modules() for name in ("_hf_hook", READ) if name in each.__dict__]
    if not hooks:
        return copy.deepcopy(module)
    weights = {name: tensor.clone() for name, tensor in real_weights(module).items()}
    # The hooks are not copied: they refer to the other offloaded weights.
    copied = copy.deepcopy(module, {id(hook): hook for hook in hooks})
    copied.__dict__.pop(READ, None)
    for part in copied.modules():
        if part.__dict__.pop("_hf_hook", None) is not None:
            del part.__dict__["_old_forward"], part.__dict__["forward"]
    copied.load_state_dict(weights, assign=True)
    return copied


def _joined_block(block: nn.Module, unsplit: nn.Module) -> nn.Module:
    whole = copy.deepcopy(unsplit)
    whole.load_state_dict({name: weight.to(MEMORY, copy=True) for name, weight in real_weights(block).items()}, assign=True)
    for name, buffer in block.named_buffers():
        path, _, own = name.rpartition(".")
        setattr(whole.get_submodule(path), own, buffer.to(MEMORY, copy=True))
    return whole.eval().requires_grad_(False)


def _room(config: TargetConfig, home: DeviceName) -> dict[DeviceName, int]:
    given = config.max_memory
    if given is not None:  # a GPU's number is a string where it was a key of JSON
        given = {int(place) if str(place).isdigit() else place: size for place, size in given.items()}
    room: dict[DeviceName, int] = get_max_memory(given)
    return {MEMORY: room.get(MEMORY, 0)} if home == MEMORY else room


def _name_of(device: torch.device) -> DeviceName:
    """Return a device as accelerate calls it: a GPU's number, else its name."""
    if device.type in NOT_NUMBERED:
        return str(device)
    return torch.accelerator.current_device_index() if device.index is None else device.index


def blocks_name(model: PreTrainedModel) -> str:
    layers = blocks(model)
    return next(name for name, module in model.named_modules() if module is layers)


def make_skeleton(path: Path, config: TargetConfig) -> PreTrainedModel:
    """Return the model in a folder without weights, on torch's meta device, each tensor in the dtype that it is loaded in."""
    settings = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, local_files_only=True)
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(settings).from_config(
            settings, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
    plan = model._get_dtype_plan(model.dtype)  # patterns of names, as transformers looks them up
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in plan) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


def parts_outside(skeleton: PreTrainedModel, layers: nn.ModuleList) -> list[str]:
    """Return the names of the largest modules, and of single tensors, that have no block in them and are in none."""
    found: list[str] = []
    pending: list[tuple[str, nn.Module]] = [("", skeleton)]
    while pending:
        name, module = pending.pop()
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        found += [f"{name}.{own}".removeprefix(".") for own, _ in tensors]
        for own, child in module.named_children():
            if child is layers:
                continue
            joined = f"{name}.{own}".removeprefix(".")
            if layers in child.modules():
                pending.append((joined, child))
            else:
                found.append(joined)
    return found


def _bytes_of(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


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
