"""What the decoder asks of anything that proposes tokens, and the drafts that need no head.

Start with `protocol.Proposer`; `chain_builder` and `tree_builder` turn logits into a proposal.
"""
