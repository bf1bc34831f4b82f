"""The two EAGLE-3 flavours become each other: nested (speculators, vLLM) and flat (SGLang, SpecForge), by import and export."""

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.heads import Eagle3Settings
from heads.artifact import METADATA_FILE, WEIGHTS_FILE, load_draft, read_metadata
from heads.formats.exporting.exporter import export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.formats.importing.importer import drafts_a_round, fit, write_artifact
from heads.formats.importing.reading import read_external
from tests.support import family_checks as checks

PLAIN = Eagle3Settings(kind="eagle3", taps=[1, 2, 3], num_depths=3)
NORMED = PLAIN.model_copy(update={"norm_taps": True, "norm_feedback": True, "train_head": True})
FLAT, NESTED = "sglang", "speculators"


def converted(written, folder, engine, out):
    """Import a draft's folder, and export the artifact for an engine."""
    external = read_external(folder)
    fitted = fit(external, written.model)
    artifact = out.with_name(f"{out.name}_artifact")
    write_artifact(
        fitted,
        artifact,
        written.target.identity,
        vocab_size=checks.VOCAB_SIZE,
        num_speculative_tokens=drafts_a_round(external, None, fitted.settings),
        provenance={},
    )
    source = read_source(artifact, TargetFolder(written.target_folder, str(written.target_folder)))
    export(source, engine, out)
    return artifact


def tensors_of(folder):
    """Return a file's tensors under flat names, without what the other flavour leaves out: copies of what is the target's."""
    found = {name.replace("layers.0.", "midlayer."): value for name, value in load_file(folder / WEIGHTS_FILE).items()}
    found.pop("embed_tokens.weight", None)
    return found


@pytest.mark.parametrize("vocabulary", [None, checks.SOME_TOKENS], ids=["whole", "reduced"])
@pytest.mark.parametrize("settings", [PLAIN, NORMED], ids=["plain", "normed"])
@pytest.mark.parametrize("first", [FLAT, NESTED])
def test_one_becomes_the_other_and_comes_back(write, tmp_path, first, settings, vocabulary):
    second = NESTED if first == FLAT else FLAT
    written = write(settings, vocabulary=vocabulary)
    export(written.source(), first, written.out)
    artifact = converted(written, written.out, second, tmp_path / "other")
    converted(written, tmp_path / "other", first, tmp_path / "back")
    original, other, back = (tensors_of(folder) for folder in (written.out, tmp_path / "other", tmp_path / "back"))
    trivial = {"d2t", "t2d"} if vocabulary is None else set()  # offsets of a whole vocabulary, which one flavour forbids
    assert original.keys() ^ other.keys() <= trivial
    assert all(torch.equal(original[name], other[name]) for name in original.keys() & other.keys())
    assert original.keys() == back.keys()
    assert (written.out / WEIGHTS_FILE).read_bytes() == (tmp_path / "back" / WEIGHTS_FILE).read_bytes()
    drafts = [
        checks._drafts(written.target, load_draft(folder, written.target.identity, written.model).proposer)
        for folder in (written.artifact, artifact, tmp_path / "back_artifact")
    ]
    for drafted_BG, logits_BGV in drafts[1:]:
        assert torch.equal(drafted_BG, drafts[0][0])
        assert torch.equal(logits_BGV, drafts[0][1])
    assert read_metadata(artifact).hidden_states.taps == [1, 2, 3]
    assert (artifact / METADATA_FILE).is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_before_residual": True}, "starts from the normed feature"),
        ({"norm_joined_taps": True}, "norms all taps as one vector"),
        ({"own_embedding": True}, "has an embedding of its own"),
        ({"num_layers": 2}, "has 2 layers"),
        ({"taps": [0, 2, 3]}, "reads h_0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_flat_form_cannot_say_is_refused(write, tmp_path, change, words):
    written = write(PLAIN.model_copy(update=change))
    export(written.source(), NESTED, written.out)
    with pytest.raises(InputError, match=words):
        converted(written, written.out, FLAT, tmp_path / "other")
    assert not (tmp_path / "other").exists()
