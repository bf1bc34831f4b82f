"""Drafts that are right where a test wants them: any proposer, with tokens of the plain answer put over some of its own."""

from dataclasses import replace

import torch


class Corrected:
    """A proposer whose drafts are made those of the prompts' plain answers (`texts`) up to some depth.

    Of `depths` a round takes the entry that the row's length points at.
    """

    def __init__(self, inner, texts, depths):
        self.inner, self.texts, self.depths = inner, [list(text) for text in texts], depths
        self.taps = inner.taps

    def start(self, tokens, capacity, states):
        self.inner.start(tokens, capacity, states)

    def propose(self, inputs, num_tokens, sampling, *, keep_logits):
        return self._correct(inputs.tokens, self.inner.propose(inputs, num_tokens, sampling, keep_logits=keep_logits))

    def commit(self, num_accepted, states):
        self.inner.commit(num_accepted, states)

    def keep_rows(self, rows):
        self.inner.keep_rows(rows)

    def _correct(self, tokens, proposal):
        rows = proposal.tokens_BG.tolist()
        parents = [list(range(len(row))) for row in rows] if proposal.parents_BN is None else proposal.parents_BN.tolist()
        for text, row, before in zip(tokens, rows, parents, strict=True):
            self._put_right(list(text), row, before)
        return replace(proposal, tokens_BG=torch.tensor(rows, dtype=torch.int64).view_as(proposal.tokens_BG))

    def _put_right(self, text, row, parents):
        """Put the answer's tokens on one way down the tree, which depends on the round's length, to the depth of this round."""
        whole = next(each for each in self.texts if each[: len(text)] == text)  # a committed token is never wrong
        node = 0
        for token in whole[len(text) : len(text) + self.depths[len(text) % len(self.depths)]]:
            children = [child for child, parent in enumerate(parents, start=1) if parent == node]
            if not children:
                return
            node = children[-1 - len(text) % len(children)]
            row[node - 1] = token


class CorrectedTrees(Corrected):
    """The same of a proposer that also drafts trees."""

    @property
    def num_trees(self):
        return self.inner.num_trees

    def propose_tree(self, inputs, tree, drawn_by):
        return self._correct(inputs.tokens, self.inner.propose_tree(inputs, tree, drawn_by))
