"""EAGLE-3: one or more layers over fused taps of the target and the embedding of the next token.

Li et al. 2025, arXiv 2503.01840. The feature of position j is a projection of the target's low, mid and high states there; the
first layer attends over [norm(embedding of x_{j+1}); norm(feature)], its residual is the feature. Training unrolls the module
over its own states (`RowKeys`), as drafting does. Tensor names are those that serving engines read. Departures, all in the
initial weights: the output head is the target's rows, the norm before it has the target's scale, the feature is the last tap,
layers copy a block: a head whose feature starts as the last tap and whose layers start as one of the target's blocks passes on
the target's state from the first step, and learns only what the next token changes. `EagleBody` is what P-EAGLE shares with it.
B batch, T positions, A taps, E width of the target, D = E width of the layer, K depths, N heads, M key-value heads, H head
width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.heads import Eagle3Settings, EagleSettings
from heads.device import upload
from heads.frozen.hidden_states import TargetStates, blocks, final_norm_scale, num_blocks
from heads.frozen.placement import real_weights
from heads.inference.kv_cache import RowCache
from heads.modules.attention import CachedKeys, RowKeys, causal_ranges, visible_slots
from heads.modules.autoregressive import ChainHead, FeatureChain
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins, origins_of_any_depth, shifted_left
from heads.modules.layers import DraftAttention, HeadLayer, LayerKeys, LayerShape, Rotary, Rotation, layer_shape, mlp, norm
from heads.modules.output_head import DraftHead, HeadModule
from heads.vocabulary import DraftVocabulary

OTHER_TAPS_STD = 0.002  # standard deviation of the weights on taps that are not passed on: small next to 1, but not dead
COPIED = ("self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


class EagleBody(HeadModule):
    """Fused taps, layers, the norm after them and the output head."""

    window: int | None = None  # positions that attention reads, the last so many; None: all

    def __init__(self, settings: EagleSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(target)
        self.taps = default_taps(target) if settings.taps is None else tuple(settings.taps)
        self.num_caches = settings.num_layers
        shape = layer_shape(target, settings.layer)
        width, num_taps = shape.width, len(self.taps)
        joined = replace(shape, width=num_taps * width)
        self.input_norm = norm(joined) if settings.norm_joined_taps else nn.Identity()
        self.fc_norm = nn.ModuleList(norm(shape) for _ in range(num_taps if settings.norm_taps else 0))
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        nn.init.normal_(self.fc.weight, std=OTHER_TAPS_STD)
        with torch.no_grad():
            self.fc.weight[:, -width:] += torch.eye(width)
        self.layers = nn.ModuleList(Eagle3Layer(shape, settings, first=n == 0) for n in range(settings.num_layers))
        self.norm = norm(shape)
        self.norm.load_state_dict({"weight": final_norm_scale(target)})
        self.lm_head = DraftHead(target, vocabulary, trainable=settings.train_head)
        self.embed_tokens: nn.Embedding | None = None
        if settings.own_embedding:  # in float32, scaled as the target's may be
            ids_V = torch.arange(target.config.get_text_config().vocab_size, device=target.device)
            with torch.no_grad():
                embedded_VD = target.get_input_embeddings()(ids_V).float()
            self.embed_tokens = nn.Embedding.from_pretrained(embedded_VD, freeze=False)
        self.rotary = Rotary(shape)
        if settings.init_block is not None:
            for layer in self.layers:
                copy_block(target, settings.init_block, layer)

    def features(self, states: TargetStates) -> Tensor:
        return self.fuse(states.joined_BTF)

    def fuse(self, joined_BTF: Tensor) -> Tensor:
        """Return the projection `[B, T, D]` of taps that stand side by side."""
        joined_BTF = self.input_norm(joined_BTF.to(self.fc.weight.dtype))
        if len(self.fc_norm):
            taps = joined_BTF.chunk(len(self.taps), -1)
            joined_BTF = torch.cat([each(tap) for each, tap in zip(self.fc_norm, taps, strict=True)], -1)
        return self.fc(joined_BTF)

    def embed(self, ids_BT: Tensor) -> Tensor:
        return super().embed(ids_BT) if self.embed_tokens is None else self.embed_tokens(ids_BT).to(self.dtype)

    def run_cached(self, features_BTF: Tensor, ids_BT: Tensor, positions_BT: Tensor, cache: RowCache) -> Tensor:
        """Return the states `[B, T, D]` after the last layer at placed positions, whose keys and values are added."""
        embedded_BTD = self.embed(ids_BT)
        rotation, visible = self.rotary.drafting(positions_BT), visible_slots(cache, positions_BT, self.window)
        states_BTD = features_BTF
        for number, layer in enumerate(self.layers):
            states_BTD = layer(embedded_BTD, states_BTD, rotation, CachedKeys(cache, number, visible, self.window))
        return states_BTD


class Eagle3(EagleBody, ChainHead):
    """An EAGLE-3 head on a frozen target (`heads.modules.autoregressive.ChainHead`)."""

    settings: Eagle3Settings

    def __init__(self, settings: Eagle3Settings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(settings, target, vocabulary)
        self.settings = settings.model_copy(update={"taps": list(self.taps)})
        self.window = settings.window

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        """Unroll the head over `num_depths` depths from every origin at once.

        Keys of depth 0 are those of every position, since all may read them; the rest runs at origins with labels alone.
        """
        on_host_BX, chosen_places_P = origins_of_any_depth(batch, self.settings.num_depths)
        origins_BX = upload(on_host_BX, batch.input_ids_BT.device)
        positions_BT, ranges = batch.position_ids_BT, causal_ranges(batch.position_ids_BT, self.window)
        of_origins = ranges.of(origins_BX, on_host_BX)
        unrolled = [*(RowKeys(ranges) for _ in self.layers[1:]), RowKeys(of_origins, origins_BX=origins_BX)]
        states_BTD = self.features(states)
        depths = []
        for depth in range(self.settings.num_depths):
            ids_BT = shifted_left(batch.input_ids_BT, depth + 1)
            embedded_BTD = self.embed(ids_BT if depth == 0 else ids_BT.gather(1, origins_BX))
            rotation = self.rotary(embedded_BTD, positions_BT + depth)
            for layer, keys in zip(self.layers, unrolled, strict=True):
                states_BTD = layer(embedded_BTD, states_BTD, rotation, keys)
            if depth == 0:
                positions_BT = positions_BT.gather(1, origins_BX)
            if self.window is not None:
                further = causal_ranges(batch.position_ids_BT, self.window, depth + 1)
                of_origins = further.of(origins_BX, on_host_BX)
            unrolled = [keys.next(of_origins) for keys in unrolled]
            if self.settings.norm_feedback:
                states_BTD = self.norm(states_BTD)
            origins_N = labelled_origins(batch, depth)
            hidden_ND = self.to_head(flat(states_BTD, chosen_places_P[origins_N]), depth)
            depths.append(self.at_depth(depth, hidden_ND, origins_N))
        return depths

    def read(self, features_BTF: Tensor, ids_BT: Tensor, positions_BT: Tensor, cache: RowCache, depth: int) -> Tensor:
        states_BTD = self.run_cached(features_BTF, ids_BT, positions_BT, cache)
        return self.norm(states_BTD) if self.settings.norm_feedback else states_BTD

    def to_head(self, states_BD: Tensor, depth: int) -> Tensor:
        return states_BD if self.settings.norm_feedback else self.norm(states_BD)


class Eagle3Layer(HeadLayer):
    """A Llama layer; the first one's attention reads the embedding and the state."""

    def __init__(self, shape: LayerShape, settings: EagleSettings, *, first: bool) -> None:
        super().__init__()
        self.first, self.norm_before_residual = first, settings.norm_before_residual
        self.input_layernorm = norm(shape)
        self.hidden_norm = norm(shape) if first else nn.Identity()
        self.self_attn = DraftAttention(shape, 2 * shape.width if first else shape.width, norm_heads=bool(settings.qk_norm))
        self.post_attention_layernorm = norm(shape)
        self.mlp = mlp(shape)

    def forward(self, embedded_BTD: Tensor, states_BTD: Tensor, rotation: Rotation, keys: LayerKeys) -> Tensor:
        if self.first:
            normed_BTD = self.hidden_norm(states_BTD)
            read_BTX = torch.cat([self.input_layernorm(embedded_BTD), normed_BTD], -1)
            residual_BTD = normed_BTD if self.norm_before_residual else states_BTD
        else:
            read_BTX, residual_BTD = self.input_layernorm(states_BTD), states_BTD
        states_BTD = keys.of_queries(residual_BTD) + keys.attend(self.self_attn, read_BTX, rotation)
        return states_BTD + self.mlp(self.post_attention_layernorm(states_BTD))


