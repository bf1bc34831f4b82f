"""Drafts that are right where a test wants them: any proposer, with tokens of the plain answer put over some of its own."""

from dataclasses import replace

import torch


def corrected(proposer, texts, depths):
    """Make a proposer draft the plain answers (`texts`, with their prompts) down to some depth; return it.

    Of `depths` a round takes the entry that the row's length points at.
    """

    def put_right(text, row, parents):
        """Put the answer's tokens on one way down the tree, which depends on the text's length."""
        whole = next(each for each in texts if list(each[: len(text)]) == text)  # a committed token is never wrong
        node = 0
        for token in whole[len(text) : len(text) + depths[len(text) % len(depths)]]:
            children = [child for child, parent in enumerate(parents, start=1) if parent == node]
            if not children:
                return
            node = children[-1 - len(text) % len(children)]
            row[node - 1] = token

    def wrapped(propose):
        def proposing(inputs, *others, **named):
            proposal = propose(inputs, *others, **named)
            rows = proposal.tokens_BG.tolist()
            parents = [range(len(row)) for row in rows] if proposal.parents_BN is None else proposal.parents_BN.tolist()
            for text, row, before in zip(inputs.tokens, rows, parents, strict=True):
                put_right(list(text), row, before)
            return replace(proposal, tokens_BG=torch.tensor(rows, dtype=torch.int64).view_as(proposal.tokens_BG))

        return proposing

    for name in ("propose", "propose_tree"):
        if hasattr(proposer, name):
            setattr(proposer, name, wrapped(getattr(proposer, name)))
    return proposer
