"""Settings of small heads, one a family, for targets of three blocks; what drafts from something else than it should, and heads
written as artifacts."""

import dataclasses

import torch

from heads.artifact import save_head
from heads.frozen.identity import TargetIdentity
from heads.metadata import head_metadata
from heads.proposers.protocol import TargetReader

HEADS = {
    "medusa": {"kind": "medusa", "num_depths": 3},
    "hydra": {"kind": "hydra", "num_depths": 3},
    "eagle3": {"kind": "eagle3", "taps": [1, 2, 3], "num_depths": 3},
    "mtp": {"kind": "mtp", "num_depths": 3},
    "peagle": {"kind": "peagle", "taps": [1, 2, 3], "num_depths": 3, "num_layers": 1, "mask_token_id": 0},
    "dflash": {"kind": "dflash", "taps": [1, 2, 3], "block_size": 4, "mask_token_id": 0},
    "early_exit": {"kind": "early_exit", "taps": [1], "num_depths": 3},
}


class Misled:
    """A proposer that is handed other tokens, or other states, than it should be, as two functions make them wrong."""

    def __init__(self, proposer, tokens=lambda row: row, states=lambda states: states):
        self.proposer, self.taps = proposer, proposer.taps
        self.tokens, self.states = tokens, states
        self.keep_rows = proposer.keep_rows
        if isinstance(proposer, TargetReader):
            self.forward_states = proposer.forward_states

    def start(self, tokens, capacity, states):
        self.proposer.start(tokens, capacity, self.states(states))

    def propose(self, inputs, *args, **settings):
        tokens = [self.tokens(row) for row in inputs.tokens]
        pending_B1 = torch.tensor([row[-1:] for row in tokens], device=inputs.pending_B1.device)
        inputs = dataclasses.replace(inputs, tokens=tokens, pending_B1=pending_B1)
        return self.proposer.propose(inputs, *args, **settings)

    def commit(self, num_accepted, states):
        self.proposer.commit(num_accepted, self.states(states))


def misled(family, **how):
    """Return a family whose proposers are misled."""
    return dataclasses.replace(family, propose=lambda head, device: Misled(family.propose(head, device), **how))


def token_before(row):
    """Put the token before the pending one in its place."""
    return [*row[:-1], row[-2]]


def place_early(states):
    """Put the state of the position before in the place of each."""
    return states.map(lambda state_BTE: state_BTE.roll(1, 1))


def other_order(states):
    """Join the taps from the last to the first."""
    return dataclasses.replace(states, taps_ABTE=states.taps_ABTE[::-1])


def save_artifact(folder, head, identity, vocabulary=None, *, vocab_size=64, num_speculative_tokens=3, provenance=None):
    """Write a head as an artifact; return its metadata. `identity` is the target's, as a dict; `vocabulary`: a reduced one."""
    known = {"num_speculative_tokens": num_speculative_tokens, "training": {}, "provenance": provenance or {}}
    metadata = head_metadata(head.settings, head.taps, TargetIdentity(**identity), vocabulary, vocab_size, **known)
    save_head(folder, head, metadata, vocabulary)
    return metadata
