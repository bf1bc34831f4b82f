"""A batch in the decoder: the prompts are read once, then each round drafts, verifies and commits.

The cache of the target and the rows of the batch are here; what a proposal is worth is judged in `eval.decoder.verifier`. A
round costs one transfer to the host; stopping rules, merged drafts and comparing distributions cost more.
B batch, G drafted tokens, K = G + 1 target rows, V vocabulary.


What a round brings one row, read from the numbers that came from the device. Lists on the host, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from configs.schema.decoding import DecodeConfig
from eval.decoder.clock import Clock
from eval.decoder.distribution_comparison import compare_distributions
from eval.decoder.logits_processor import Processor, processed
from eval.decoder.meters import Meter
from eval.decoder.records import DistributionComparison, Round
from eval.decoder.request import Request, Row
from eval.decoder.verifier import Verifier, finite_rows
from heads.inference.causal_lm import head_logits, new_cache
from heads.inference.int8_kv_cache import LAYERS
from heads.proposers.protocol import Proposal, Proposer, TargetReader, TreeProposer
from heads.sampling.counter_rng import Streams
from heads.sampling.token_tree import Branches, GrownTree, Tree, tree_from, whole_tree
from heads.target.hidden_states import TargetStates, forward_states
from heads.target.loading import Target


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is committed, and what is recorded.

    Args:
        drafted: the drafts on the way that was walked; of a tree those that stay, then the likeliest branch below them.
        num_accepted: how many of them stay.
        next_token: the target's own, which comes after those.
        finite: whether the distributions were numbers; nothing is committed otherwise.
        path: of a tree, the target rows of the drafts that stay.
        ranks: of a tree, which child of its parent each draft that stays is, from 0.
        num_nodes: of a tree, its drafts.
    """

    drafted: list[int]
    num_accepted: int
    next_token: int
    finite: bool
    path: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    num_nodes: int | None = None


def chain_outcome(numbers: Sequence[int], num_drafted: int) -> Outcome:
    """Read `[accepted, next token, finite, drafts...]`, of which the first `num_drafted` drafts count."""
    accepted, next_token, finite, *drafts = numbers
    return Outcome(drafted=drafts[:num_drafted], num_accepted=accepted, next_token=next_token, finite=bool(finite))


def tree_outcome(numbers: Sequence[int], depth: int) -> Outcome:
    """Read `[accepted, next token, finite, path..., drafts..., parents...]`.

    Args:
        numbers: the path names target rows, `depth` of them; as many parents as drafts, -1 for those that do not count.
        depth: of the tree asked for.
    """
    accepted, next_token, finite, *rest = numbers
    path, nodes = rest[:accepted], rest[depth:]
    num_nodes = len(nodes) // 2
    drafts, parents = nodes[:num_nodes], nodes[num_nodes:]
    if max(parents, default=-1) < 0:  # as where nothing was asked for: what is recorded does not depend on the batch
        return Outcome(drafted=[], num_accepted=0, next_token=next_token, finite=bool(finite))
    walked = [*path, *_likeliest_below(parents, path[-1] if path else 0)]
    return Outcome(
        drafted=[drafts[row - 1] for row in walked],
        num_accepted=len(path),
        next_token=next_token,
        finite=bool(finite),
        path=tuple(path),
        ranks=tuple(parents[: row - 1].count(parents[row - 1]) for row in path),
        num_nodes=sum(parent >= 0 for parent in parents),
    )


