"""A draft whose config means other states than it was trained on is refused, with the words to type.

The target says token 7 whatever it reads. Its first block turns the sign of the one feature that counts, so that a head on h_1
drafts 7 and the same head on h_0, one id off, never does.
"""

import importlib
import json

import pytest
import torch

from configs.runtime.command import BAD_INPUT, DONE, run_command
from configs.runtime.errors import InputError
from configs.schema.commands.release import ImportConfig
from configs.schema.heads import DFlashSettings, Eagle3Settings, MedusaSettings, MtpSettings
from heads.families.registry import FAMILIES
from heads.formats.exporting.exporter import export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.formats.importing.importer import fit
from heads.formats.importing.reading import read_external
from heads.frozen.loading import load_target
from scripts.import_draft import trial as trial_module
from scripts.import_draft.trial import (
    Reading,
    TapComparison,
    clustered_error,
    compare_readings,
    expected_lengths,
    other_readings,
)
from tests.support import family_checks as checks
from tests.support.artifacts import save_artifact

importing = importlib.import_module("scripts.import_draft.__main__")
SETTINGS = Eagle3Settings(kind="eagle3", taps=[1], num_depths=3)
TEXT = [7, 12, 3, 44, 9, 31, 5, 6, 2, 50]
START = 4
EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2], num_depths=3)
OWN = Reading(name="own")


@torch.no_grad()
def write_target(folder, model, tokenizer):
    """Write a target that says token 7, with h_0 large in its first feature and later states large the other way."""
    model.model.embed_tokens.weight[:, 0] = 100.0
    mlp = model.model.layers[0].mlp
    for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        projection.weight.zero_()
    mlp.gate_proj.weight[:, 0] = mlp.up_proj.weight[:, 0] = 1.0
    mlp.down_proj.weight[0] = -1.0
    model.model.norm.weight.zero_()
    model.model.norm.weight[0] = 1.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[7, 0] = -5.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def write_head(folder, target):
    """Write a head that passes the last tap on to the target's output head."""
    head = FAMILIES["eagle3"].build(SETTINGS, target.model, None)
    head.norm.weight.fill_(1.0)
    for layer in head.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    save_artifact(folder, head, target.identity.to_dict())


@pytest.fixture
def config(tmp_path, tiny_llama, tiny_tokenizer):
    """The config of an import from `exported/`, whose one id says h_1."""
    write_target(tmp_path / "target", tiny_llama(dtype=torch.float32), tiny_tokenizer)
    values = {
        "target": {"name": str(tmp_path / "target"), "dtype": "float32", "device": "cpu"},
        "prompts": ["w1 w2 w3", "w4 w5"],
        "max_new_tokens": 16,
    }
    target = load_target(ImportConfig.model_validate(values).target)
    write_head(tmp_path / "artifact", target)
    source = read_source(tmp_path / "artifact", TargetFolder(tmp_path / "target", "target"))
    export(source, "speculators", tmp_path / "exported")
    return ImportConfig.model_validate(values)


def say_id(folder, number):
    path = folder / "exported" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eagle_aux_hidden_state_layer_ids": [number]}))


def import_(folder, config, *more):
    (folder / "import.yaml").write_text(config.model_dump_json())
    argv = [str(folder / "exported"), "--out", str(folder / "back"), "--config", str(folder / "import.yaml"), *more]
    return run_command(ImportConfig, importing.main, description="", argv=argv, add_arguments=importing.add_arguments)


def test_a_draft_with_ids_one_off_is_refused_with_what_to_say(tmp_path, config, capsys):
    say_id(tmp_path, 0)
    assert import_(tmp_path, config) == BAD_INPUT
    words = capsys.readouterr().err
    assert "the target accepts 0.000 drafts a round" in words
    assert "with ids one higher more of its drafts stay" in words
    assert "--set layer_ids=block_output takes them so" in words
    assert not (tmp_path / "back").exists()
    assert import_(tmp_path, config, "--set", "layer_ids=block_output") == DONE


def reading(name, shift):
    return TapComparison(reading=Reading(name=f"ids one {name}", shift=shift), expected=0.5, gain=0.1, gain_error=0.01)


def test_ids_are_taken_as_told_with_a_warning_or_are_to_be_corrected(tmp_path, config, monkeypatch):
    target, external = load_target(config.target), read_external(tmp_path / "exported", layer_ids=config.layer_ids)
    fitted = fit(external, target.model)
    monkeypatch.setattr(trial_module, "_better_reading", lambda *_: reading("higher", 1))
    with pytest.raises(InputError, match=r"seems to mean other states .* 0.500 a position in place of 0.400"):
        trial_module.try_out(fitted, target, config, 3, external.layer_ids)
    told = config.model_copy(update={"layer_ids": "h"})
    assert trial_module.try_out(fitted, target, told, 3, external.layer_ids).warnings == [
        "taken as told, but with ids one higher more of its drafts stay, 0.500 a position in place of 0.400 (the difference is "
        "known to 0.010); --set layer_ids=block_output takes them so, --set layer_ids=h as they were taken"
    ]
    monkeypatch.setattr(trial_module, "_better_reading", lambda *_: reading("lower", -1))  # which no convention explains
    with pytest.raises(InputError, match=r"correct the ids in its config.json, or --set layer_ids=h takes them as they stand"):
        trial_module.try_out(fitted, target, config, 3, "h")


