"""Proposals from a family's logits: chains, drafted token by token, and trees, drafted depth by depth.

Every family drafts through these, so that verification gets the very distribution that was drawn from, and draws use
`Role.DRAFT` in the round named by the row's length. A family that drafts one token after another stops when all rows are
`finished`; one that has all distributions from a single forward adds them all. Of a tree it passes the logits after each token
of the frontier (at first the pending token alone) and gets the next frontier: the tokens it has to read to continue.

A row of a chain ends with the first token whose distribution is less confident than the stopping rule's threshold: the step
that made it is paid for, and the token costs only a row. The rule sees each distribution before a token is drawn from it, or
the draft's own estimate of its acceptance, and never the token, which would bias the output: let p = q put 1/2 on each of a and
b, and drop b when it is drawn; then a comes out with probability 3/4. Given that the drafts before position i were kept, both
"draw from q_i, test, take the residual" and "draft nothing, take the target's own token" put p_i there.
`tests/eval/decoder/test_rules.py` enumerates this. Rows decide for themselves: a request gets the same tokens in any batch.
B batch, G drafts, M tokens of a frontier, C children of one token at most, P candidates or drafts of one depth, N drafts of a
tree, K = N + 1 rows of the target's, W draft vocabulary, V target vocabulary, X slots of a draft's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from configs.schema.decoding import ConfidenceStopping, DecodeConfig, SamplingConfig
from heads.device import RowInts, constant
from heads.proposers.protocol import Proposal, RoundInputs
from heads.sampling.draws import DRAWS, Role, draw, greedy_token, penalised, token_probabilities
from heads.sampling.token_tree import DynamicTreeSpec, Tree, TreeAttention, distinct_positions
from heads.vocabulary import DraftVocabulary, over_target, target_ids


class ChainBuilder:
    """A proposal of chains, one draft a row for each call of `add`.

    `sampling` is the distribution to draft by, and in a decoder's settings when to stop; `vocabulary` the tokens of logits,
    None: the target's.
    """

    def __init__(
        self,
        inputs: RoundInputs,
        sampling: SamplingConfig,
        vocabulary: DraftVocabulary | None,
        *,
        keep_logits: bool,
    ) -> None:
        self.sampling, self.keep_logits, self.vocabulary = sampling, keep_logits, vocabulary
        self.uniforms, self.device = inputs.uniforms, inputs.rng.device
        self._stopping = sampling.stopping if isinstance(sampling, DecodeConfig) else None
        at_1 = self._stopping is not None and sampling.temperature == 0  # the rule sees greedy drafts' distributions at 1
        self._shown = sampling.model_copy(update={"temperature": 1.0}) if at_1 else sampling
        self._counts = inputs.counts
        if self._counts is not None and vocabulary is not None:
            self._counts = self._counts.among(vocabulary.token_ids_W)
        num_rows = len(inputs.tokens)
        self._open_B = torch.ones(num_rows, dtype=torch.bool, device=self.device)  # rows that still draft
        self._num_drafted_B = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self._drafted: list[Tensor] = []
        self._distributions: list[Tensor] = []
        self._logits: list[Tensor] = []

    def add(self, logits_BW: Tensor, estimate_B: Tensor | None = None) -> Tensor:
        """Choose the next draft of every row from its logits; return the target's ids `[B]`.

        Rows that have stopped get one too, which does not count. `estimate_B` is the draft's own estimate that the token is
        accepted where those before it are, made before it was drawn, if it makes one.
        """
        step, greedy = len(self._drafted), self.sampling.temperature == 0
        logits_BW = penalised(logits_BW, self._counts)
        if self._stopping is not None or not greedy:
            probs_BW = token_probabilities(logits_BW, self._shown)
        if self._stopping is not None:
            self._num_drafted_B += self._open_B
            self._open_B &= ~self._is_unsure(self._stopping, probs_BW, estimate_B)
        chosen_B = greedy_token(logits_BW) if greedy else self._drawn(step, probs_BW)
        self._counts = None if self._counts is None else self._counts.then(chosen_B)
        drafted_B = target_ids(self.vocabulary, chosen_B)
        if not greedy:
            self._distributions.append(over_target(self.vocabulary, probs_BW, 0.0))
        self._drafted.append(drafted_B)
        if self.keep_logits:
            self._logits.append(over_target(self.vocabulary, logits_BW, float("-inf")))
        return drafted_B

    def peek(self, logits_BGW: Tensor) -> Tensor:
        """Return the target's ids `[B, G]` that `add` would choose from these logits for the first G drafts; adds none."""
        if self._counts is not None:  # a draft depends on those before it
            ahead = copy(self)
            ahead._stopping, ahead._drafted, ahead._distributions, ahead._logits = None, [], [], []
            return torch.stack([ahead.add(logits_BW) for logits_BW in logits_BGW.unbind(1)], 1)
        if self.sampling.temperature == 0:
            return target_ids(self.vocabulary, greedy_token(logits_BGW))
        probs_BGW = token_probabilities(logits_BGW, self.sampling)
        drawn = [self._drawn(step, probs_BW) for step, probs_BW in enumerate(probs_BGW.unbind(1))]
        return target_ids(self.vocabulary, torch.stack(drawn, 1))

    @property
    def finished(self) -> bool:
        """Whether every row has stopped. With a stopping rule this waits for the device."""
        return self._stopping is not None and not bool(self._open_B.any())

    def proposal(self) -> Proposal:
        """Return the drafts: a token a row for each call of `add`, fewer where the row stopped."""
        num_drafted = RowInts.full(len(self._drafted), len(self._open_B), self.device)
        if self._stopping is not None:
            num_drafted = RowInts(self._num_drafted_B.tolist(), self._num_drafted_B)
        width = max(num_drafted.host)  # the target computes every column, drafted or not
        probs, logits = (torch.stack(each[:width], 1) if each else None for each in (self._distributions, self._logits))
        return Proposal(
            tokens_BG=torch.stack(self._drafted, 1)[:, :width],
            num_drafted=num_drafted,
            probs_BGV=probs,
            logits_BGV=logits,
        )

    def _is_unsure(self, stopping: ConfidenceStopping, probs_BW: Tensor, estimate_B: Tensor | None) -> Tensor:
        """Return which rows end with the token of this distribution; not those of NaN, which the decoder has to see."""
        sure_B = probs_BW.amax(-1) if stopping.by == "distribution" else estimate_B
        if sure_B is None:
            raise InputError(
                "decode.stopping.by is estimate, and this draft makes no estimate of its acceptance (dspark does): set it to "
                "distribution"
            )
        return sure_B < stopping.threshold

    def _drawn(self, step: int, probs_BW: Tensor) -> Tensor:
        assert self.uniforms is not None, "a round that draws has random numbers"
        return draw(probs_BW, self.uniforms.draft_BG[:, step])


