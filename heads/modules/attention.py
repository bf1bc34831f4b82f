"""What the queries of a head's layer see, and their attention: ranges of a row in training, a cache in drafting.

Attention of training takes memory linear in the length. On CUDA torch's `flex_attention` reads them, elsewhere `_ReadRanges`,
some rows of scores at a time. Both compute scores again in the backward, so that neither pass holds those of all pairs, nor a
mask of them. A range is what a document leaves of a row. With the mixed values comes the logarithm of the softmax's sum: to a
caller whose queries also have keys of their own (depths unrolled before, slots of a block) a whole range is like one more key,
of that score and those values.
B batch, X queries, T positions, N heads, M key-value heads, G = N / M, H head width, P and S blocks of queries and positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from heads.device import has_compiler, has_graphs, keeps_small_tensors_near
from heads.inference.kv_cache import RowCache
from heads.modules.layers import DraftAttention, LayerKeys, Rotation

# Scores at one time over batch and heads, several tensors of which live at once: 1 MiB of float32, of a size for a CPU's L2
# cache (of 2**16 to 2**22, 2**18 was fastest at 256 and 4096 positions), or 256 MiB, enough work for a GPU.
AT_ONCE_IN_CACHE, AT_ONCE = 2**18, 2**26
MIN_ROWS = 16  # of queries at one time, however long the row
NUM_SIZES = 16  # of products over parts of a row: libraries make code or plans for each size, and keep them
BLOCK = 128  # queries, and positions, of a block of `flex_attention`: its own default


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Which positions of its row each query reads: those from `first_BX` to before `end_BX`, int64.

    reach: where known, before which position all ranges end of a query and of those before it: the keys from there on need no
        scores.
    """

    first_BX: Tensor
    end_BX: Tensor
    reach: Sequence[int] | None = None

    def of(self, queries_BX: Tensor, on_host_BX: Tensor | None = None) -> Ranges:
        """Return the ranges of some of the queries, or of some several times; `on_host_BX` are the same in host memory."""
        reach = None
        if self.reach is not None and on_host_BX is not None:
            reach = [self.reach[query] for query in on_host_BX.amax(0).cummax(0).values.tolist()]
        return Ranges(first_BX=self.first_BX.gather(1, queries_BX), end_BX=self.end_BX.gather(1, queries_BX), reach=reach)

    @cached_property
    def _blocks(self) -> dict[int, BlockMask]:
        return {}

    def block_mask(self, T: int) -> BlockMask:
        """Return which of T positions are read, as `flex_attention` takes it: no tensor is of all pairs, and no host waits."""
        if T not in self._blocks:
            self._blocks[T] = _block_mask(self.first_BX, self.end_BX, T)
        return self._blocks[T]


def causal_ranges(position_ids_BT: Tensor, window: int | None = None, ahead: int = 0) -> Ranges:
    """Return the ranges of causal attention: each position reads those before it in its document, and itself.

    With a `window` it reads the last so many positions; queries that stand `ahead` positions further count from there.
    """
    places_T = torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device)
    ends_BT = (places_T + 1).expand_as(position_ids_BT)
    first_BT = places_T - position_ids_BT
    if window is not None:
        first_BT = first_BT.maximum(places_T + ahead + 1 - window)
    return Ranges(first_BX=first_BT, end_BX=ends_BT, reach=range(1, len(places_T) + 1))


