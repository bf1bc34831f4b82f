"""What the models read in each round: the target each token once, a draft LM no more than what it lacks.

In a round of G drafts the target reads the pending token and the drafts, G + 1 rows. The draft LM reads what it lacks of the
committed text and then all drafts but the last; after a full acceptance it lacks the last draft too, and reads it in the same
forward as the pending token.
"""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import Request, decode
from heads.frozen.hidden_states import blocks
from heads.proposers.draft_lm import DraftLM
from tests.support.corrected import corrected
from tests.support.family_checks import tiny_target

GAMMA = 3
PROMPTS = [[7, 12, 3, 44, 9], [20, 9, 9, 31, 5, 6, 2, 50, 17]]


class Forwards:
    """Notes how many tokens a row goes through a model's first block in each forward."""

    def __init__(self, model):
        self.lengths = []
        self._handle = blocks(model)[0].register_forward_hook(lambda _, args, output: self.lengths.append(args[0].shape[1]))

    def close(self):
        self._handle.remove()


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(tiny_target("llama"))


@pytest.fixture
def draft_model(tiny_llama):
    return tiny_llama(seed=2)


def decode_counted(target, draft_model, config, proposer, prompts=PROMPTS[:1]):
    """Decode; return the generations, and the tokens a row by forward of target and draft, the prompts' aside."""
    requests = [Request(prompt_id=str(n), category="", tokens=tuple(prompt)) for n, prompt in enumerate(prompts)]
    by_target, by_draft = Forwards(target.model), Forwards(draft_model)
    generations, _ = decode(target, requests, config, proposer)
    for each in (by_target, by_draft):
        each.close()
    longest = max(map(len, prompts))
    assert (by_target.lengths[0], by_draft.lengths[0]) == (longest, longest)
    return generations, by_target.lengths[1:], by_draft.lengths[1:]


def expected_draft_forwards(rounds):
    """The first forward of a round reads one token, or two after a full acceptance; each further draft takes one."""
    lengths, whole = [], False
    for round_ in rounds:
        if round_.drafted:
            lengths += [2 if whole else 1] + [1] * (len(round_.drafted) - 1)
        whole = round_.num_accepted == len(round_.drafted) > 0
    return lengths


@pytest.mark.parametrize("right", [(GAMMA,), (0,), (3, 0, 2, 3, 1)], ids=["all", "none", "some"])
@torch.no_grad()
def test_a_round_of_a_chain_reads_each_token_once(target, draft_model, right):
    plain = DecodeConfig(num_speculative_tokens=0, max_new_tokens=22)
    (alone,), _ = decode(target, [Request(prompt_id="0", category="", tokens=tuple(PROMPTS[0]))], plain)
    proposer = corrected(DraftLM(draft_model, 64), [[*PROMPTS[0], *alone.tokens]], right)
    config = plain.model_copy(update={"num_speculative_tokens": GAMMA})
    (generation,), by_target, by_draft = decode_counted(target, draft_model, config, proposer)
    assert generation.tokens == alone.tokens
    assert by_target == [1 + len(round_.drafted) for round_ in generation.rounds]
    assert by_draft == expected_draft_forwards(generation.rounds)
    if right == (GAMMA,):  # all was kept, so the target has read every token of the answer once, the last one aside
        assert sum(by_target) == len(generation.tokens) - 1