# --- trees --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The tokens of one depth that are continued: the target's ids, and which token of the frontier before each continues."""

    tokens_BM: Tensor
    origins_BM: Tensor

    def of_origins(self, states_BMD: Tensor) -> Tensor:
        """Return, for each token, what belongs to the one before it, `[B, M, D]`."""
        return states_BMD.gather(1, self.origins_BM.unsqueeze(-1).expand(-1, -1, states_BMD.shape[-1]))


def tree_builder(
    tree: Tree | DynamicTreeSpec,
    inputs: RoundInputs,
    drawn_by: SamplingConfig | None,
    vocabulary: DraftVocabulary | None,
) -> StaticTreeBuilder | DynamicTreeBuilder:
    """Return the builder for a tree; a dynamic one is not drawn, as it leaves out tokens for their low probability."""
    if isinstance(tree, DynamicTreeSpec):
        return DynamicTreeBuilder(tree, vocabulary)
    return StaticTreeBuilder(tree, inputs, drawn_by, vocabulary)


class StaticTreeBuilder:
    """A static tree of the most probable tokens, the child of rank r being the draft's r-th choice.

    With `drawn_by` the children of a token are drawn by that distribution, as `tree.candidates` says. `vocabulary` are the
    tokens of logits, None: the target's.
    """

    def __init__(
        self,
        tree: Tree,
        inputs: RoundInputs,
        drawn_by: SamplingConfig | None,
        vocabulary: DraftVocabulary | None,
    ) -> None:
        self.tree = tree
        self.inputs = inputs
        self.drawn_by = drawn_by
        self.vocabulary = vocabulary
        self._levels = _levels(tree)
        self._drafted: list[Tensor] = []
        self._distributions: list[Tensor] = []  # by depth, where drafts are drawn

    def add(self, logits_BMW: Tensor) -> Frontier | None:
        """Take the logits after each token of the frontier; return the next one, None when the tree is done.

        M may be 1 for a family whose logits do not depend on the tokens drafted.
        """
        level = self._levels[len(self._drafted)]
        if level.num_children > logits_BMW.shape[-1]:
            raise InputError(
                f"tree: a token has {level.num_children} children, and the draft knows {logits_BMW.shape[-1]} tokens; make the "
                "tree narrower"
            )
        if self.drawn_by is not None:
            chosen_BMC = self._drawn(token_probabilities(logits_BMW, self.drawn_by), level)
        elif level.num_children == 1:  # as a chain does, also where logits tie
            chosen_BMC = greedy_token(logits_BMW).unsqueeze(-1)
        else:
            chosen_BMC = logits_BMW.topk(level.num_children, dim=-1).indices
        candidates_BMC = target_ids(self.vocabulary, chosen_BMC).expand(-1, level.num_parents, -1)
        tokens_BP = candidates_BMC[:, _constant(level.origins, logits_BMW), _constant(level.ranks, logits_BMW)]
        self._drafted.append(tokens_BP)
        if not level.continued:
            return None
        continued_M = _constant(level.continued, logits_BMW)
        origins_M = _constant([level.origins[place] for place in level.continued], logits_BMW)
        return Frontier(tokens_BM=tokens_BP[:, continued_M], origins_BM=origins_M.expand(len(tokens_BP), -1))

    def proposal(self) -> Proposal:
        tokens_BN, probs_BKV = torch.cat(self._drafted, 1), None
        if self._distributions:  # after each row of the target's that has children, zeros after the others
            probs_BRV = torch.cat(self._distributions, 1)
            probs_BKV = probs_BRV.new_zeros(len(tokens_BN), self.tree.num_nodes + 1, probs_BRV.shape[-1])
            probs_BKV[:, _constant(sorted(set(self.tree.parents)), probs_BRV)] = probs_BRV
        return Proposal(
            tokens_BG=tokens_BN,
            num_drafted=RowInts.full(self.tree.num_nodes, len(tokens_BN), tokens_BN.device),
            parents_BN=_constant(self.tree.parents, tokens_BN).expand_as(tokens_BN),
            probs_BKV=probs_BKV,
        )

    def _drawn(self, probs_BMW: Tensor, level: _Level) -> Tensor:
        """Return draws `[B, M, C]`, in the draft's ids."""
        depth, (M, C) = len(self._drafted), (level.num_parents, level.num_children)
        probs_BMW = probs_BMW.expand(-1, M, -1)
        self._distributions.append(over_target(self.vocabulary, probs_BMW, 0.0))
        first_B1 = self.inputs.lengths.tensor_B.unsqueeze(1)
        positions_BP = distinct_positions((first_B1 + depth).expand(-1, M * C))
        uniform_BP = self.inputs.rng.uniform(Role.DRAFT, positions_BP, first_B1)
        drawn = DRAWS[self.tree.candidates](probs_BMW.flatten(0, 1), uniform_BP.reshape(-1, C))
        return drawn.unflatten(0, (-1, M))