def read_ranges(q_BNXH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Return the values `[B, N, X, H]` that queries mix over their ranges, and the logarithms `[B, N, X]` of softmax sums.

    Products are of the values' dtype, which is autocast's where that is on; the softmax is in float32, or float64 for such
    values. A query with an empty range gets any values, and the lowest number as its logarithm.
    """
    q, k = q_BNXH.to(v_BMTH.dtype), k_BMTH.to(v_BMTH.dtype)
    if has_graphs(q.device) and has_compiler(q.device):
        return read_by_flex(_compiled_flex(), q, k, v_BMTH, ranges)
    at_once = AT_ONCE_IN_CACHE if keeps_small_tensors_near(q.device) else AT_ONCE
    rows = max(MIN_ROWS, at_once // (q.shape[0] * q.shape[1] * k.shape[2]))
    mixed, log_sums = _ReadRanges.apply(q, k, v_BMTH, ranges, rows)
    return mixed, log_sums


def with_diagonals(q_BNXH: Tensor, mixed_BNXH: Tensor, log_sums_BNX: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the values `[B, N, X, H]` mixed in one softmax over what `read_ranges` gives and some keys of one's own.

    `own` are keys and values `[B, M, X, H]`, of each of which a query sees those at its own place.
    """
    q, mixed, log_sums = (each.unflatten(1, (own[0][0].shape[1], -1)) for each in (q_BNXH, mixed_BNXH, log_sums_BNX))
    scores = [(q * keys.unsqueeze(2)).sum(-1).to(log_sums.dtype) * q.shape[-1] ** -0.5 for keys, _ in own]
    range_weight, *own_weights = torch.stack([log_sums, *scores]).softmax(0).to(mixed.dtype).unsqueeze(-1)
    mixed = range_weight * mixed
    for weight, (_, values) in zip(own_weights, own, strict=True):
        mixed = mixed + weight * values.unsqueeze(2)
    return mixed.flatten(1, 2)


def read_by_flex(
    flex: Callable[..., Any], q_BNXH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor, ranges: Ranges
) -> tuple[Tensor, Tensor]:
    """Do the same by `flex`, torch's `flex_attention`, as it is or compiled."""
    mask, shares = ranges.block_mask(k_BMTH.shape[2]), q_BNXH.shape[1] != k_BMTH.shape[1]
    found = flex(q_BNXH, k_BMTH, v_BMTH, block_mask=mask, enable_gqa=shares, return_aux=AuxRequest(lse=True))
    mixed_BNXH, log_sums_BNX = found[0], found[1].lse
    return mixed_BNXH, log_sums_BNX.clamp(min=torch.finfo(log_sums_BNX.dtype).min)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)  # the graphs of a run go by its shapes; where those vary, sizes become symbols


class RowKeys(LayerKeys):
    """Keys and values of one layer in training, of which each position reads its range.

    A head that is unrolled over its own states ("training-time test") has chains that start at many origins j at once. At depth
    k the chain of origin j sees the depth-0 keys of the positions in its range, which are made of the target's states, and of
    the deeper keys only its own: a causal block and a diagonal for each later depth, in one softmax. `origins_BX` are, at depth
    0, the positions whose queries are wanted, and whose ranges are given; None: all.
    """

    def __init__(self, ranges: Ranges, *earlier: tuple[Tensor, Tensor], origins_BX: Tensor | None = None) -> None:
        self.ranges, self.earlier, self.origins_BX = ranges, earlier, origins_BX

    def next(self, ranges: Ranges) -> RowKeys:
        return RowKeys(ranges, *self.earlier, self._own)

    def of_queries(self, values_BTX: Tensor) -> Tensor:
        if self.origins_BX is None:
            return values_BTX
        places_BX1 = self.origins_BX.to(values_BTX.device).unsqueeze(-1)  # a plan's values are on no device
        return torch.take_along_dim(values_BTX, places_BX1, 1)

    def attend(self, attention: DraftAttention, states_BTX: Tensor, rotation: Rotation) -> Tensor:
        self._own = attention.keys_values(states_BTX, rotation)
        first, *later = *self.earlier, self._own
        cos_BTH, sin_BTH = map(self.of_queries, rotation)
        q_BNTH = attention.queries(self.of_queries(states_BTX), (cos_BTH, sin_BTH))
        mixed_BNTH, log_sum_BNT = read_ranges(q_BNTH, *first, self.ranges)
        if later:
            mixed_BNTH = with_diagonals(q_BNTH, mixed_BNTH, log_sum_BNT, later)
        return attention.output(mixed_BNTH)


