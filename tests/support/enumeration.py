"""Whether a verification rule is lossless, by exact enumeration of every way a round can go on a toy.

The toy is a target and a draft over a few tokens, with random conditional distributions. Every draft is enumerated with its
probability under q; the uniforms at which the rule's result changes are found by bisection, to float64 precision. The tokens
committed, continued with p where the round was short, must follow p. In a tree every node is tried as the end of the walk.
B cases, G drafts, K = G + 1 (levels of a tree: K), A assignments of tokens to N nodes, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.decoder.rules import ChainVerification, TreeVerification

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], ChainVerification]
Prefix = tuple[int, ...]

BISECTIONS = 60
ALMOST_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True)
class Toy:
    """Tabular distributions of the next token, V probabilities each, after every prefix of up to `num_drafts` tokens."""

    vocab_size: int
    num_drafts: int
    p: dict[Prefix, list[float]]
    q: dict[Prefix, list[float]]


@dataclass(frozen=True, kw_only=True)
class EnumerationResult:
    """The total variation of the output's distribution from p, and the mean number of committed tokens a round."""

    total_variation: float
    tokens_per_round: float


def random_toy(seed: int, vocab_size: int = 3, num_drafts: int = 3, *, looked_up: bool = False) -> Toy:
    """Return a toy with random distributions; some probabilities are 0, as after top-k or with a reduced vocabulary.

    With `looked_up` the draft names one token after each prefix, as a lookup does: q is a point mass.
    """
    generator = torch.Generator().manual_seed(seed)

    def distribution(zero_share: float) -> list[float]:
        weights_V = torch.rand(vocab_size, generator=generator, dtype=torch.float64) ** 2 + 1e-3
        if torch.rand((), generator=generator) < zero_share:
            weights_V[int(torch.randint(vocab_size, (), generator=generator))] = 0
        return (weights_V / weights_V.sum()).tolist()

    def point_mass() -> list[float]:
        named = int(torch.randint(vocab_size, (), generator=generator))
        return [float(token == named) for token in range(vocab_size)]

    prefixes = [prefix for size in range(num_drafts + 1) for prefix in itertools.product(range(vocab_size), repeat=size)]
    return Toy(
        vocab_size,
        num_drafts,
        {prefix: distribution(0.3) for prefix in prefixes},
        {prefix: point_mass() if looked_up else distribution(0.3) for prefix in prefixes},
    )


def enumerate_rule(rule: Rule, toy: Toy) -> EnumerationResult:
    """Enumerate a rule on a toy.

    The rule's decisions must be monotone in each uniform, as any test `uniform < threshold` is; acceptance of draft i may
    depend on the acceptance uniforms up to and beyond i.
    """
    drafts = itertools.product(range(toy.vocab_size), repeat=toy.num_drafts)
    # One case for each draft and each pattern of passed and failed tests.
    cases = list(itertools.product(drafts, itertools.product((True, False), repeat=toy.num_drafts)))
    batch = _Cases(rule, toy, [draft for draft, _ in cases])
    wins_BG = torch.tensor([wins for _, wins in cases])
    accept_BG = torch.where(wins_BG, 0.0, ALMOST_ONE).double()
    thresholds_BG = batch.acceptance_thresholds()
    weights = torch.where(wins_BG, thresholds_BG, 1 - thresholds_BG).prod(1).tolist()
    accepted, next_distribution = batch.next_token_distribution(accept_BG)
    weighted = zip(cases, weights, accepted, next_distribution, strict=True)
    return compare(toy, ((weight * joint(toy.q, draft), draft[:kept], next_V) for (draft, _), weight, kept, next_V in weighted))