class DynamicTreeBuilder:
    """A dynamic tree, expanded where the draft is confident (EAGLE-2; Li et al. 2024, arXiv 2406.16858).

    A token's confidence is the product of the draft's probabilities down to it. At each depth the most confident tokens are
    continued by their most probable successors; of all candidates the most confident make the tree. No child is more
    confident than its parent, so they are connected.
    """

    def __init__(self, tree: DynamicTreeSpec, vocabulary: DraftVocabulary | None) -> None:
        self.tree, self.vocabulary = tree, vocabulary
        self._tokens: list[Tensor] = []  # by depth, [B, P]
        self._scores: list[Tensor] = []  # log-confidences
        self._parents: list[Tensor] = []  # rows, where every candidate has one
        self._frontier: tuple[Tensor, Tensor] | None = None  # its log-confidences and rows, [B, M]

    def add(self, logits_BMW: Tensor) -> Frontier | None:
        """See `StaticTreeBuilder.add`."""
        children = min(self.tree.width, logits_BMW.shape[-1])
        logs_BMC, chosen_BMC = logits_BMW.float().log_softmax(-1).topk(children, dim=-1)
        if self._frontier is None:  # the pending token
            rows_B1 = torch.zeros(len(logits_BMW), 1, dtype=torch.int64, device=logits_BMW.device)
            self._frontier = rows_B1.float(), rows_B1
        before_BM, rows_BM = self._frontier
        M, first_row = before_BM.shape[1], 1 + sum(tokens.shape[1] for tokens in self._tokens)
        scores_BMC = before_BM.unsqueeze(-1) + logs_BMC.expand(-1, M, -1)
        # NaN is put last, with its descendants, or they would be kept without their parents.
        scores_BP = scores_BMC.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).flatten(1)
        tokens_BP = target_ids(self.vocabulary, chosen_BMC).expand(-1, M, -1).flatten(1)
        self._tokens.append(tokens_BP)
        self._scores.append(scores_BP)
        self._parents.append(rows_BM.repeat_interleave(children, 1))
        if len(self._tokens) == self.tree.depth:
            return None
        best_BM = scores_BP.topk(min(self.tree.width, scores_BP.shape[1]), dim=-1).indices
        self._frontier = scores_BP.gather(1, best_BM), first_row + best_BM
        return Frontier(tokens_BM=tokens_BP.gather(1, best_BM), origins_BM=best_BM // children)

    def proposal(self) -> Proposal:
        tokens_BP, scores_BP, parents_BP = (torch.cat(parts, 1) for parts in (self._tokens, self._scores, self._parents))
        num_nodes = min(self.tree.num_nodes, scores_BP.shape[1])
        if self.tree.max_depths is not None:  # candidates beyond a row's limit must not displace others
            depths_P = torch.cat([torch.full_like(each[0], depth) for depth, each in enumerate(self._tokens, start=1)])
            limits_B1 = self.tree.max_depths.tensor_B.to(depths_P.device).unsqueeze(1)
            scores_BP = scores_BP.masked_fill(depths_P > limits_B1, -torch.inf)
        # A stable order keeps parents before children of the same confidence; sorted, they stand depth by depth again.
        kept_BN = scores_BP.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes].sort(1).values
        new_rows_BP = torch.zeros_like(parents_BP[:, :1]).repeat(1, scores_BP.shape[1] + 1)
        numbers_BN = torch.arange(1, num_nodes + 1, device=kept_BN.device).expand_as(kept_BN)
        new_rows_BP = new_rows_BP.scatter(1, kept_BN + 1, numbers_BN)
        return Proposal(
            tokens_BG=tokens_BP.gather(1, kept_BN),
            num_drafted=RowInts.full(num_nodes, len(kept_BN), kept_BN.device),
            parents_BN=new_rows_BP.gather(1, parents_BP.gather(1, kept_BN)),
        )


