"""A target's blocks: what a head reads between them, and the configs of drafts that are made of them.

Convention, as written into every artifact: `h_0` is the embedding output, `h_i` the residual stream after block i, before the
final norm ("taps" are those that a head reads); `final` is the state that the target's own head reads, after the final norm.
A draft with blocks of the text part of a model that also takes images or sound is a causal LM where transformers has one with
the same blocks, so that any program that serves causal LMs serves it. A config describes its blocks in several ways, which are
rewritten for the kept ones; whether that describes them is for the caller to check.
B batch, T positions, E width of the target, A taps.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from configs.runtime.errors import InputError
from heads.device import Rows, keeps_small_tensors_near
from heads.inference.causal_lm import MediaInputs, forward_rows, head_logits, read_documents
from heads.inference.kv_cache import RowCache
from heads.inference.model_checks import check_on_probe, probe_ids, relative_error
from heads.inference.runner import Collecting, Runner, backbone, runner_of
from heads.sampling.token_tree import TreeAttention

# Text parts whose rotary embedding is that of these causal LMs where a token's three positions are equal, as in text.
ON_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
ALWAYS_SET = {"qwen3_moe": {"norm_topk_prob": True}}  # what text parts do without a setting of it
LONG_ROW = 2048  # tokens of a packed row that a CPU reads a document at a time: a mask of all its pairs grows by the square
NOT_BY_BLOCK = ("_id", "_ids", "architectures")  # endings of keys whose lists may have as many entries by chance


@dataclass(frozen=True, kw_only=True)
class TargetStates:
    """The target's hidden states at some positions; they never carry gradients."""

    final_BTE: Tensor  # after the final norm; the target's head makes the next token's logits of it
    taps_ABTE: tuple[Tensor, ...] = ()  # in the order of the taps

    def map(self, change: Any) -> TargetStates:
        """Return the states with `change`, a function of one `[B, T, E]` tensor, applied to each."""
        return TargetStates(final_BTE=change(self.final_BTE), taps_ABTE=tuple(change(tap) for tap in self.taps_ABTE))

    @property
    def joined_BTF(self) -> Tensor:
        """The taps side by side, `[B, T, A * E]`, in their order."""
        return torch.cat(self.taps_ABTE, -1)


def num_blocks(model: PreTrainedModel) -> int:
    """Return how many blocks the target has; taps run from 0 to it."""
    config = model.config.get_text_config()
    return int(config.num_hidden_layers) // attentions_per_block(config)


