"""What proposes tokens to the decoder: the protocol, builders of chains and trees, and the drafts that are no trained head.

Enter at `Proposer`, which every draft implements; its `propose` returns a `Proposal`.
"""
