"""The objectives of a draft LM and of all head families: the divergence from the target's distribution, and the acceptance.

A draft LM is compared at the positions before each label of a batch. A head family says, for each depth, which origins it
predicts from and at which positions the target's distribution is compared (`heads.modules.interface.Depth`);
`distill.loss.fused` compares them, a chunk of rows at a time.

B batch, T positions, D width of the draft, E width of the target, N rows that have a label (of one depth), K depths, P = B * T
flat places, U those of them at which any depth is compared, V vocabulary, W the draft's vocabulary where it is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from configs.schema.training import LossConfig
from distill.loss.divergences import configured_divergence
from distill.loss.fused import DraftRows, LogitHead, RowStatistics, TargetRows, fused_loss, model_head, normalise, rows_of_chunk
from heads.device import keeps_small_tensors_near, upload
from heads.frozen.hidden_states import TargetStates
from heads.frozen.loading import Target
from heads.inference.causal_lm import HeadRows, head_rows, read_documents
from heads.modules.interface import Batch, Depth, Normalisers, before_labels, flat
from heads.modules.output_head import HeadModule
from heads.vocabulary import DraftVocabulary


class DraftLoss(NamedTuple):
    """The sum of the divergence over N rows, to go backward from, and their statistics (`distill.loss.fused.RowStatistics`).

    A tuple, because ZeRO-3 finds the tensors that a module returns, and so the start of its backward, in tuples only.
    """

    loss: Tensor
    values_N: Tensor
    acceptance_N: Tensor
    top1_agrees_N: Tensor


class _Objective(nn.Module):
    """What both objectives have: a divergence, and a target that is neither trained nor saved."""

    def __init__(self, target: Target, config: LossConfig) -> None:
        super().__init__()
        self._config, self._divergence = config, configured_divergence(config)
        self._chunk_size = rows_of_chunk(config.chunk_size, on_cpu=keeps_small_tensors_near(target.device))
        self._target = (target,)  # in a tuple, so that the target does not become a submodule

    def _compared(
        self, target: TargetRows, parts: list[DraftRows], token_ids_W: Tensor | None
    ) -> tuple[Tensor, list[RowStatistics]]:
        return fused_loss(
            target,
            parts,
            self._divergence,
            chunk_size=self._chunk_size,
            temperature=self._config.temperature,
            token_ids_W=token_ids_W,
            compiled=self._config.compiled,
        )


class DraftObjective(_Objective):
    """A draft LM and its loss in one module, so that wrappers (DDP, FSDP, DeepSpeed) see every use of its parameters.

    Without `vocabulary` the draft has all of the target's tokens; a head without rows for it is an `InputError`.
    """

    token_ids_W: Tensor | None

    def __init__(
        self, draft: PreTrainedModel, target: Target, config: LossConfig, vocabulary: DraftVocabulary | None = None
    ) -> None:
        super().__init__(target, config)
        self.draft = draft
        self._shared_vocab_size = min(target.vocab_size, draft.config.get_text_config().vocab_size)
        if vocabulary is not None:  # refuse a head that cannot be reduced now, not in the first step
            head_rows(draft, vocabulary.token_ids_W.to(draft.device))
        # Not saved with the weights, but moved with them.
        self.register_buffer("token_ids_W", None if vocabulary is None else vocabulary.token_ids_W, persistent=False)

    def forward(self, batch: Batch, target_BTE: Tensor) -> DraftLoss:
        """Return the sum of the divergence over all positions whose next token is a label.

        Args:
            target_BTE: the target's final hidden states, read before labels only.
        """
        hidden_BTD = read_documents(self.draft, batch.input_ids_BT, batch.packed_positions_BT)
        places_N = upload(before_labels(batch.on_host).flatten().nonzero().squeeze(1), hidden_BTD.device)
        (target,), draft_ND = self._target, flat(hidden_BTD, places_N)
        rows = DraftRows(
            hidden_ND=draft_ND,
            head=self._draft_head(),
            weights_N=draft_ND.new_ones(len(draft_ND), dtype=torch.float32),
            places_N=torch.arange(len(draft_ND)),
            labels_N=flat(batch.input_ids_BT, places_N + 1) if "cross_entropy" in self._config.weights else None,
        )
        logits_of = model_head(target.model, self._shared_vocab_size).logits_of
        compared = TargetRows(hidden_PE=flat(target_BTE, places_N), logits_of=logits_of)
        loss, (statistics,) = self._compared(compared, [rows], self.token_ids_W)
        return DraftLoss(loss, *statistics)

    def _draft_head(self) -> LogitHead:
        """Return the draft's head: whole, or the rows of a reduced vocabulary, gathered once for all chunks of a batch."""
        if self.token_ids_W is None:
            return model_head(self.draft, self._shared_vocab_size)
        rows = HeadRows.of(self.draft, self.token_ids_W)
        return LogitHead(logits_of=rows.logits, parameters=rows.parameters)


