"""The sizes of an imported draft's layers: what differs from the target's blocks becomes settings of our head, or a refusal.

Head counts, widths, norms' epsilons and rotary embeddings are the head's own (`configs.schema.heads`). The width is not: a
layer's input is the target's state and embedding. An MTP module is a block of the target's family and has no sizes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel

from configs.runtime.errors import InputError, first_line
from configs.schema.heads import LayerSettings
from heads.modules.layers import LayerShape, layer_shape, shape_like

IGNORED = ("architectures", "dtype", "torch_dtype", "model_type")


def own_layer(layer: Mapping[str, Any], kind: str, target: PreTrainedModel) -> dict[str, Any]:
    """Return a head's settings of its layers' sizes, `{}` where they are those of the target's blocks.

    Args:
        layer: the config of the layers, as transformers spells configs.
        kind: the family of ours that the draft is.
        target: what it was trained for.

    Raises:
        InputError: layers that our heads cannot be.
    """
    given = {key: value for key, value in layer.items() if key not in IGNORED}
    try:
        config = AutoConfig.for_model(layer["model_type"], **given)
    except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
        raise InputError(f"the config of its layers cannot be read: {first_line(error)}") from error
    own = target.config.get_text_config().model_type
    if kind == "mtp" and config.model_type != own:
        raise InputError(f"its block is of the {config.model_type} family, the target's are of {own}")
    shape, like = _shape_of(config), shape_like(target)
    if kind == "mtp":
        _check_same(shape, like)
        return {}
    _check_kind(config)
    if shape.width != like.width:
        raise InputError(f"its layers are {shape.width} wide and the target's states {like.width}; heads are as wide as those")
    differences = {
        name: value
        for name, value in asdict(shape).items()
        if value != getattr(like, name) and (name != "max_positions" or shape.rope_scaling is not None)
    }
    if not differences:
        return {}
    layer_shape(target, LayerSettings.model_validate(differences))
    return {"layer": differences}


def _shape_of(config: Any) -> LayerShape:
    shape = shape_like(cast(PreTrainedModel, SimpleNamespace(config=config)))  # it reads nothing else of a model
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "type") and value is not None}
    plain = scaling.get("rope_type", "default") == "default"
    return shape if plain else LayerShape(**(asdict(shape) | {"rope_scaling": scaling}))


def _check_kind(config: Any) -> None:
    """Refuse differences other than sizes: sliding attention, another activation, partial rotary embeddings."""
    wrong = []
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        wrong.append("it has sliding layers, draftsmith's heads full attention")
    if (activation := getattr(config, "hidden_act", "silu")) not in ("silu", "swish"):
        wrong.append(f"its MLP has the activation {activation}, draftsmith's heads have silu")
    rope = getattr(config, "rope_parameters", None) or {}
    if (share := rope.get("partial_rotary_factor") or 1.0) != 1.0:
        wrong.append(f"it turns {share:g} of each head (partial_rotary_factor), draftsmith's heads turn all of it")
    if wrong:
        raise InputError("; ".join(wrong))


def _check_same(shape: LayerShape, like: LayerShape) -> None:
    """Refuse a block that is not of the target's sizes; how long a text may be is no size."""
    theirs, ours = asdict(shape), asdict(like)
    names = [name for name in ours if name not in ("max_positions", "rope_scaling") and theirs[name] != ours[name]]
    if names:
        listed = "; ".join(f"{name} {theirs[name]}, the target's {ours[name]}" for name in names)
        raise InputError(f"its block has other sizes than the target's, of which ours is a copy: {listed}")
