"""A batch under way: the prompts are read once, then each round drafts, verifies and commits.

What stays of a proposal is decided in `eval.decoder.verifier`. A round costs one transfer to the host, and two to the device:
`RoundInputs`, and what the draft reads. Stopping rules, merged drafts, comparing distributions and rows that end cost more.
B batch, G drafted tokens, N drafts of a tree, K = G + 1 or N + 1 target rows, D depth of a tree, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from configs.schema.decoding import DecodeConfig
from eval.decoder.records import BatchRow, Clock, Request, Round
from eval.decoder.verifier import Verifier, compare_distributions, finite_rows
from heads.device import RowInts, row_ints, row_tensor
from heads.frozen.hidden_states import TargetStates, forward_states
from heads.frozen.loading import Target
from heads.inference.causal_lm import MediaInputs, head_logits, new_cache
from heads.inference.kv_cache import LAYERS
from heads.proposers.protocol import Proposal, Proposer, RoundInputs, TargetReader, TreeProposer
from heads.sampling.draws import CounterRNG, TextCounts, penalised
from heads.sampling.token_tree import DynamicTreeSpec, Tree, TreeAttention, tree_attention, tree_from


class BatchRun:
    """The state of one batch: its rows, the target's cache, the random streams. For arguments see `eval.decoder.decode`."""

    def __init__(
        self,
        target: Target,
        requests: Sequence[Request],
        config: DecodeConfig,
        proposer: Proposer | None = None,
        measure_overlap: bool = False,
    ) -> None:
        self.target, self.config, self.proposer = target, config, proposer
        self.measure_overlap = measure_overlap
        self.clock = Clock(target.device)
        self.rows = [BatchRow(request, target, config) for request in requests]
        self.active = list(self.rows)
        self.rng = CounterRNG(config.seed, [request.number for request in requests], target.device)
        self.verifier = Verifier(config if proposer is not None else config.model_copy(update={"lossy": None}))
        self.tree, num_slots = None, config.num_speculative_tokens
        if config.tree is not None and isinstance(proposer, TreeProposer):
            self.tree = tree_from(config.tree, config.num_speculative_tokens)
            num_slots = max(num_slots, self.tree.num_slots * proposer.num_trees)
        longest = max(len(request.tokens) for request in requests)
        self.capacity = min(longest + config.max_new_tokens, target.max_positions) + num_slots + 1
        self.cache = new_cache(target.model, self.capacity, LAYERS[config.kv_cache])
        self.taps = () if proposer is None else proposer.taps

    def prefill(self) -> None:
        """Read the prompts and commit each row's first token, which becomes pending. The target reads equal prompts once."""
        inputs, device = self._inputs(0), self.target.device
        prompts = [(tuple(row.tokens), row.request.media_prompt) for row in self.active]
        number_of = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        tokens = [tokens for tokens, _ in number_of]
        media = self.target.media_inputs([media_prompt for _, media_prompt in number_of], tokens)
        states = self._read(row_tensor(tokens, device), RowInts.full(0, len(tokens), device), media=media)
        if len(tokens) < len(prompts):
            copies = row_ints([number_of[prompt] for prompt in prompts], device)
            self.cache.keep_rows(copies)
            states = states.map(lambda state_BTE: state_BTE[copies.tensor_B])
        rows_B1 = torch.arange(len(prompts), device=device).unsqueeze(1)
        last_B1D = states.final_BTE[rows_B1, inputs.lengths.tensor_B.unsqueeze(1) - 1]
        logits_B1V = self._logits(last_B1D, inputs.pending_B1[:, :0], inputs)
        tokens_B1 = self.verifier.target_tokens(logits_B1V, inputs)
        finite_B1 = torch.isfinite(logits_B1V.amax(2))
        for row, (token, finite) in zip(self.active, torch.cat([tokens_B1, finite_B1.long()], 1).tolist(), strict=True):
            row.commit((token,) if finite else ())
        keep = self._drop_ended()
        if self.proposer is not None and self.active:
            if len(keep) < len(prompts):
                states = states.map(lambda state_BTE: state_BTE[keep.tensor_B])
            self.proposer.start([row.tokens for row in self.active], self.capacity, states)

    def round(self) -> None:
        """Run one target step: draft, verify, commit."""
        inputs = self._inputs(0 if self.proposer is None else self.config.num_speculative_tokens)
        tree = None if self.tree is None else self.tree.cut(max(inputs.room.host))
        if isinstance(tree, DynamicTreeSpec):
            tree = replace(tree, max_depths=inputs.room)
        with self.clock.phase("draft"):
            proposal = self._propose(inputs, tree)
        starts = inputs.lengths + (-1)
        attention = None if proposal.parents_BN is None else tree_attention(proposal.parents_BN, starts)
        with self.clock.phase("verify"):
            states = self._read(torch.cat([inputs.pending_B1, proposal.tokens_BG], 1), starts, attention)
            logits_BKV = self._logits(states.final_BTE, proposal.tokens_BG, inputs)
        with self.clock.phase("sample"):
            if attention is None or tree is None:
                rounds = self._verify_chain(logits_BKV, proposal, inputs)
            else:
                rounds, paths, path_BD = self._verify_tree(logits_BKV, proposal, attention, tree, inputs)
        compared = self._compare(logits_BKV, proposal, rounds) if self.measure_overlap else None
        if attention is not None:
            states = self._keep_paths(starts, paths, path_BD, states)
        if self.proposer is not None and max(inputs.room.host) > 0:
            with self.clock.phase("draft"):
                self.proposer.commit([round_.num_accepted for round_ in rounds], states)
        for number, (row, round_) in enumerate(zip(self.active, rounds, strict=True)):
            _record(row, round_, None if compared is None else compared[number])
        self._drop_ended()

    def _inputs(self, num_drafts: int) -> RoundInputs:
        """Return what a round of so many drafts begins with; random numbers of trees are made where they are read."""
        tokens, room = [row.tokens for row in self.active], [row.room for row in self.active]
        is_chain = self.tree is None or num_drafts == 0 or max(room) == 0
        is_drawn = self.config.temperature > 0 and is_chain
        prompts, vocab_size = [len(row.request.tokens) for row in self.active], self.target.vocab_size
        counts = TextCounts.of(self.config, tokens, prompts, vocab_size, self.target.device)
        return RoundInputs.of(tokens, self.rng, room=room, num_drafts=num_drafts if is_drawn else None, counts=counts)

    def _logits(self, states_BKE: Tensor, drafts_BG: Tensor, inputs: RoundInputs) -> Tensor:
        """Return the target's logits `[B, K, V]` after the text and each draft, with their penalties."""
        logits_BKV = head_logits(self.target.model, states_BKE)
        return logits_BKV if inputs.counts is None else penalised(logits_BKV, inputs.counts.along(drafts_BG))

    def _read(
        self,
        ids_BT: Tensor,
        starts: RowInts,
        attention: TreeAttention | None = None,
        media: MediaInputs | None = None,
    ) -> TargetStates:
        """Run the target's forward; a proposer that is part of the target runs it itself and reuses what it has computed."""
        if isinstance(self.proposer, TargetReader):
            return self.proposer.forward_states(self.cache, ids_BT, starts, self.taps, attention, media)
        return forward_states(self.target.model, self.cache, ids_BT, starts, self.taps, attention, media)

    def _propose(self, inputs: RoundInputs, tree: Tree | DynamicTreeSpec | None) -> Proposal:
        """Return as many drafts as the row with the most room can use; none without a proposer or room."""
        num_tokens = min(self.config.num_speculative_tokens, max(inputs.room.host))
        if self.proposer is None or num_tokens == 0:
            nothing = RowInts.full(0, len(self.active), self.target.device)
            return Proposal(tokens_BG=inputs.pending_B1[:, :0], num_drafted=nothing)
        if tree is None:
            sampling = self.config if self.config.draws else self.config.model_copy(update={"temperature": 0.0})
            return self.proposer.propose(inputs, num_tokens, sampling, keep_logits=self.measure_overlap)
        return cast(TreeProposer, self.proposer).propose_tree(inputs, tree, self.config if self.config.draws else None)

    def _verify_chain(self, logits_BKV: Tensor, proposal: Proposal, inputs: RoundInputs) -> list[Round]:
        """Return each row's round, in one transfer; nothing is committed in that of a row whose numbers are not finite."""
        num_drafted = proposal.num_drafted.minimum(inputs.room)
        verified = self.verifier.chain(logits_BKV, proposal, num_drafted, inputs)
        summary_B3 = torch.stack([*verified, finite_rows(logits_BKV, proposal).long()], 1)
        table = torch.cat([summary_B3, proposal.tokens_BG], 1).tolist()
        return [_chain_round(*row, num_drafted=count) for row, count in zip(table, num_drafted.host, strict=True)]

    def _verify_tree(
        self,
        logits_BKV: Tensor,
        proposal: Proposal,
        attention: TreeAttention,
        tree: Tree | DynamicTreeSpec,
        inputs: RoundInputs,
    ) -> tuple[list[Round], list[list[int]], Tensor]:
        """Return each row's round and its path of target rows, in one transfer, and the paths on the device, `[B, D]`."""
        # Drafts that a row has no room for do not count, so that it is verified as it would be alone.
        too_deep_BN = attention.depths_BX[:, 1:] > inputs.room.tensor_B.unsqueeze(1)
        parents_BN = cast(Tensor, proposal.parents_BN).masked_fill(too_deep_BN, -1)
        walked = self.verifier.tree(logits_BKV, replace(proposal, parents_BN=parents_BN), attention.depths_BX, inputs, tree)
        finite_B = finite_rows(logits_BKV, proposal).long()
        summary_B3 = torch.stack([walked.num_accepted_B, walked.next_token_B, finite_B], 1)
        table = torch.cat([summary_B3, walked.path_BD, proposal.tokens_BG, parents_BN], 1).tolist()
        depth = walked.path_BD.shape[1]
        return [_tree_round(row, depth) for row in table], [row[3 : 3 + row[0]] for row in table], walked.path_BD

    def _compare(self, logits_BKV: Tensor, proposal: Proposal, rounds: Sequence[Round]) -> list[list[list[float]]] | None:
        """Return the numbers of `compare_distributions` by row and draft; None for trees and for drafts without logits."""
        if proposal.logits_BGV is None or not any(round_.drafted for round_ in rounds):
            return None
        # Drafts behind the first rejected one were verified in no row.
        J = min(proposal.tokens_BG.shape[1], 1 + max(round_.num_accepted for round_ in rounds))
        compared = (logits_BKV[:, :J], proposal.logits_BGV[:, :J], proposal.tokens_BG[:, :J])
        columns_BJF = compare_distributions(*compared, self.config)
        return cast(list[list[list[float]]], columns_BJF.tolist())

    def _keep_paths(
        self, starts: RowInts, paths: Sequence[Sequence[int]], path_BD: Tensor, states: TargetStates
    ) -> TargetStates:
        """Move the cache entries along each row's path together; return the states along it."""
        columns = [[0, *path] for path in paths]
        columns_BA = functional.pad(path_BD, (1, 0))[:, : max(map(len, columns))]  # the pending token's row first
        own_A = torch.arange(columns_BA.shape[1], device=columns_BA.device)
        columns_BA = torch.where(columns_BA < 0, own_A, columns_BA)
        self.cache.keep_path(starts, columns, columns_BA)
        rows_B1 = torch.arange(len(columns), device=columns_BA.device).unsqueeze(1)
        return states.map(lambda state_BTE: state_BTE[rows_B1, columns_BA])

    def _drop_ended(self) -> RowInts:
        """Remove rows that have ended from the batch; return the numbers of those that stay."""
        numbers = [number for number, row in enumerate(self.active) if row.stop_reason is None]
        if len(numbers) == len(self.active):
            return RowInts(numbers, torch.arange(len(numbers), device=self.target.device))
        keep = row_ints(numbers, self.target.device)
        self.active = [self.active[number] for number in numbers]
        if numbers:
            self.cache.keep_rows(keep)
            self.rng.keep_rows(keep)
            if self.proposer is not None and any(
                row.rounds for row in self.active
            ):  # before the first round it has not started
                self.proposer.keep_rows(keep)
        return keep