# --- heads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """The loss of a batch, to go backward from, and sums over the batch by depth, all detached.

    Args:
        loss: scalar, the sum over labels of the weighted mean over depths, each of whose labels counts alike, and the loss of a
            head's estimates of its acceptance. Deeper depths, which have fewer labels, are not raised for it.
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


class HeadObjective(_Objective):
    """A head and its loss in one module, so that wrappers (DDP, FSDP, DeepSpeed) see every use of its parameters.

    `head` is an `nn.Module` that follows `heads.modules.output_head.HeadModule`.
    """

    def __init__(self, head: nn.Module, target: Target, config: LossConfig) -> None:
        super().__init__(target, config)
        self.head = head

    def forward(self, batch: Batch, states: TargetStates, normalisers: Normalisers | None = None) -> HeadLoss:
        """Return the loss over every depth's labels.

        Args:
            normalisers: of the final states' logits at every position, where they are known already.
        """
        head = cast(HeadModule, self.head)
        depths: list[Depth] = head(batch, states)
        compared_U = torch.cat([depth.target_places_N for depth in depths]).unique()  # in host memory
        target = self._target_rows(states, compared_U, normalisers)
        places = [torch.searchsorted(compared_U, depth.target_places_N) for depth in depths]
        depths = _on_device(depths, states.final_BTE.device)
        total_weight = sum(depth.weight for depth in depths)
        reads_labels = "cross_entropy" in self._config.weights
        parts: list[DraftRows] = []
        for depth, places_N in zip(depths, places, strict=True):
            weights_N = torch.full_like(depth.origins_N, depth.weight / total_weight, dtype=torch.float32)
            labels_N = flat(batch.input_ids_BT, depth.target_places_N + 1) if reads_labels else None
            rows = DraftRows(
                hidden_ND=depth.hidden_ND,
                head=LogitHead(logits_of=depth.logits_of, parameters=depth.parameters),
                weights_N=weights_N if depth.row_weights_N is None else weights_N * depth.row_weights_N,
                places_N=places_N,
                labels_N=labels_N,
            )
            parts.append(rows)
        if self.training and head.weighs_by_acceptance:
            parts = self._weighed_by_acceptance(target, parts, depths, batch.input_ids_BT.numel())
        auxiliaries = [
            replace(
                part,
                hidden_ND=each.hidden_ND,
                head=LogitHead(logits_of=each.logits_of, parameters=each.parameters),
                weights_N=part.weights_N * each.weight,
            )
            for depth, part in zip(depths, parts, strict=True)
            for each in depth.auxiliaries
        ]
        loss, statistics = self._compared(target, parts + auxiliaries, head.token_ids_W)
        losses = [loss]
        for depth, part, found in zip(depths, parts, statistics, strict=False):
            if depth.confidence_N is not None:  # a head's estimates of its acceptance, which itself carries no graph
                estimates_N = depth.confidence_N.to(found.acceptance_N.dtype)
                entropies_N = binary_cross_entropy_with_logits(estimates_N, found.acceptance_N, reduction="none")
                losses.append(depth.confidence_weight * (part.weights_N * entropies_N).sum())
        return _sums(batch, depths, torch.stack(losses).sum(), statistics[: len(depths)])

    @torch.no_grad()
    def _weighed_by_acceptance(
        self, target: TargetRows, parts: list[DraftRows], depths: list[Depth], num_places: int
    ) -> list[DraftRows]:
        """Weigh each row by how much of the accepted length depends on its draft (D-PACE, arXiv 2605.18810).

        A block is accepted to depth m with chance a_1 * ... * a_m, where a_i is the acceptance sum_v min(p, q) at depth i.
        The row at depth d weighs the sum of these chances over m >= d, each a_i smoothed to (1 + a_i) / 2. The paper has the
        chance of the text's token for a_i. An origin's rows after a depth at which it has none weigh nothing.
        """
        _, found = self._compared(target, parts, cast(HeadModule, self.head).token_ids_W)
        smoothed_KP = found[0].acceptance_N.new_zeros(len(depths), num_places)
        for smoothed_P, depth, each in zip(smoothed_KP, depths, found, strict=True):
            smoothed_P[depth.origins_N] = (1 + each.acceptance_N) / 2
        sums_KP = smoothed_KP.cumprod(0).flip(0).cumsum(0).flip(0)
        return [
            replace(part, weights_N=part.weights_N * sums_P[depth.origins_N])
            for part, depth, sums_P in zip(parts, depths, sums_KP, strict=True)
        ]

    def _target_rows(self, states: TargetStates, compared_U: Tensor, normalisers: Normalisers | None) -> TargetRows:
        """Return the target's side at the places where depths are compared, which nearly all of them share.

        A divergence over a reduced vocabulary needs W of the target's V logits, and the others only through their sum, which
        is the same at every depth.
        """
        (target,), token_ids_W = self._target, cast(HeadModule, self.head).token_ids_W
        hidden_UE = flat(states.final_BTE, compared_U)
        if token_ids_W is None or self._config.temperature != 1:
            return TargetRows(hidden_PE=hidden_UE, logits_of=model_head(target.model).logits_of)
        if normalisers is None:
            known = normalise(target.model, hidden_UE, chunk_size=self._chunk_size)
        else:
            at_U = upload(compared_U, hidden_UE.device)
            known = Normalisers(log_sum_P=normalisers.log_sum_P[at_U], top1_P=normalisers.top1_P[at_U])
        return TargetRows(hidden_PE=hidden_UE, logits_of=HeadRows.of(target.model, token_ids_W).logits, known=known)