def _likeliest_below(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows from a row's first child down to a leaf."""
    rows = []
    while row in parents:
        row = parents.index(row) + 1
        rows.append(row)
    return rows


class BatchRun:
    """The state of one batch: its rows, the target's cache, the random streams.

    Args:
        target: whose distribution the output follows.
        requests: the batch.
        config: how to decode.
        proposer: who drafts; None: nobody.
        measure_overlap: compare the distributions of target and draft at each judged draft of a chain.
        meter: reads the machine's energy counters; None: nobody does.
        logits_processor: changes the target's logits, and with them its distribution (`eval.decoder.logits_processor`).
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[Request],
        config: DecodeConfig,
        proposer: Proposer | None,
        measure_overlap: bool,
        meter: Meter | None = None,
        logits_processor: Processor | None = None,
    ) -> None:
        self.logits_processor = logits_processor
        self.target, self.config, self.proposer, self.measure_overlap = target, config, proposer, measure_overlap
        self.rows = [Row(request, target, config) for request in requests]
        self.active = list(self.rows)
        self.clock = Clock(target.device, meter)
        self.streams = Streams(config.seed, [request.number for request in requests], target.device)
        self.judge = Verifier(config, self.streams)
        self.tree, num_slots = None, config.num_speculative_tokens
        if config.tree is not None and isinstance(proposer, TreeProposer):
            self.tree = tree_from(config.tree, config.num_speculative_tokens)
            num_slots = self.tree.num_slots * proposer.num_trees
        longest = max(len(request.tokens) for request in requests)
        self.capacity = min(longest + config.max_new_tokens, target.max_positions) + num_slots + 1
        self.cache = new_cache(target.model, self.capacity, LAYERS[config.kv_cache])
        self.taps = () if proposer is None else proposer.taps

    def prefill(self) -> None:
        """Read the prompts and commit each row's first token, which becomes pending. The target reads equal prompts once."""
        lengths = self._lengths
        prompts = [tuple(row.tokens) for row in self.active]
        place_of = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        ids_BT = self._tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in place_of])
        states = self._read(ids_BT, [0] * len(place_of))
        if len(place_of) < len(prompts):
            places = [place_of[prompt] for prompt in prompts]
            self.cache.keep_rows(places)
            states = states.map(lambda state_BTE: state_BTE[places])
        last_B1D = states.final_BTE[torch.arange(len(lengths)), self._tensor(lengths) - 1].unsqueeze(1)
        logits_B1V = head_logits(self.target.model, last_B1D)
        logits_B1V = self._processed(logits_B1V, None)
        tokens_B1 = self.judge.target_tokens(logits_B1V, self._tensor(lengths).unsqueeze(1))
        finite_B = torch.isfinite(logits_B1V.amax((1, 2)))
        for row, token, finite in zip(self.active, tokens_B1.squeeze(1).tolist(), finite_B.tolist(), strict=True):
            row.commit([token] if finite else [], finite=finite)
        keep = self._drop_ended()
        if self.proposer is not None and self.active:
            states = states.map(lambda state_BTE: state_BTE[keep])
            self.proposer.start([row.tokens for row in self.active], self.capacity, states)

    def round(self) -> None:
        """Run one target step: draft, verify, commit."""
        room = [row.room for row in self.active]
        tree = None if self.tree is None else self.tree.cut(max(room))
        if isinstance(tree, GrownTree):
            tree = replace(tree, rooms=tuple(room))
        with self.clock.phase("draft"):
            proposal = self._propose(room, tree)
        starts = [length - 1 for length in self._lengths]
        branches = None if proposal.parents_BN is None else whole_tree(proposal.parents_BN, starts)
        with self.clock.phase("verify"):
            ids_BK = torch.cat([self._tensor([[row.tokens[-1]] for row in self.active]), proposal.tokens_BG], 1)
            states = self._read(ids_BK, starts, branches)
            logits_BKV = head_logits(self.target.model, states.final_BTE)
        with self.clock.phase("sample"):
            logits_BKV = self._processed(logits_BKV, proposal)
            outcomes = self._judge(logits_BKV, proposal, branches, tree, room)
        compared = self._compare(logits_BKV, proposal, outcomes) if self.measure_overlap else None
        if branches is not None:
            states = self._keep_paths(starts, outcomes, states)
        if self.proposer is not None and max(room) > 0:
            with self.clock.phase("draft"):
                self.proposer.commit([outcome.num_accepted for outcome in outcomes], states)
        for number, (row, outcome) in enumerate(zip(self.active, outcomes, strict=True)):
            _finish(row, outcome, compared[number] if compared is not None else None)
        self._drop_ended()

    def _processed(self, logits_BKV: Tensor, proposal: Proposal | None) -> Tensor:
        """Return the logits as the processor leaves them; rows that have ended leave the others' numbers as they were."""
        number_of = {id(row): number for number, row in enumerate(self.rows)}
        numbers = [number_of[id(row)] for row in self.active]
        tokens, ends = [row.tokens for row in self.active], self.target.eos_token_ids
        return processed(self.logits_processor, logits_BKV, tokens, proposal, numbers, ends)

    def _read(self, ids_BT: Tensor, starts: Sequence[int], branches: Branches | None = None) -> TargetStates:
        """Read the target, by way of the proposer where it is made of the target and may have begun to."""
        if isinstance(self.proposer, TargetReader):
            return self.proposer.forward_states(self.cache, ids_BT, starts, self.taps, branches)
        return forward_states(self.target.model, self.cache, ids_BT, starts, self.taps, branches)

    def _propose(self, room: Sequence[int], tree: Tree | GrownTree | None) -> Proposal:
        """Ask for as many drafts as the roomiest row can use; without a proposer or room, for none."""
        num_tokens = min(self.config.num_speculative_tokens, max(room))
        if self.proposer is None or num_tokens == 0:
            return Proposal(tokens_BG=self._tensor([[] for _ in room]).long(), num_drafted=[0] * len(room))
        tokens = [row.tokens for row in self.active]
        if tree is None:
            sampling = self.config if self.config.draws else self.config.model_copy(update={"temperature": 0.0})
            return self.proposer.propose(tokens, num_tokens, sampling, self.streams, keep_logits=self.measure_overlap)
        drawn_by = self.config if self.config.draws else None
        return cast(TreeProposer, self.proposer).propose_tree(tokens, tree, drawn_by, self.streams)

    def _judge(
        self,
        logits_BKV: Tensor,
        proposal: Proposal,
        branches: Branches | None,
        tree: Tree | GrownTree | None,
        room: Sequence[int],
    ) -> list[Outcome]:
        """Return what the round brings each row, in one transfer from the device."""
        finite_B = finite_rows(logits_BKV, proposal).long()
        if branches is None or tree is None or proposal.parents_BN is None:
            num_drafted = [min(*pair) for pair in zip(proposal.num_drafted, room, strict=True)]
            accepted_B, next_B = self.judge.chain(logits_BKV, proposal, num_drafted, self._lengths)
            table = torch.cat([torch.stack([accepted_B, next_B, finite_B], 1), proposal.tokens_BG], 1).tolist()
            return [chain_outcome(row, drafted) for row, drafted in zip(table, num_drafted, strict=True)]
        # Drafts that a row has no room for do not count, so that it is judged as it would be alone.
        too_deep_BN = branches.depths_BX[:, 1:] > self._tensor(room).unsqueeze(1)
        proposal = replace(proposal, parents_BN=proposal.parents_BN.masked_fill(too_deep_BN, -1))
        path_BD, accepted_B, next_B = self.judge.tree(logits_BKV, proposal, branches.depths_BX, self._lengths, tree)
        summary_B3 = torch.stack([accepted_B, next_B, finite_B], 1)
        table = torch.cat([summary_B3, path_BD, proposal.tokens_BG, cast(Tensor, proposal.parents_BN)], 1).tolist()
        return [tree_outcome(row, tree.depth) for row in table]

    def _compare(self, logits_BKV: Tensor, proposal: Proposal, outcomes: Sequence[Outcome]) -> list[list[list[float]]] | None:
        """Return the numbers of `LawComparison` by row and draft; None for a tree, and for drafts without a distribution."""
        if proposal.logits_BGV is None or not any(outcome.drafted for outcome in outcomes):
            return None
        with self.clock.phase("measure"):
            # Drafts behind the first rejected one were judged in no row.
            judged = min(proposal.tokens_BG.shape[1], 1 + max(outcome.num_accepted for outcome in outcomes))
            p_logits_BJV, q_logits_BJV = logits_BKV[:, :judged], proposal.logits_BGV[:, :judged]
            compared = compare_distributions(p_logits_BJV, q_logits_BJV, proposal.tokens_BG[:, :judged], self.config)
            return torch.stack(list(compared), -1).tolist()

    def _keep_paths(self, starts: Sequence[int], outcomes: Sequence[Outcome], states: TargetStates) -> TargetStates:
        """Move what the target computed along each row's path together, in the cache; return the states along it."""
        columns = [[0, *outcome.path] for outcome in outcomes]
        self.cache.keep_path(starts, columns)
        longest = max(map(len, columns))
        columns_BA = self._tensor([row + [0] * (longest - len(row)) for row in columns])
        rows_B1 = torch.arange(len(columns), device=columns_BA.device).unsqueeze(1)
        return states.map(lambda state_BTE: state_BTE[rows_B1, columns_BA])

    def _drop_ended(self) -> list[int]:
        """Let rows that ended leave the batch; return the numbers of those that stay."""
        keep = [number for number, row in enumerate(self.active) if row.stop_reason is None]
        if len(keep) == len(self.active):
            return keep
        self.active = [self.active[number] for number in keep]
        if not keep:
            return keep
        self.cache.keep_rows(keep)
        self.streams.keep_rows(keep)
        if self.proposer is not None and any(row.rounds for row in self.active):  # before the first round it has not started
            self.proposer.keep_rows(keep)
        return keep

    @property
    def _lengths(self) -> list[int]:
        return [len(row.tokens) for row in self.active]

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, device=self.target.device)