def default_taps(target: PreTrainedModel) -> tuple[int, int, int]:
    """Return the low, mid and high states that EAGLE-3 engines read where nothing else is said: h_2, h_{L/2}, h_{L-3}."""
    last = num_blocks(target)
    low, mid, high = min(2, last), last // 2, max(last - 3, 0)
    if not low < mid < high:
        raise InputError(
            f"a target of {last} blocks is too shallow for the default taps h_2, h_{{L/2}}, h_{{L-3}}; give head.taps"
        )
    return low, mid, high


def mask_token(given: int | None, target: PreTrainedModel) -> int:
    """Return the id of the mask token: the given one, else the target's padding token, else its first end-of-text token."""
    config = target.config.get_text_config()
    if given is not None:
        if given >= config.vocab_size:
            raise InputError(f"head.mask_token_id: the target's tokens are 0 to {config.vocab_size - 1}, got {given}")
        return given
    for declared in (config.pad_token_id, config.eos_token_id):
        ids = declared if isinstance(declared, list) else [declared]
        known = [token for token in ids if token is not None and 0 <= token < config.vocab_size]
        if known:
            return int(known[0])
    raise InputError("head.mask_token_id: the target's config names neither a padding nor an end-of-text token; give an id")


@torch.no_grad()
def copy_block(target: PreTrainedModel, number: int, layer: nn.Module) -> None:
    """Start a layer from a block of a Llama-like target, counted from 0: attention, MLP and the norms before them.

    A first layer's queries, keys and values also read the embedding; that half of them stays random. Where one of the two norms
    queries and keys, as Qwen3 does, and the other does not, its projections mean something else, and all of them stay random.
    """
    if not 0 <= number < num_blocks(target):
        raise InputError(f"head.init_block {number}: the target's blocks are 0 to {num_blocks(target) - 1}")
    own, source = layer.state_dict(), real_weights(blocks(target)[number])
    if (complaint := _misfit(own, source)) is not None:
        raise InputError(f"head.init_block: block {number} of {type(target).__name__} {complaint}; leave it null")
    for name in COPIED:
        own[name].copy_(source[name])
    state_norm = "hidden_norm.weight" if "hidden_norm.weight" in own else "input_layernorm.weight"
    norms = {state_norm: "input_layernorm.weight", "post_attention_layernorm.weight": "post_attention_layernorm.weight"}
    for name, copied in norms.items():
        if copied in source:
            own[name].copy_(source[copied])
    of_heads = [name for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if name in source]
    if bool(of_heads) != ("self_attn.q_norm.weight" in own):
        return
    for name in of_heads:
        own[name].copy_(source[name])
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        weight = source.get(name)
        if weight is not None and len(weight) == len(own[name]):
            own[name][:, -weight.shape[1] :].copy_(weight)  # the last D columns, which read the state


def block_to_copy(target: PreTrainedModel, settings: EagleSettings) -> tuple[int, str | None]:
    """Return the block that reads, in the target, what a head's feature starts as, and why the head cannot start from it.

    Of the target only names and sizes are asked: it may lie on the meta device.
    """
    number = (settings.taps or default_taps(target))[-1]
    if number >= num_blocks(target):
        return number, "the last tap is the target's last state"
    with torch.device("meta"):
        layer = Eagle3Layer(layer_shape(target, settings.layer), settings, first=True)
    return number, _misfit(layer.state_dict(), blocks(target)[number].state_dict())


def _misfit(own: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> str | None:
    """Return why a layer cannot start from a block's weights; None where it can."""
    if "pre_feedforward_layernorm.weight" in source:  # Gemma's, which norm what a sublayer puts out
        return "norms otherwise than the head"
    unfit = [name for name in COPIED if name not in source or source[name].shape != own[name].shape]
    return f"has no {unfit[0]} that fits the head" if unfit else None


FAMILY = Family(settings=Eagle3Settings, build=Eagle3, propose=FeatureChain)