def block_list(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """Return the module that holds the target's blocks, and the name: of a module list with as many entries as there are."""
    root = backbone(model)
    lists = {name: module for name, module in root.named_modules() if isinstance(module, nn.ModuleList)}
    # Not a list within a block, of experts perhaps.
    fitting = [name for name, each in lists.items() if len(each) == num_blocks(model) and not re.search(r"\.\d+\.", name)]
    if not fitting:
        raise InputError(
            f"{type(model).__name__} keeps its blocks in a way draftsmith does not know (a module list of "
            f"{num_blocks(model)} is expected), so it gives neither hidden states nor blocks for a draft"
        )
    name = min(fitting, key=lambda each: (each.count("."), each.rpartition(".")[2] != "layers"))
    path, _, own = name.rpartition(".")
    return root.get_submodule(path), own


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the target's blocks; raises `InputError` as `block_list` does."""
    holder, name = block_list(model)
    return cast(nn.ModuleList, getattr(holder, name))


def check_taps(model: PreTrainedModel, taps: Sequence[int]) -> None:
    """Refuse taps that the target does not have, or blocks whose states do not lead to its logits on a probe."""
    last = num_blocks(model)
    for tap in taps:
        if not 0 <= tap <= last:
            raise InputError(f"head.taps: {tap} is none of the hidden states h_0 (embedding) to h_{last} (last block)")
    if not taps:
        return
    name, remedy = type(model).__name__, "take a head.kind without taps, medusa, hydra or mtp, or distil a draft LM"
    check_on_probe(
        model,
        partial(_tap_error, taps=taps),
        fails=f"the blocks of {name} do not each give one state a token, as taps need ({{}}); {remedy}",
        differs=f"the tapped states of {name} do not reproduce its logits (the error is {{:.2g}} of them); its blocks return "
        f"something else than the residual stream; {remedy}",
    )


def _tap_error(model: PreTrainedModel, taps: Sequence[int]) -> float:
    last, ids_1T = num_blocks(model), probe_ids(model)
    with tapped(model, [*taps, last]) as seen:
        logits_1TV = model(input_ids=ids_1T, use_cache=False).logits
    for tap in (last, *taps):
        if seen[tap].shape[:2] != ids_1T.shape or seen[tap].shape != seen[last].shape:
            raise ValueError(f"h_{tap} of a text of {ids_1T.shape[1]} tokens is of shape {tuple(seen[tap].shape)}")
    return relative_error(head_logits(model, final_norm(model)(seen[last])), logits_1TV)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm between the last block and the head: the last one beside the list of blocks, or the identity (GPT-1)."""
    holder, _ = block_list(model)
    norms = {name: module for name, module in holder.named_children() if "norm" in type(module).__name__.lower()}
    return norms.get("norm", list(norms.values())[-1]) if norms else nn.Identity()


@torch.no_grad()
def final_norm_scale(model: PreTrainedModel) -> Tensor:
    """Return by how much the final norm scales each feature, `[E]`, however its family stores that; a bias is taken off."""
    norm, width = final_norm(model), model.config.get_text_config().hidden_size
    signs_E = torch.ones(width, device=model.device, dtype=model.dtype)
    signs_E[1::2] = -1  # mean 0, mean square 1
    scaled_E: Tensor = norm(signs_E) - norm(torch.zeros_like(signs_E))
    return scaled_E * signs_E


@contextmanager
def tapped(model: PreTrainedModel, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the states at `taps` while forwards run; yields those of the latest forward, by tap."""
    runner, seen = runner_of(model), dict[int, Tensor]()
    if not runner.hooked.issuperset(taps):
        _hook(model, runner, set(taps) - runner.hooked)
    before, runner.collects = runner.collects, Collecting(frozenset(taps), seen, model.device) if taps else None
    forward = runner.current
    forward.watch(taps, seen)
    try:
        yield seen
    finally:
        runner.collects = before
        forward.watch((), {})


def _hook(model: PreTrainedModel, runner: Runner, taps: set[int]) -> None:
    """Set hooks that stay, on the blocks after which, or before the first of which, states are tapped."""

    def keep(tap: int, state_BTE: Tensor) -> None:
        collects = runner.collects
        if collects is not None and tap in collects.taps:
            collects.seen[tap] = state_BTE.to(collects.home)  # the blocks of a spread target have devices of their own

    def input_hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(0, cast(Tensor, args[0] if args else kwargs["hidden_states"]))

    def output_hook(tap: int) -> Callable[..., None]:
        return lambda block, args, output: keep(tap, output[0] if isinstance(output, tuple | list) else output)

    layers = blocks(model)
    for tap in taps:
        if tap == 0:
            layers[0].register_forward_pre_hook(input_hook, with_kwargs=True)
        else:
            layers[tap - 1].register_forward_hook(output_hook(tap))
    runner.hooked |= taps


def forward_states(
    model: PreTrainedModel,
    cache: RowCache,
    ids_BT: Tensor,
    starts: Rows,
    taps: Sequence[int],
    attention: TreeAttention | None = None,
    media: MediaInputs | None = None,
) -> TargetStates:
    """Return the target's states at tokens that continue each row (`heads.inference.causal_lm.forward_rows`)."""
    with tapped(model, taps) as seen:
        final_BTE = forward_rows(model, cache, ids_BT, starts, attention, media)
    return TargetStates(final_BTE=final_BTE, taps_ABTE=tuple(seen[tap] for tap in taps))


@torch.no_grad()
def read_states(
    model: PreTrainedModel,
    ids_BT: Tensor,
    taps: Sequence[int],
    packed_positions_BT: Tensor | None = None,
    media: MediaInputs | None = None,
) -> TargetStates:
    """Return the target's states over whole rows (`heads.inference.causal_lm.read_documents`)."""
    if packed_positions_BT is not None and reads_by_document(ids_BT.shape[1], on_cpu=keeps_small_tensors_near(ids_BT.device)):
        rows = []
        for ids_T, positions_T in zip(ids_BT, packed_positions_BT, strict=True):
            starts_D = (positions_T == 0).nonzero().squeeze(1)
            documents = ids_T.tensor_split(starts_D[1:].tolist())
            rows.append(_joined([read_states(model, each.unsqueeze(0), taps) for each in documents], dim=1))
        return _joined(rows, dim=0)
    with torch.autocast(model.device.type, enabled=False), tapped(model, taps) as seen:
        final_BTE = read_documents(model, ids_BT, packed_positions_BT, media)
    return TargetStates(final_BTE=final_BTE, taps_ABTE=tuple(seen[tap] for tap in taps))


def reads_by_document(row_length: int, *, on_cpu: bool) -> bool:
    """Return whether the documents of a packed row are read one by one."""
    return on_cpu and row_length >= LONG_ROW


def _joined(parts: Sequence[TargetStates], dim: int) -> TargetStates:
    taps = zip(*(each.taps_ABTE for each in parts), strict=True)
    return TargetStates(
        final_BTE=torch.cat([each.final_BTE for each in parts], dim), taps_ABTE=tuple(torch.cat(each, dim) for each in taps)
    )


def causal_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a causal LM with the blocks of this text config: itself, or of text parts that of `ON_TEXT`."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None) is not None:
        return config
    if config.model_type not in ON_TEXT:
        raise InputError(
            f"transformers has no causal LM with the blocks of {config.model_type}, the text part of the target; take a draft "
            "of another family: student.init 'model' or 'config'"
        )
    values = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    rope = {name: value for name, value in values["rope_parameters"].items() if not name.startswith("mrope")}
    plain = ON_TEXT[config.model_type]
    kept: PreTrainedConfig = CONFIG_MAPPING[plain].from_dict(values | {"rope_parameters": rope} | ALWAYS_SET.get(plain, {}))
    return kept


def per_layer_keys(config: PreTrainedConfig) -> list[str]:
    """Return the keys of a text config whose value is a list with an entry for each block."""
    return [
        name
        for name, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == config.num_hidden_layers and not name.endswith(NOT_BY_BLOCK)
    ]


def attentions_per_block(config: PreTrainedConfig) -> int:
    """Return how many of a text config's `num_hidden_layers`, each with a place in the cache, make one block."""
    return 2 if config.model_type == "longcat_flash" else 1


def overridden(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a copy of a text config with some values replaced; what it says of each block goes with another number of them."""
    values = config.to_dict()
    if "num_hidden_layers" in overrides:
        dropped = {*per_layer_keys(config), "per_layer_config"}
        values = {name: value for name, value in values.items() if name not in dropped}
    return type(config).from_dict(values | dict(overrides))


def config_of_blocks(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Return a copy of a text config for a model of these blocks only, in this order."""
    kept, values = copy.deepcopy(config), config.to_dict()
    changed: dict[str, Any] = {name: [values[name][layer] for layer in layers] for name in per_layer_keys(config)}
    changed |= _mixers(config, layers) | _experts(config, layers)
    if (given := values.get("per_layer_config")) is not None:  # by number, what a block has other than the rest
        given = {int(number): differences for number, differences in given.items()}
        changed["per_layer_config"] = {new: given[layer] for new, layer in enumerate(layers) if layer in given}
    try:
        kept.per_layer_config = None
        kept.num_hidden_layers = len(layers) * attentions_per_block(config)
        for name, value in changed.items():
            setattr(kept, name, value)
        return type(config).from_dict(kept.to_dict())  # as it will be read from the draft's folder
    except (ValueError, TypeError, AttributeError, IndexError, NotImplementedError, StrictDataclassError) as error:
        raise InputError(
            f"student.layers: blocks {', '.join(map(str, layers))} of a {config.model_type} model cannot be kept, since its "
            f"config cannot describe them ({' '.join(str(error).split())}); keep others, of every kind of block perhaps"
        ) from error


def _experts(config: PreTrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the keys that give dense blocks and blocks of experts their places, for the kept blocks."""
    changed: dict[str, Any] = {}
    for name in ("first_k_dense_replace", "num_dense_layers"):  # the blocks before this one are dense
        if (first_sparse := getattr(config, name, None)) is not None:
            changed[name] = sum(layer < first_sparse for layer in layers)
    if (moe_layers := getattr(config, "moe_layers", None)) is not None:  # Llama 4
        changed["moe_layers"] = [new for new, layer in enumerate(layers) if layer in moe_layers]
    if (step := getattr(config, "decoder_sparse_step", None)) is not None:  # Qwen
        dense = set(getattr(config, "mlp_only_layers", None) or ())
        changed["mlp_only_layers"] = [n for n, layer in enumerate(layers) if layer in dense or step < 1 or (layer + 1) % step]
        changed["decoder_sparse_step"] = 1
    return changed


def _mixers(config: PreTrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the keys by which blocks of attention and others have their places, where no list says it, for the kept blocks."""
    changed: dict[str, Any] = {}
    for name in ("attn_layer_indices", "full_attn_idxs"):  # Bamba, LFM2
        if (numbers := getattr(config, name, None)) is not None:
            changed[name] = [new for new, layer in enumerate(layers) if layer in numbers]
    if shared := getattr(config, "num_kv_shared_layers", None):  # Gemma 3n, Gemma 4: the last ones
        changed["num_kv_shared_layers"] = sum(layer >= config.num_hidden_layers - shared for layer in layers)
    return changed
