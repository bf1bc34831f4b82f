"""What decoding with images and with sounds in the prompt must both do."""

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from eval.decoder.decode import decode
from scripts.lab.models_check.architectures import VOCAB_SIZE
from scripts.lab.models_check.scripted_drafts import ScriptedDrafts

PLAIN = {"num_speculative_tokens": 0}
CHAIN = {}
TREE = {"tree": StaticTree(kind="static", branching=[2, 2, 1])}


def drafts_of(requests, answers):
    """Return drafts that are right in part, of known answers."""
    return ScriptedDrafts([[*each.tokens, *answer] for each, answer in zip(requests, answers, strict=True)], VOCAB_SIZE)


def assert_decodes_to(target, requests, expected, length):
    """Greedy decoding gives the expected tokens, plainly, in chains and in trees."""
    for settings in (PLAIN, CHAIN, TREE):
        config = DecodeConfig(max_new_tokens=length, batch_size=len(requests), **settings)
        found, _ = decode(target, requests, config, drafts_of(requests, expected) if settings is not PLAIN else None)
        assert [list(each.tokens) for each in found] == expected, settings


def assert_matching_changes_nothing(target, requests, length):
    """Tokens drawn at temperature 1 and verified by matching are those drawn without drafts, some of which are accepted."""
    plain, chain, tree = (
        DecodeConfig(temperature=1.0, verification="match", max_new_tokens=length, batch_size=len(requests), **settings)
        for settings in (PLAIN, CHAIN, TREE)
    )
    expected = [list(each.tokens) for each in decode(target, requests, plain)[0]]
    for config in (chain, tree):
        found, _ = decode(target, requests, config, drafts_of(requests, expected))
        assert [list(each.tokens) for each in found] == expected
        assert any(round_.num_accepted for each in found for round_ in each.rounds)