def compare(toy: Toy, outcomes: Iterable[tuple[float, Prefix, list[float]]]) -> EnumerationResult:
    """Return the result of enumerated outcomes: each one's probability, accepted drafts, and next token's distribution.

    The committed tokens are continued with p to full length.
    """
    distribution: dict[Prefix, float] = dict.fromkeys(itertools.product(range(toy.vocab_size), repeat=toy.num_drafts + 1), 0.0)
    tokens = 0.0
    for weight, accepted, next_V in outcomes:
        if not weight:
            continue
        tokens += weight * (len(accepted) + 1)
        for token, share in enumerate(next_V):
            committed = (*accepted, token)
            for rest in itertools.product(range(toy.vocab_size), repeat=toy.num_drafts - len(accepted)):
                distribution[committed + rest] += weight * share * joint(toy.p, rest, after=committed)
    distance = sum(abs(probability - joint(toy.p, sequence)) for sequence, probability in distribution.items()) / 2
    return EnumerationResult(total_variation=distance, tokens_per_round=tokens)


class _Cases:
    """Drafts of a toy as one batch for the rule."""

    def __init__(self, rule: Rule, toy: Toy, drafts: list[Prefix]) -> None:
        self.rule, self.toy = rule, toy
        self.tokens_BG = torch.tensor(drafts)
        p = [[toy.p[draft[:i]] for i in range(toy.num_drafts + 1)] for draft in drafts]
        q = [[toy.q[draft[:i]] for i in range(toy.num_drafts)] for draft in drafts]
        self.p_BKV = torch.tensor(p, dtype=torch.float64)
        self.q_BGV = torch.tensor(q, dtype=torch.float64)
        self.num_drafted_B = torch.full((len(drafts),), toy.num_drafts)

    def verify(self, accept_BG: Tensor, next_B: Tensor) -> ChainVerification:
        return self.rule(self.p_BKV, self.q_BGV, self.tokens_BG, self.num_drafted_B, accept_BG, next_B, next_B)

    def acceptance_thresholds(self) -> Tensor:
        """Return, by case and draft, the uniform below which it passes its test, earlier ones passed and later ones failed."""
        half_B = torch.full((len(self.tokens_BG),), 0.5, dtype=torch.float64)
        columns = []
        for position in range(self.toy.num_drafts):

            def wins(uniform_B: Tensor, position: int = position) -> Tensor:
                accept_BG = torch.full(self.tokens_BG.shape, ALMOST_ONE, dtype=torch.float64)
                accept_BG[:, :position] = 0.0
                accept_BG[:, position] = uniform_B
                return self.verify(accept_BG, half_B).num_accepted_B > position

            columns.append(bisect(wins, len(self.tokens_BG)))
        return torch.stack(columns, 1)

    def next_token_distribution(self, accept_BG: Tensor) -> tuple[list[int], list[list[float]]]:
        """Return, by case, the number accepted and the distribution of the next token, given the outcome of every test."""
        num_accepted_B = self.verify(accept_BG, torch.full((len(accept_BG),), 0.5, dtype=torch.float64)).num_accepted_B
        bounds = [torch.zeros(len(accept_BG), dtype=torch.float64)]
        for token in range(self.toy.vocab_size):

            def at_most(uniform_B: Tensor, token: int = token) -> Tensor:
                return self.verify(accept_BG, uniform_B).next_token_B <= token

            bounds.append(bisect(at_most, len(accept_BG)))
        return num_accepted_B.tolist(), torch.stack(bounds, 1).diff(dim=1).tolist()