class CachedKeys(LayerKeys):
    """Keys and values of one layer in a cache, for drafting; those of the placed positions are added.

    `visible` is the mask `[B, 1, T, S]`, of one row where all positions see the same; None where `RowCache.is_causal`. With a
    `window` that is shorter than the text, attention from its beginning reads the keys of some queries at a time, and later
    tokens read as many as the window has: what a draft takes does not grow with the text.
    """

    def __init__(self, cache: RowCache, layer: int, visible: Tensor | None, window: int | None = None) -> None:
        self.cache, self.layer, self.visible, self.window = cache, layer, visible, window

    def attend(self, attention: DraftAttention, states_BTX: Tensor, rotation: Rotation) -> Tensor:
        q_BNTH, k_BMTH, v_BMTH = attention.project(states_BTX, rotation)
        k_BMSH, v_BMSH = self.cache.update(k_BMTH, v_BMTH, self.layer)
        G, T = q_BNTH.shape[1] // k_BMSH.shape[1], q_BNTH.shape[2]
        if self.visible is None and T > 1:  # a text from its beginning
            if self.window is not None and self.window < T:
                return attention.output(_read_window(q_BNTH, k_BMSH, v_BMSH, self.window))
            return attention.output(
                functional.scaled_dot_product_attention(q_BNTH, k_BMSH, v_BMSH, is_causal=True, enable_gqa=G > 1)
            )
        visible = self.visible
        if visible is not None and self.window is not None:
            seen = slice(self.cache.first_seen(self.window), None)
            k_BMSH, v_BMSH, visible = k_BMSH[:, :, seen], v_BMSH[:, :, seen], visible[..., seen]
        # Heads that share keys as rows: with a mask, kernels that know of such heads are those that hold all scores.
        q_BMXH = q_BNTH.unflatten(1, (-1, G)).flatten(2, 3)
        if visible is not None and visible.shape[2] > 1:
            visible = visible.repeat(1, 1, G, 1)
        mixed_BMXH = functional.scaled_dot_product_attention(q_BMXH, k_BMSH, v_BMSH, attn_mask=visible)
        return attention.output(mixed_BMXH.unflatten(2, (G, T)).flatten(1, 2))


def _read_window(q_BNTH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor, window: int) -> Tensor:
    """Return what queries `[B, N, T, H]` mix of the last `window` positions, their own counted."""
    places_T, mixed = torch.arange(q_BNTH.shape[2], device=q_BNTH.device), []
    for start in range(0, q_BNTH.shape[2], window):
        queries, keys = slice(start, start + window), slice(max(0, start - window + 1), start + window)
        behind_XS = places_T[queries].unsqueeze(1) - places_T[keys]
        mixed.append(
            functional.scaled_dot_product_attention(
                q_BNTH[:, :, queries],
                k_BMTH[:, :, keys],
                v_BMTH[:, :, keys],
                attn_mask=(behind_XS >= 0) & (behind_XS < window),
                enable_gqa=q_BNTH.shape[1] > k_BMTH.shape[1],
            )
        )
    return torch.cat(mixed, 2)


def visible_slots(cache: RowCache, positions_BT: Tensor, window: int | None = None) -> Tensor | None:
    """Return which slots placed positions see, of these the last `window`, as `CachedKeys` takes it."""
    if cache.is_causal and (window is None or positions_BT.shape[1] > 1 or cache.end <= window):
        return None
    return cache.visible(positions_BT, window).unsqueeze(1)


def _block_mask(first_BX: Tensor, end_BX: Tensor, T: int) -> BlockMask:
    starts_S = torch.arange(0, T, BLOCK, device=first_BX.device)
    ends_S = starts_S + BLOCK

    def in_blocks(values_BX: Tensor, fill: int) -> Tensor:
        padded_BY = functional.pad(values_BX, (0, -values_BX.shape[1] % BLOCK), value=fill)
        return padded_BY.unflatten(1, (-1, 1, BLOCK))

    some_BPS = (starts_S < in_blocks(end_BX, 0).amax(3)) & (ends_S > in_blocks(first_BX, T).amin(3))
    all_BPS = (starts_S >= in_blocks(first_BX, 0).amax(3)) & (ends_S <= in_blocks(end_BX, T).amin(3))  # by every query
    (count, index), (whole_count, whole_index) = (_listed(each) for each in (some_BPS & ~all_BPS, some_BPS & all_BPS))

    def reads(b: Tensor, h: Tensor, query: Tensor, position: Tensor) -> Tensor:
        return (position >= first_BX[b, query]) & (position < end_BX[b, query])

    return BlockMask.from_kv_blocks(
        count, index, whole_count, whole_index, BLOCK_SIZE=BLOCK, mask_mod=reads, seq_lengths=(first_BX.shape[1], T)
    )


