"""Exported heads say in speculators' own modules what they say in ours.

speculators takes a conversation without its first token beside the states without the last; its heads' logits are caught where
they leave the output head. B batch, T positions, W draft vocabulary.
"""

import importlib
import os

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.heads import Eagle3Settings, LayerSettings, PEagleSettings
from heads.formats.exporting.exporter import export
from heads.frozen.hidden_states import read_states
from tests.support import family_checks as checks

if "CI" not in os.environ:  # there `make setup` has installed it
    pytest.importorskip("speculators")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # speculators' own
    pytest.mark.parametrize("vocabulary", [None, checks.SOME_TOKENS], ids=["whole", "reduced"]),
]
BLOCKS = ("dflash", "dspark", "xpress, from the anchor")
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


def loaded(folder):
    """Return speculators' module for an exported folder."""
    speculators = importlib.import_module("speculators")
    config = speculators.SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    module = speculators.SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    if config.speculators_model_type == "xpress":  # a buffer that speculators 0.9 leaves uninitialised when it loads
        module.refiner_head.causal_tril = torch.ones(config.block_size, config.block_size).tril()
    return module


def caught(module):
    """Return a list to which the outputs of a module's output head are added."""
    outputs = []
    module.lm_head.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    return outputs


def shifted(written, ids_BT):
    """Return what a draft that reads x_{j+1} beside the states of j is given."""
    states = read_states(written.model, ids_BT, written.head.taps)
    T = ids_BT.shape[1] - 1
    return {
        "input_ids": ids_BT[:, 1:],
        "hidden_states": states.joined_BTF[:, :-1],
        "document_ids": torch.zeros(1, T, dtype=torch.long),
        "position_ids": torch.arange(1, T + 1).unsqueeze(0),
    }


def own_depths(written, ids_BT):
    return written.head(*checks.inputs_of(written.model, ids_BT.tolist(), written.head.taps))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True, "norm_taps": False, "norm_joined_taps": True, "own_embedding": True},
        {"layer": LayerSettings(mlp_width=80, num_heads=8, num_key_value_heads=2, head_width=6, rope_scaling=checks.YARN)},
        {"layer": LayerSettings(norm_epsilon=1e-2, rope_theta=500.0, rope_scaling=checks.LLAMA3)},
        checks.NO_NORMS,
        {"num_layers": 2, "taps": [0, 2], "train_head": True},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
@torch.no_grad()
def test_eagle3(write, text_ids, vocabulary, options):
    written = write(Eagle3Settings(**{"kind": "eagle3", "taps": [1, 2, 3], "num_depths": 3} | options), vocabulary=vocabulary)
    export(written.source(), "speculators", written.out)
    module = loaded(written.out)
    outputs = caught(module)
    module(**shifted(written, text_ids), ttt_steps=3)
    for ours, theirs_BTW in zip(own_depths(written, text_ids), outputs, strict=True):
        torch.testing.assert_close(theirs_BTW[0, ours.origins_N], ours.logits_of(ours.hidden_ND), **TOLERANCE)


@torch.no_grad()
def test_peagle(write, text_ids, vocabulary, monkeypatch):
    settings = PEagleSettings(kind="peagle", taps=[1, 2, 3], num_layers=2, num_depths=3, mask_token_id=5)
    written = write(settings, vocabulary=vocabulary)
    export(written.source(), "speculators", written.out)
    module, seen = loaded(written.out), {}
    core = importlib.import_module("speculators.models.peagle.core")
    monkeypatch.setattr(core, "compute_metrics", lambda **values: (seen.update(values), {}))
    T = text_ids.shape[1] - 1
    module(
        **shifted(written, text_ids),
        loss_mask=torch.ones(1, T),
        verifier_last_hidden_states=torch.zeros(1, T, 32),
        num_depths=3,
        down_sample_ratio=1.0,
    )
    for depth, ours in enumerate(own_depths(written, text_ids)):
        theirs = {int(seen["anchor_pos"][place]): place for place in (seen["depth"] == depth).nonzero().squeeze(1)}
        both = [(row, theirs[origin]) for row, origin in enumerate(ours.origins_N.tolist()) if origin in theirs]
        assert len(both) > 15
        rows, places = (torch.tensor(each) for each in zip(*both, strict=True))
        torch.testing.assert_close(seen["logits"][0, places], ours.logits_of(ours.hidden_ND)[rows], **TOLERANCE)


def run_block(module, written, text_ids, anchor):
    """Let speculators' module fill the one block that starts at this token of the text."""
    T = text_ids.shape[1]
    module(
        input_ids=text_ids,
        hidden_states=read_states(written.model, text_ids, written.head.taps).joined_BTF,
        document_ids=torch.zeros(1, T, dtype=torch.long),
        loss_mask=(torch.arange(T) == anchor).unsqueeze(0),
        verifier_last_hidden_states=torch.zeros(1, T, 32),
        max_anchors=1,
        loss_config=importlib.import_module("speculators.losses").resolve_loss_config("kl_div", "eager"),
    )


@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_block_drafters(write, text_ids, vocabulary, kind, monkeypatch):
    settings = checks.SETTINGS[kind]
    written = write(settings, vocabulary=vocabulary)
    export(written.source(), "speculators", written.out)
    module = loaded(written.out)
    outputs, anchor = caught(module), 9
    core = importlib.import_module(f"speculators.models.{settings.kind}.core")
    if settings.kind != "dflash":  # what it adds to the output head's logits is seen where the loss gets it
        monkeypatch.setattr(core, "compute_metrics", lambda logits, *_, **__: (outputs.append(logits.detach()), {}))
    run_block(module, written, text_ids, anchor)
    for slot, ours in enumerate(own_depths(written, text_ids), start=settings.first_slot):
        hidden_1D = ours.hidden_ND[ours.origins_N == anchor - 1]
        torch.testing.assert_close(outputs[-1][:, slot], ours.logits_of(hidden_1D), **TOLERANCE)


@torch.no_grad()
def test_dflash2(write, text_ids, vocabulary, monkeypatch):
    settings = checks.SETTINGS["dflash2"]
    written = write(settings, vocabulary=vocabulary)
    if vocabulary is not None:
        with pytest.raises(InputError, match="its draft vocabulary is reduced"):
            export(written.source(), "speculators", written.out)
        return
    export(written.source(), "speculators", written.out)
    module, seen = loaded(written.out), {}
    core = importlib.import_module("speculators.models.dflash2.core")
    monkeypatch.setattr(core, "compute_metrics", lambda **values: (seen.update(values), {}))
    anchor = 9
    run_block(module, written, text_ids, anchor)
    for slot, ours in enumerate(own_depths(written, text_ids), start=1):
        hidden_1D = ours.hidden_ND[ours.origins_N == anchor - 1]
        unary_1V = written.head.lm_head.logits(hidden_1D[:, :32])
        torch.testing.assert_close(seen["unary_logits"][:, slot], unary_1V, **TOLERANCE)
        candidates_K = seen["training_candidate_ids"][0, slot, :-1]  # in place of the last one stands the label
        scores_K = ours.logits_of(hidden_1D)[0, candidates_K]
        theirs_K = seen["candidate_logits"][0, slot, :-1]
        torch.testing.assert_close(theirs_K - theirs_K[0], scores_K - scores_K[0], **TOLERANCE)  # up to a constant