def bisect(holds: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Return, for each case, the least upper bound of the uniforms at which a condition that only ever turns false holds."""
    zero_B = torch.zeros(size, dtype=torch.float64)
    low_B, high_B = zero_B.clone(), zero_B + 1.0
    for _ in range(BISECTIONS):
        middle_B = (low_B + high_B) / 2
        true_B = holds(middle_B.clamp(max=ALMOST_ONE))
        low_B, high_B = torch.where(true_B, middle_B, low_B), torch.where(true_B, high_B, middle_B)
    never_B, always_B = ~holds(zero_B), holds(zero_B + ALMOST_ONE)
    return torch.where(never_B, zero_B, torch.where(always_B, zero_B + 1.0, low_B))


def joint(distributions: dict[Prefix, list[float]], sequence: Prefix, after: Prefix = ()) -> float:
    """Return the probability of a sequence after a prefix."""
    probability = 1.0
    for index, token in enumerate(sequence):
        probability *= distributions[after + sequence[:index]][token]
    return probability


# --- trees ---------------------------------------------------------------------------------------------------------


def rows_of(p_BNV: Tensor) -> Callable[[Tensor], Tensor]:
    """Look the distribution after a node up in a tensor of all of them."""
    return lambda node_B: p_BNV[torch.arange(len(p_BNV)), node_B]


def tokens_of(target_tokens_BN: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Look the target's own token after a node up in a tensor of all of them."""
    return lambda node_B, _: target_tokens_BN[torch.arange(len(target_tokens_BN)), node_B]


# `eval.decoder.rules.verify_tree` with its rule chosen, or a planted bug.
TreeVerifier = Callable[..., TreeVerification]
SiblingDistribution = Callable[[Sequence[float], Prefix], float]


def independent(q_V: Sequence[float], siblings: Prefix) -> float:
    """Return the probability of drawing siblings with replacement."""
    probability = 1.0
    for token in siblings:
        probability *= q_V[token]
    return probability


def distinct(q_V: Sequence[float], siblings: Prefix) -> float:
    """Return the probability of drawing siblings without replacement; once q has run out, token 0 is drawn."""
    left = list(q_V)
    probability = 1.0
    for token in siblings:
        mass = sum(left)
        probability *= left[token] / mass if mass > 0 else float(token == 0)
        left[token] = 0.0
    return probability


SIBLINGS: dict[str, SiblingDistribution] = {
    "with_replacement": independent,
    "without_replacement": distinct,
    "k_seq": independent,
}  # how siblings are drawn, by the rule that judges them


def enumerate_tree(
    verify: TreeVerifier, toy: Toy, parents: Sequence[int], sibling_distribution: SiblingDistribution
) -> EnumerationResult:
    """Enumerate the verification of a tree (the nodes' parents, the root's -1) on a toy of as many drafts as it is deep.

    Decisions must be monotone in each uniform.
    """
    tree = _Tree(verify, toy, parents)
    drawn = [tree.draw_probability(assignment, sibling_distribution) for assignment in tree.assignments]
    walks = (zip(drawn, *walk, strict=True) for walk in tree.walks())
    outcomes = itertools.chain.from_iterable(walks)
    return compare(toy, ((chance * probability, committed, next_V) for probability, chance, committed, next_V in outcomes))


class _Tree:
    """All assignments of tokens to the nodes of a tree, as one batch for the verification, repeated for each walk tried."""

    def __init__(self, verify: TreeVerifier, toy: Toy, parents: Sequence[int]) -> None:
        self.verify, self.toy, self.parents = verify, toy, parents
        self.children = [[node for node, above in enumerate(parents) if above == parent] for parent in range(len(parents))]
        self.assignments = [(0, *rest) for rest in itertools.product(range(toy.vocab_size), repeat=len(parents) - 1)]
        prefixes = [[self._prefix(tokens, node) for node in range(len(parents))] for tokens in self.assignments]
        self.p_ANV = torch.tensor([[toy.p[prefix] for prefix in row] for row in prefixes], dtype=torch.float64)
        # Nothing is drawn after the deepest nodes; the first distribution is put there and must not be read.
        self.q_ANV = torch.tensor([[toy.q.get(prefix, toy.q[()]) for prefix in row] for row in prefixes], dtype=torch.float64)
        self.tokens_AN = torch.tensor(self.assignments)

    def draw_probability(self, assignment: Prefix, sibling_distribution: SiblingDistribution) -> float:
        """Return the probability that the draft puts these tokens at the nodes."""
        probability = 1.0
        for node, children in enumerate(self.children):
            if children:
                siblings = tuple(assignment[child] for child in children)
                probability *= sibling_distribution(self.toy.q[self._prefix(assignment, node)], siblings)
        return probability

    def walks(self) -> Iterator[tuple[list[float], list[Prefix], list[list[float]]]]:
        """Yield for every node, by assignment: the chance that the walk ends there, what is committed, the next token's
        distribution."""
        thresholds_AN = self._thresholds()
        probs_NAV = self._next_distributions()
        for end, probs_AV in enumerate(probs_NAV):
            won = self._path(end)
            lost = [*self.children[end], *(older for node in won for older in self._older(node))]
            chances_A = thresholds_AN[:, won].prod(1) * (1 - thresholds_AN[:, lost]).prod(1)
            paths = self._verify(self._accept([end]), torch.full_like(chances_A, 0.5)).path_BD.tolist()
            pairs = zip(self.assignments, paths, strict=True)
            yield chances_A.tolist(), [tuple(tokens[n] for n in path if n >= 0) for tokens, path in pairs], probs_AV.tolist()

    def _thresholds(self) -> Tensor:
        """Return, by assignment and node, the uniform below which the node stays once the walk has come to it `[A, N]`.

        That is when the walk is at the parent, and the older siblings have failed.
        """
        nodes = range(1, len(self.parents))
        accept_BN = self._accept([self.parents[node] for node in nodes])
        node_B1 = torch.tensor(nodes).repeat_interleave(len(self.assignments)).unsqueeze(1)

        def stays(uniform_B: Tensor) -> Tensor:
            found = self._verify(accept_BN.scatter(1, node_B1, uniform_B.unsqueeze(1)), torch.full_like(uniform_B, 0.5))
            return (found.path_BD == node_B1).any(1)

        thresholds_NA = bisect(stays, len(accept_BN)).reshape(len(nodes), -1)
        return torch.nn.functional.pad(thresholds_NA.T, (1, 0), value=1.0)

    def _next_distributions(self) -> Tensor:
        """Return, by node and assignment, the distribution of the token that comes after a walk to the node `[N, A, V]`."""
        ends = list(range(len(self.parents)))
        accept_BN = self._accept(ends * self.toy.vocab_size)
        token_B = torch.arange(self.toy.vocab_size).repeat_interleave(len(ends) * len(self.assignments))
        bounds_B = bisect(lambda uniform_B: self._verify(accept_BN, uniform_B).next_token_B <= token_B, len(token_B))
        bounds_VNA = bounds_B.reshape(self.toy.vocab_size, len(ends), -1)
        return bounds_VNA.diff(dim=0, prepend=torch.zeros_like(bounds_VNA[:1])).permute(1, 2, 0)

    def _accept(self, ends: Sequence[int]) -> Tensor:
        """Return uniforms for walks to these nodes, of every assignment for the first node, then for the second, ..."""
        accept_EN = torch.full((len(ends), len(self.parents)), ALMOST_ONE, dtype=torch.float64)
        for number, end in enumerate(ends):
            accept_EN[number, self._path(end)] = 0.0
        return accept_EN.repeat_interleave(len(self.assignments), 0)

    def _verify(self, accept_BN: Tensor, next_B: Tensor) -> TreeVerification:
        """Verify all assignments, in order, as often as they go into the batch."""
        times = len(accept_BN) // len(self.assignments)
        p_BNV, q_BNV, tokens_BN = (
            values.repeat(times, *[1] * (values.dim() - 1)) for values in (self.p_ANV, self.q_ANV, self.tokens_AN)
        )
        next_BK = next_B.unsqueeze(1).expand(-1, self.toy.num_drafts + 1)
        width = max(map(len, self.children))
        return self.verify(rows_of(p_BNV), q_BNV, tokens_BN, torch.tensor(self.parents), accept_BN, next_BK, width=width)

    def _older(self, node: int) -> list[int]:
        return [sibling for sibling in self.children[self.parents[node]] if sibling < node]

    def _path(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to a node; none for the root."""
        return [] if self.parents[node] < 0 else [*self._path(self.parents[node]), node]

    def _prefix(self, tokens: Prefix, node: int) -> Prefix:
        return tuple(tokens[above] for above in self._path(node))