class TreeSlots:
    """The slots of a tree's tokens in a draft's own cache: frontier after frontier, each token seeing its ancestors.

    `roots` are, by row, the slot and position of the first frontier that is read.
    """

    def __init__(self, roots: RowInts) -> None:
        self.roots, device = roots, roots.tensor_B.device
        self._depths_X = torch.zeros(0, dtype=torch.int64, device=device)  # by slot
        self._num_frontiers = 0
        self._visible_BMX = torch.zeros(len(self.roots), 1, 0, dtype=torch.bool, device=device)

    def place(self, frontier: Frontier) -> TreeAttention:
        """Return the attention of the next frontier to be read."""
        M = frontier.tokens_BM.shape[1]
        own_MM = torch.eye(M, dtype=torch.bool, device=frontier.tokens_BM.device)
        above_BMX = frontier.of_origins(self._visible_BMX)
        self._depths_X = torch.cat([self._depths_X, self._depths_X.new_full((M,), self._num_frontiers)])
        self._num_frontiers += 1
        self._visible_BMX = torch.cat([above_BMX, own_MM.expand(len(self.roots), M, M)], -1)
        depths_BX = self._depths_X.expand(len(self.roots), -1)
        return TreeAttention(roots=self.roots, depths_BX=depths_BX, visible_BTX=self._visible_BMX)


@dataclass(frozen=True, kw_only=True)
class _Level:
    """The drafts of one depth: which token of the frontier each continues, at which rank, and which of them go on."""

    num_parents: int
    num_children: int  # of the token that has most
    origins: list[int]
    ranks: list[int]
    continued: list[int]


@lru_cache(maxsize=64)  # every round has the same few trees
def _levels(tree: Tree) -> list[_Level]:
    levels = []
    for depth in range(1, tree.depth + 1):
        rows = [row for row, each in enumerate(tree.depths) if each == depth]
        parents = [tree.parents[row - 1] for row in rows]
        frontier = sorted(set(parents))
        ranks = [parents[:place].count(parent) for place, parent in enumerate(parents)]
        levels.append(
            _Level(
                num_parents=len(frontier),
                num_children=max(ranks) + 1,
                origins=[frontier.index(parent) for parent in parents],
                ranks=ranks,
                continued=[place for place, row in enumerate(rows) if row in tree.parents],
            )
        )
    return levels


def _constant(values: Sequence[int], like: Tensor) -> Tensor:
    return constant(tuple(values), torch.int64, like.device)