def _on_device(depths: list[Depth], device: torch.device) -> list[Depth]:
    """Return depths whose places are on a device, all moved in one copy."""
    places = [places_N for depth in depths for places_N in (depth.origins_N, depth.target_places_N)]
    moved = iter(upload(torch.cat(places), device).split([len(each) for each in places]))
    return [replace(depth, origins_N=next(moved), target_places_N=next(moved)) for depth in depths]


def _sums(batch: Batch, depths: list[Depth], loss: Tensor, statistics: list[RowStatistics]) -> HeadLoss:
    """Sum each depth's statistics, alone and along the chains from the origins that drafting would start from."""
    drafting_P = before_labels(batch).flatten()
    alive_KP, joint_KP = (drafting_P.new_zeros(len(depths), len(drafting_P)) for _ in range(2))
    for alive_P, agrees_P, depth, found in zip(alive_KP, joint_KP, depths, statistics, strict=True):
        alive_P[depth.origins_N], agrees_P[depth.origins_N] = True, found.top1_agrees_N
    alive_KP = (alive_KP & drafting_P).cumprod(0).bool()
    joint_KP = (joint_KP & alive_KP).cumprod(0).bool()
    reached_KP = torch.cat([drafting_P.unsqueeze(0), joint_KP[:-1]]) & alive_KP
    values, acceptances, agreements = zip(*statistics, strict=True)
    return HeadLoss(
        loss=loss,
        labels_K=torch.stack([each.new_full((), len(each)) for each in values]),
        values_K=torch.stack([each.float().sum() for each in values]),
        acceptance_K=torch.stack([each.float().sum() for each in acceptances]),
        agrees_K=torch.stack([each.float().sum() for each in agreements]),
        origins_K=alive_KP.float().sum(1),
        joint_agrees_K=joint_KP.float().sum(1),
        reached_K=reached_KP.float().sum(1),
        accepted_P=joint_KP.sum(0),
    )
