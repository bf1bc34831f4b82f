"""The weights of modules of a target that is spread over devices, some of which lie in memory or on disk until they run.

Between two runs of such a module its weights are on torch's meta device: they have a shape and no values. Whoever starts from a
target's block therefore asks here; for a target that lies whole on one device nothing is different, nor for a plan's, which
has no values anywhere. How targets are spread: `distill.device_map`.
"""

from __future__ import annotations

import copy

import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn


def real_weight(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a module's state dict with its values, read from where they lie if they are not there now."""
    path, _, own = name.rpartition(".")
    hook = module.get_submodule(path).__dict__.get("_hf_hook")
    if not tensor.is_meta or not isinstance(hook, AlignDevicesHook):
        return tensor
    weight: Tensor = hook.weights_map[own]
    return weight.to(tensor.dtype)


def real_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state dict with the values of all its tensors."""
    return {name: real_weight(module, name, tensor) for name, tensor in module.state_dict().items()}


@torch.no_grad()
def own_copy(module: nn.Module) -> nn.Module:
    """Return a copy of one of the target's modules that holds its weights and no longer moves them."""
    hooks = [each.__dict__["_hf_hook"] for each in module.modules() if "_hf_hook" in each.__dict__]
    if not hooks:
        return copy.deepcopy(module)
    weights = {name: tensor.clone() for name, tensor in real_weights(module).items()}
    # The hooks stay out of it: they hold on to the other weights that are not on their device now.
    copied = copy.deepcopy(module, {id(hook): hook for hook in hooks})
    for part in copied.modules():
        if part.__dict__.pop("_hf_hook", None) is not None:
            del part.__dict__["_old_forward"], part.__dict__["forward"]
    copied.load_state_dict(weights, assign=True)
    return copied
