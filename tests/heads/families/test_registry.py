"""What every family has to show: drafting is the training forward, greedy output is plain output, documents are kept apart."""

from itertools import cycle

import pytest

from configs.schema.heads import (
    DFlashSettings,
    DSparkSettings,
    Eagle3Settings,
    HydraSettings,
    LayerSettings,
    MedusaSettings,
    MtpSettings,
    PEagleSettings,
)
from heads.families.registry import FAMILIES
from tests.support import family_checks as checks

BLOCK = {"taps": [1, 3], "block_size": 5, "mask_token_id": 2}
SETTINGS = {
    "medusa": MedusaSettings(kind="medusa", num_depths=3, num_layers=2),
    "medusa, own output heads": MedusaSettings(kind="medusa", num_depths=3, own_output_heads=True, train_head=True),
    "hydra": HydraSettings(kind="hydra", num_depths=3, num_layers=2),
    "hydra, prefix": HydraSettings(kind="hydra", num_depths=3, prefix_attention=True),
    "hydra, published": HydraSettings(
        kind="hydra",
        num_depths=3,
        num_layers=2,
        prefix_attention=True,
        prefix_norm=True,
        own_output_heads=True,
        train_head=True,
    ),
    "eagle3": Eagle3Settings(kind="eagle3", taps=[1, 2, 4], num_depths=3),
    "eagle3, all options": Eagle3Settings(
        kind="eagle3", taps=[0, 3], num_depths=3, num_layers=2, norm_taps=True, norm_before_residual=True, norm_feedback=True
    ),
    "eagle3, own parts": Eagle3Settings(
        kind="eagle3",
        taps=[1, 2, 4],
        num_depths=3,
        norm_joined_taps=True,
        own_embedding=True,
        layer=LayerSettings(mlp_width=20, num_heads=8, num_key_value_heads=2, head_width=6, norm_epsilon=1e-3),
    ),
    "peagle": PEagleSettings(kind="peagle", taps=[1, 2, 4], num_layers=2, num_depths=3, mask_token_id=2),
    "peagle, all options": PEagleSettings(
        kind="peagle", taps=[1, 2, 4], num_layers=3, num_depths=4, norm_taps=True, norm_before_residual=True, mask_token_id=2
    ),
    "dflash": DFlashSettings(kind="dflash", **BLOCK),
    "dspark": DSparkSettings(kind="dspark", **BLOCK, markov_rank=6),
    "mtp": MtpSettings(kind="mtp", num_depths=3),
    "mtp, a module a depth": MtpSettings(kind="mtp", num_depths=3, shared_depths=False),
}
# Norms and rotary angles are computed in float32, whatever the dtype.
TOLERANCES = {"medusa": 1e-6, "hydra": 1e-6, "mtp": 1e-4}
TARGETS = pytest.mark.parametrize("name", sorted(checks.CONFIGS))
BUILT = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def tolerance_of(settings):
    return TOLERANCES.get(settings.kind, 1e-5)


def test_every_family_is_among_them():
    assert {settings.kind for settings in SETTINGS.values()} == FAMILIES.keys()


@TARGETS
@BUILT
def test_the_logits_drafted_from_are_those_of_the_training_forward(name, settings):
    model = checks.tiny_target(name)
    checks.assert_drafts_as_trained(checks.build(settings, model), model, tolerance=tolerance_of(settings))


@pytest.mark.parametrize(
    ("name", "train_head"),
    [
        (name, train_head)
        for name, settings in SETTINGS.items()
        for train_head in (False, True)
        if train_head or not settings.train_head  # own output heads are always trained
        if name != "hydra, published"  # whose output heads have rows for every token
    ],
)
def test_a_head_of_some_tokens_drafts_as_trained(name, train_head):
    settings = SETTINGS[name]
    model = checks.tiny_target("gemma3")
    head = checks.build(settings.model_copy(update={"train_head": train_head}), model, checks.SOME_TOKENS)
    checks.assert_drafts_as_trained(head, model, tolerance=tolerance_of(settings))


@pytest.mark.parametrize(
    ("name", "settings"), list(zip(cycle(sorted(checks.CONFIGS)), SETTINGS.values(), strict=False)), ids=list(SETTINGS)
)
def test_greedy_output_is_that_of_plain_decoding(name, settings, as_target):
    model = checks.tiny_target(name)
    checks.assert_greedy_output_is_plain(checks.build(settings, model), as_target(model))


@BUILT
def test_documents_of_a_row_are_apart(settings):
    model = checks.tiny_target("llama")
    checks.assert_documents_are_apart(checks.build(settings, model), model)


@BUILT
def test_it_learns_a_conversation(settings, as_target):
    if settings.kind == "peagle":
        settings = settings.model_copy(update={"num_layers": 1, "keep_share": 1.0})
    model = checks.tiny_target("llama")
    checks.assert_learns(checks.build(settings, model, stir=0.0), as_target(model), num_depths=3)