# --- on the host --------------------------------------------------------------------------------------------------


def _chain_round(num_accepted: int, next_token: int, finite: int, *drafts: int, num_drafted: int) -> Round:
    drafted = drafts[:num_drafted]
    committed = (*drafted[:num_accepted], next_token) if finite else ()
    return Round(drafted=drafted, num_accepted=num_accepted, committed=committed)


def _tree_round(numbers: Sequence[int], depth: int) -> Round:
    """Read `[accepted, next token, finite, path..., drafts..., parents...]`.

    The path names target rows and is filled up to `depth`; the parent of a draft that does not count is -1. Of the drafts,
    those on the path are recorded, then the first child at each depth below it, which is the likeliest.
    """
    accepted, next_token, finite, *rest = numbers
    path, nodes = rest[:accepted], rest[depth:]
    drafts, parents = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
    if max(parents, default=-1) < 0:  # recorded as where nothing was proposed: records do not depend on the batch
        return Round(drafted=(), num_accepted=0, committed=(next_token,) if finite else ())
    walked = [*path]
    while (row := walked[-1] if walked else 0) in parents:
        walked.append(parents.index(row) + 1)
    drafted = tuple(drafts[row - 1] for row in walked)
    return Round(
        drafted=drafted,
        num_accepted=accepted,
        committed=(*drafted[:accepted], next_token) if finite else (),
        ranks=tuple(parents[: row - 1].count(parents[row - 1]) for row in path),
        num_nodes=sum(parent >= 0 for parent in parents),
    )


def _record(row: BatchRow, round_: Round, compared: Sequence[Sequence[float]] | None) -> None:
    """Commit a round to its row, up to the end of the text; `compared` has the numbers of each draft, where measured."""
    committed = row.commit(round_.committed)
    overlap, uncovered = None, None
    if compared is not None and round_.drafted:
        # A verified draft left one token, itself or the one in its place; what follows an end of text was not verified.
        verified = compared[: min(len(committed), len(round_.drafted))]
        overlap, uncovered = (tuple(each[column] for each in verified) for column in (0, 1))
    row.rounds.append(
        replace(
            round_,
            num_accepted=min(round_.num_accepted, len(committed)),
            committed=committed,
            ranks=None if round_.ranks is None else round_.ranks[: len(committed)],
            overlap=overlap,
            uncovered=uncovered,
        )
    )
