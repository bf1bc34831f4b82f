"""What families whose drafts lean on one another share: drafting is the training forward, and greedy output is plain output.

Medusa, Hydra and MTP ask the same of more ways to build them, in tests of their own.
"""

import pytest

from configs.schema.heads import DFlashSettings, DSparkSettings, Eagle3Settings, PEagleSettings
from tests.support import family_checks as checks

BLOCK = {"taps": [1, 3], "block_size": 5, "mask_token_id": 2}
SETTINGS = {
    "eagle3": Eagle3Settings(kind="eagle3", taps=[1, 2, 4], num_depths=3),
    "eagle3, all options": Eagle3Settings(
        kind="eagle3", taps=[0, 3], num_depths=3, num_layers=2, norm_taps=True, norm_before_residual=True, norm_feedback=True
    ),
    "peagle": PEagleSettings(kind="peagle", taps=[1, 2, 4], num_layers=2, num_depths=3, mask_token_id=2),
    "peagle, all options": PEagleSettings(
        kind="peagle", taps=[1, 2, 4], num_layers=3, num_depths=4, norm_taps=True, norm_before_residual=True, mask_token_id=2
    ),
    "dflash": DFlashSettings(kind="dflash", **BLOCK),
    "dspark": DSparkSettings(kind="dspark", **BLOCK, markov_rank=6),
}
TOLERANCE = 1e-5  # norms compute in float32
TARGETS = pytest.mark.parametrize("name", sorted(checks.CONFIGS))
BUILT = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


@TARGETS
@BUILT
def test_the_logits_drafted_from_are_those_of_the_training_forward(name, settings):
    model = checks.tiny_target(name)
    checks.assert_drafts_as_trained(checks.build(settings, model), model, tolerance=TOLERANCE)


@pytest.mark.parametrize("train_head", [False, True], ids=["borrowed", "trained"])
@BUILT
def test_a_head_that_says_some_of_the_tokens_drafts_as_trained(settings, train_head):
    model = checks.tiny_target("gemma3")
    head = checks.build(settings.model_copy(update={"train_head": train_head}), model, checks.SOME_TOKENS)
    checks.assert_drafts_as_trained(head, model, tolerance=TOLERANCE)


@TARGETS
@BUILT
def test_decoding_greedily_with_it_gives_what_plain_decoding_gives(name, settings, as_target):
    model = checks.tiny_target(name)
    checks.assert_greedy_output_is_plain(checks.build(settings, model), as_target(model))
