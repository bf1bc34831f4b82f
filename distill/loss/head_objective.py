"""The objective of all head families: at every depth, the divergence from the target's distribution, and the acceptance.

A family says, for each depth, which origins it predicts from and at which positions the target's distribution is compared
(`heads.modules.interface.Depth`); `distill.loss.chunked` compares them, a chunk of rows at a time.

B batch, T positions, E width of the target, N rows of one depth, K depths, P = B * T flat places.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from configs.schema.training import LossConfig
from distill.loss.chunked import ChunkedLoss, LossPart, chunked_losses, rows_of_chunk
from distill.loss.divergences import configured_divergence
from distill.loss.draft_objective import Timer
from distill.loss.logit_head import LogitHead, model_head
from distill.loss.pairs import HiddenRows, PlacedRows, SharedLogits, TargetRows, normalise, normalisers_at
from heads.device import keeps_small_tensors_near, upload
from heads.frozen.hidden_states import TargetStates
from heads.frozen.loading import Target
from heads.inference.causal_lm import HeadRows
from heads.modules.interface import Auxiliary, Batch, Depth, Normalisers, before_labels, flat
from heads.modules.output_head import HeadModule


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """The loss of a batch, to go backward from, and sums over the batch by depth, all detached.

    Args:
        loss: scalar, the weighted mean over labels and depths, and the loss of a head's estimates of its acceptance.
        labels_K: rows of each depth.
        values_K: divergence.
        acceptance_K: sum_v min(p, q), each depth by itself.
        agrees_K: rows where the most likely tokens agree.
        origins_K: origins that drafting would start from (the pending token is an answer's) with a row at every depth up
            to this one; among them
        joint_agrees_K: those where every depth up to this one agrees,
        reached_K: those where every depth before this one agrees.
        accepted_P: int64, how many depths in a row agree, at the flat place b * T + j of each of those origins; 0 elsewhere.
    """

    loss: Tensor
    labels_K: Tensor
    values_K: Tensor
    acceptance_K: Tensor
    agrees_K: Tensor
    origins_K: Tensor
    joint_agrees_K: Tensor
    reached_K: Tensor
    accepted_P: Tensor


class HeadObjective(nn.Module):
    """A head and its loss in one module, so that wrappers (DDP, FSDP, DeepSpeed) see every use of its parameters.

    `head` is an `nn.Module` that follows `heads.modules.output_head.HeadModule`; for `timed` see `DraftObjective`.
    """

    def __init__(self, head: nn.Module, target: Target, config: LossConfig, timed: Timer = nullcontext) -> None:
        super().__init__()
        self.head, self._timed, self._config = head, timed, config
        self._divergence = configured_divergence(config)
        self._chunk_size = rows_of_chunk(config.chunk_size, on_cpu=keeps_small_tensors_near(target.device))
        # In a tuple, so that the target does not become a submodule and is neither trained nor saved.
        self._target = (target,)

    def forward(
        self,
        batch: Batch,
        states: TargetStates,
        num_labels: Tensor,
        world_size: int,
        normalisers: Normalisers | None = None,
    ) -> HeadLoss:
        """Return the loss over every depth's labels.

        Args:
            num_labels: labels of the whole optimiser step, over all processes and micro-batches. Each depth's sum is
                divided by it: the deeper ones, which have fewer labels, are not raised for it.
            world_size: processes whose gradients are averaged afterwards, which this factor undoes.
            normalisers: of the final states' logits at every position, where they are known already.
        """
        with self._timed("draft"):
            depths = cast(HeadModule, self.head)(batch, states)
        known = self._normalisers(states, depths, normalisers)
        places = [depth.target_places_N for depth in depths]  # in host memory
        depths = _on_device(depths, states.final_BTE.device)
        target_rows = self._target_rows(states, places, depths, known)
        total_weight = sum(depth.weight for depth in depths)
        parts: list[LossPart] = []
        for depth, rows in zip(depths, target_rows, strict=True):
            weights_N = (world_size * depth.weight / (total_weight * num_labels)).expand(len(depth.origins_N))
            parts.append(self._part(batch, depth, depth, rows, weights_N))
        if self.training and cast(HeadModule, self.head).weighs_by_acceptance:
            parts = self._weighed_by_acceptance(parts, depths, batch.input_ids_BT.numel())
        for number, depth in enumerate(depths):
            for each in depth.auxiliaries:
                weights_N = parts[number].weights_N * each.weight
                parts.append(self._part(batch, depth, each, target_rows[number], weights_N))
        results = self._compared(parts)
        losses = [results[0].loss]
        for depth, result, part in zip(depths, results, parts, strict=False):
            if depth.confidence_N is not None:  # a head's estimates of its acceptance, which itself carries no graph
                estimates_N = depth.confidence_N.to(result.acceptance_N.dtype)
                entropies_N = binary_cross_entropy_with_logits(estimates_N, result.acceptance_N, reduction="none")
                losses.append(depth.confidence_weight * (part.weights_N * entropies_N).sum())
        loss = torch.stack(losses).sum()
        return _sums(batch, depths, loss, results[: len(depths)])

    def _compared(self, parts: list[LossPart]) -> list[ChunkedLoss]:
        config, size = self._config, self._chunk_size
        return chunked_losses(
            parts, self._divergence, chunk_size=size, temperature=config.temperature, compiled=config.compiled
        )

    @torch.no_grad()
    def _weighed_by_acceptance(self, parts: list[LossPart], depths: list[Depth], num_places: int) -> list[LossPart]:
        """Weigh each row by how much of the accepted length depends on its draft (D-PACE, arXiv 2605.18810).

        A block is accepted to depth m with chance a_1 * ... * a_m, where a_i is the acceptance sum_v min(p, q) at depth i.
        The row at depth d weighs the sum of these chances over m >= d, each a_i smoothed to (1 + a_i) / 2. The paper has the
        chance of the text's token for a_i. An origin's rows after a depth at which it has none weigh nothing.
        """
        found = self._compared(parts)
        smoothed_KP = found[0].acceptance_N.new_zeros(len(depths), num_places)
        for smoothed_P, depth, each in zip(smoothed_KP, depths, found, strict=True):
            smoothed_P[depth.origins_N] = (1 + each.acceptance_N) / 2
        sums_KP = smoothed_KP.cumprod(0).flip(0).cumsum(0).flip(0)
        return [
            replace(part, weights_N=part.weights_N * sums_P[depth.origins_N])
            for part, depth, sums_P in zip(parts, depths, sums_KP, strict=True)
        ]

    def _part(self, batch: Batch, depth: Depth, prediction: Depth | Auxiliary, rows: TargetRows, weights_N: Tensor) -> LossPart:
        if depth.row_weights_N is not None and prediction is depth:
            weights_N = weights_N * depth.row_weights_N
        reads_labels = "cross_entropy" in self._config.weights
        return LossPart(
            target=rows,
            draft_hidden_ND=prediction.hidden_ND,
            draft_head=LogitHead(logits_of=prediction.logits_of, parameters=prediction.parameters),
            weights_N=weights_N,
            draft_token_ids_W=cast(HeadModule, self.head).token_ids_W,
            labels_N=flat(batch.input_ids_BT, depth.target_places_N + 1) if reads_labels else None,
        )

    def _normalisers(self, states: TargetStates, depths: list[Depth], given: Normalisers | None) -> Normalisers | None:
        """Return those of the positions where depths of a reduced vocabulary are compared, computed once for all depths."""
        if cast(HeadModule, self.head).token_ids_W is None or self._config.temperature != 1:
            return None
        if given is not None:
            return given
        (target,) = self._target
        places_N = torch.cat([depth.target_places_N for depth in depths]).unique()
        return normalise(target.model, states.final_BTE, places_N, chunk_size=self._chunk_size)

    def _target_rows(
        self, states: TargetStates, places: list[Tensor], depths: list[Depth], known: Normalisers | None
    ) -> list[TargetRows]:
        """Return the target's side for each depth, of the draft's tokens alone where the normalisers are known.

        Depths are compared with the target at nearly the same places, whose logits they share.
        """
        (target,) = self._target
        token_ids_W = cast(HeadModule, self.head).token_ids_W
        if token_ids_W is None or known is None:
            logits_of = model_head(target.model).logits_of
        else:
            logits_of = HeadRows.of(target.model, token_ids_W).logits
        known_at = [normalisers_at(known, depth.target_places_N) for depth in depths]
        if (all_P := shared_places(places)) is None:
            hidden = (flat(states.final_BTE, depth.target_places_N) for depth in depths)
            return [
                HiddenRows(hidden_NE=hidden_NE, logits_of=logits_of, known=each)
                for hidden_NE, each in zip(hidden, known_at, strict=True)
            ]
        shared = SharedLogits(flat(states.final_BTE, all_P), logits_of, self._chunk_size)
        found = [torch.searchsorted(all_P, each) for each in places]
        on_device = upload(torch.cat(found), states.final_BTE.device).split([len(each) for each in found])
        return [
            PlacedRows(shared=shared, places_N=places_N, on_device_N=on_device_N, known=each)
            for places_N, on_device_N, each in zip(found, on_device, known_at, strict=True)
        ]


def shared_places(places: Sequence[Tensor]) -> Tensor | None:
    """Return the places at which the target's logits are computed once for all depths; None where each computes its own."""
    if len(places) < 2 or not all(bool((each.diff() > 0).all()) for each in places):
        return None
    return torch.cat(list(places)).unique()


def _on_device(depths: list[Depth], device: torch.device) -> list[Depth]:
    """Return depths whose places are on a device, all moved in one copy."""
    places = [places_N for depth in depths for places_N in (depth.origins_N, depth.target_places_N)]
    moved = iter(upload(torch.cat(places), device).split([len(each) for each in places]))
    return [replace(depth, origins_N=next(moved), target_places_N=next(moved)) for depth in depths]


def _sums(batch: Batch, depths: list[Depth], loss: Tensor, results: list[ChunkedLoss]) -> HeadLoss:
    """Sum each depth's statistics, alone and along the chains from the origins that drafting would start from."""
    alive_P = before_labels(batch).flatten()
    joint_agrees_P, accepted_P = alive_P.clone(), torch.zeros_like(alive_P, dtype=torch.long)
    sums: list[dict[str, Tensor]] = []
    for depth, result in zip(depths, results, strict=True):
        alive_P = alive_P & _placed(torch.ones_like(result.top1_agrees_N), depth.origins_N, alive_P)
        reached_P = joint_agrees_P & alive_P
        joint_agrees_P = reached_P & _placed(result.top1_agrees_N, depth.origins_N, alive_P)
        accepted_P += joint_agrees_P
        summed = {
            "values_K": result.values_N,
            "acceptance_K": result.acceptance_N,
            "agrees_K": result.top1_agrees_N,
            "origins_K": alive_P,
            "joint_agrees_K": joint_agrees_P,
            "reached_K": reached_P,
        }
        num_labels = result.values_N.new_full((), len(depth.origins_N))
        sums.append({"labels_K": num_labels} | {name: values.float().sum() for name, values in summed.items()})
    return HeadLoss(
        loss=loss,
        accepted_P=accepted_P,
        **{name: torch.stack([each[name] for each in sums]) for name in sums[0]},
    )


def _placed(values_N: Tensor, places_N: Tensor, like_P: Tensor) -> Tensor:
    """Return values at their flat places, 0 or False elsewhere."""
    placed_P = torch.zeros_like(like_P, dtype=values_N.dtype)
    placed_P[places_N] = values_N
    return placed_P