def _finish(row: Row, outcome: Outcome, compared: Sequence[Sequence[float]] | None) -> None:
    """Commit what a round brought a row, and note the round; `compared` has the numbers of `LawComparison` by draft."""
    accepted = outcome.num_accepted
    committed = row.commit([*outcome.drafted[:accepted], outcome.next_token], finite=outcome.finite)
    # A judged draft left one token, itself or the one in its place; what came after an end of text was not judged.
    judged = compared[: min(len(committed), len(outcome.drafted))] if compared is not None else None
    overlap, distributions = _distributions(judged) if judged is not None and outcome.drafted else (None, None)
    row.rounds.append(
        Round(
            drafted=tuple(outcome.drafted),
            num_accepted=min(accepted, len(committed)),
            committed=tuple(committed),
            overlap=overlap,
            distributions=distributions,
            ranks=outcome.ranks if outcome.ranks is None else tuple(outcome.ranks[: len(committed)]),
            num_nodes=outcome.num_nodes,
        )
    )


def _distributions(judged: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], DistributionComparison]:
    """Return the overlaps of the judged drafts of a round, and the rest of the comparison."""
    overlap, kl, uncovered, agrees, *rest = (tuple(column) for column in zip(*judged, strict=True)) if judged else [()] * 7
    return overlap, DistributionComparison(kl, uncovered, tuple(map(bool, agrees)), *rest)