@pytest.mark.parametrize("vocabulary", [None, checks.SOME_TOKENS], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    "settings",
    [
        EAGLE,
        MedusaSettings(kind="medusa", num_depths=3),
        DFlashSettings(kind="dflash", taps=[1, 2], block_size=4, mask_token_id=5),
    ],
)
@torch.no_grad()
def test_each_origin_sums_the_products_of_what_the_head_gives_the_text(settings, vocabulary):
    model = checks.tiny_target("llama")
    head = checks.build(settings, model, vocabulary)
    found_N = expected_lengths(head, model, TEXT, START, OWN)
    first = len(TEXT) - 2 - len(found_N)  # the last origin has one token left to say
    assert first == START - (1 if settings.kind == "dflash" else 2)  # a block's pending token lies in the answer too
    for origin, found in enumerate(found_N[:-3].tolist(), start=first):  # the last ones have fewer than three tokens left
        drafted = TEXT[origin + 2 : origin + 5]
        logits_GW = checks.trained_logits(head, model, [TEXT[: origin + 2]], [drafted])[0]
        expected, chain = 0.0, 1.0
        for probs_W, token in zip(logits_GW.softmax(-1), drafted, strict=True):
            ids = list(range(64)) if vocabulary is None else vocabulary.token_ids_W.tolist()
            chain *= probs_W[ids.index(token)].item() if token in ids else 0.0
            expected += chain
        assert found == pytest.approx(expected, abs=1e-9)


@torch.no_grad()
def test_a_reading_takes_other_states():
    model = checks.tiny_target("llama")
    head = checks.build(EAGLE, model)
    shifted = checks.build(EAGLE.model_copy(update={"taps": [2, 3]}), model)
    one_higher_N = expected_lengths(head, model, TEXT, START, Reading(name="", shift=1))
    torch.testing.assert_close(one_higher_N, expected_lengths(shifted, model, TEXT, START, OWN))
    settings = MtpSettings(kind="mtp", num_depths=2)
    head, other = (checks.build(settings.model_copy(update={"reads": reads}), model) for reads in ("post_norm", "pre_norm"))
    otherwise_N = expected_lengths(head, model, TEXT, START, Reading(name="", other_norm=True))
    torch.testing.assert_close(otherwise_N, expected_lengths(other, model, TEXT, START, OWN))
    back_N = expected_lengths(other, model, TEXT, START, Reading(name="", other_norm=True))
    torch.testing.assert_close(back_N, expected_lengths(head, model, TEXT, START, OWN))


def test_the_readings_of_a_draft():
    model = checks.tiny_target("llama")  # 4 blocks
    shifts = {taps: [each.shift for each in other_readings(taps, model, None)] for taps in ((1, 3), (0, 3), (2, 4))}
    assert shifts == {(1, 3): [-1, 1], (0, 3): [1], (2, 4): [-1]}
    assert [each.name for each in other_readings((4,), model, "pre_norm")] == ["reads post_norm"]
    assert other_readings((), model, None) == []


def test_differences_are_taken_position_by_position():
    model = checks.tiny_target("llama")
    head = checks.build(EAGLE, model)
    texts = [(TEXT, START), (TEXT[::-1], START)]
    reading = other_readings(head.taps, model, None)[0]
    (found,) = compare_readings(head, model, texts, [reading])
    own_N, other_N = (torch.cat([expected_lengths(head, model, *text, each) for text in texts]) for each in (OWN, reading))
    gains_N = other_N - own_N
    assert (found.gain, found.expected) == pytest.approx((gains_N.mean().item(), other_N.mean().item()))
    assert found.gain_error == pytest.approx(clustered_error(gains_N.detach().split(len(gains_N) // 2)))


def test_the_error_of_a_gain_is_that_of_texts_and_not_of_origins():
    """Of equally long texts it is the standard error of their means; origins that repeat within a text change nothing."""
    means_C = torch.tensor([0.1, 0.4, -0.2, 0.3, 0.0], dtype=torch.float64)
    expected = (means_C.var() / len(means_C)).sqrt().item()
    for length in (1, 40):
        assert clustered_error([mean.repeat(length) for mean in means_C]) == pytest.approx(expected)
    uneven = [torch.full((length,), value, dtype=torch.float64) for length, value in ((30, 1.0), (10, 0.0), (20, 0.5))]
    residuals = (30 - 30 * 40 / 60, 0 - 10 * 40 / 60, 10 - 20 * 40 / 60)
    assert clustered_error(uneven) == pytest.approx((sum(each**2 for each in residuals) * 3 / 2) ** 0.5 / 60)
    assert clustered_error([torch.ones(50, dtype=torch.float64)]) == float("inf")