def _listed(flags_BPS: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of positions each block of queries has, `[B, 1, P]`, and which, those first, `[B, 1, P, S]`."""
    order_BPS = flags_BPS.int().sort(dim=2, descending=True, stable=True).indices
    return flags_BPS.sum(2, dtype=torch.int32).unsqueeze(1), order_BPS.int().unsqueeze(1)


class _ReadRanges(torch.autograd.Function):
    """`read_ranges`, some rows of queries at a time. Heads that share keys lie side by side as rows of one product."""

    @staticmethod
    def forward(ctx: Any, q_BNXH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor, ranges: Ranges, rows: int) -> tuple[Tensor, Tensor]:
        q = q_BNXH.unflatten(1, (k_BMTH.shape[1], -1))
        wide = torch.promote_types(q.dtype, torch.float32)
        mixed, log_sums = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)
        for part, seen in _parts(ranges, rows, k_BMTH.shape[2]):
            scores = _scores(q[:, :, :, part], k_BMTH[:, :, :seen], ranges, part)
            weights = scores.softmax(-1)
            log_sums[:, :, :, part] = scores.amax(-1) - weights.amax(-1).log_()
            mixed[:, :, :, part] = _product(weights.to(q.dtype), v_BMTH[:, :, :seen])
        ctx.save_for_backward(q_BNXH, k_BMTH, v_BMTH, mixed, log_sums)
        ctx.ranges, ctx.rows = ranges, rows
        return mixed.flatten(1, 2), log_sums.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mixed_BNXH: Tensor, grad_log_sums_BNX: Tensor) -> tuple[Tensor | None, ...]:
        q_BNXH, k, v, mixed, log_sums = ctx.saved_tensors
        q, ahead, ahead_of_sums = (each.unflatten(1, (k.shape[1], -1)) for each in (q_BNXH, grad_mixed_BNXH, grad_log_sums_BNX))
        # d(log sum)/d(score) = weight, d(mixed)/d(score) = weight * (value - mixed)
        constant = ahead_of_sums - (ahead.to(log_sums.dtype) * mixed).sum(-1)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(each, dtype=log_sums.dtype) for each in (k, v))
        for part, seen in _parts(ctx.ranges, ctx.rows, k.shape[2]):
            q_part, ahead_part = q[:, :, :, part], ahead[:, :, :, part]
            weights = _scores(q_part, k[:, :, :seen], ctx.ranges, part).sub_(log_sums[:, :, :, part, None]).exp_()
            grad_v[:, :, :seen] += weights.to(v.dtype).flatten(2, 3).mT @ ahead_part.flatten(2, 3)
            by_value = _product(ahead_part, v[:, :, :seen].mT).to(weights.dtype)
            grad_scores = weights.mul_(by_value.add_(constant[:, :, :, part, None])).mul_(q.shape[-1] ** -0.5).to(q.dtype)
            grad_q[:, :, :, part] = _product(grad_scores, k[:, :, :seen])
            grad_k[:, :, :seen] += grad_scores.flatten(2, 3).mT @ q_part.flatten(2, 3)
        return grad_q.flatten(1, 2), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _parts(ranges: Ranges, rows: int, T: int) -> Iterator[tuple[slice, int]]:
    """Yield the queries of each part, and the number of positions that its products are over: all that it may read."""
    X = ranges.first_BX.shape[1]
    step = rows * math.ceil(T / rows / NUM_SIZES)
    for start in range(0, X, rows):
        end = min(start + rows, X)
        yield slice(start, end), T if ranges.reach is None else min(T, step * math.ceil(ranges.reach[end - 1] / step))


def _scores(q_BMGXH: Tensor, k_BMTH: Tensor, ranges: Ranges, part: slice) -> Tensor:
    """Return scaled scores `[B, M, G, X, T]` in the softmax's dtype, the lowest number out of range."""
    scores = _product(q_BMGXH, k_BMTH.mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(q_BMGXH.shape[-1] ** -0.5)
    first_BX1, end_BX1 = ranges.first_BX[:, part, None], ranges.end_BX[:, part, None]
    places_T = torch.arange(k_BMTH.shape[2], device=first_BX1.device)
    outside_B11XT = ((places_T < first_BX1) | (places_T >= end_BX1))[:, None, None]
    return scores.masked_fill_(outside_B11XT, torch.finfo(scores.dtype).min)


def _product(rows_BMGXY: Tensor, each_BMYZ: Tensor) -> Tensor:
    """Return `[B, M, G, X, Z]`, the rows of G heads times the one matrix they share."""
    return (rows_BMGXY.flatten(2, 3) @ each_BMYZ).unflatten(2, rows_BMGXY.shape[2:4])
