"""GGUF: the converter is found, gets what it needs, and what it makes is checked. A stand-in for llama.cpp's converter here."""

import json

import gguf
import pytest

from configs.runtime.errors import InputError
from configs.schema.heads import DFlashSettings, Eagle3Settings
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.exporting.gguf import CONVERTER, FILE, VARIABLE
from heads.formats.exporting.source import TargetFolder, read_source
from tests.support import family_checks as checks

EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2, 3])
DFLASH = DFlashSettings(kind="dflash", taps=[1, 3], num_layers=2, block_size=4, mask_token_id=2)

# Writes the tensors as they are, and beside the source what it was called with and what it found.
STAND_IN = """
import json, os, sys
from pathlib import Path
import gguf
from safetensors.numpy import load_file
folder = Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
seen = {"argv": sys.argv[1:], "config": config, "path": os.environ["PYTHONPATH"], "files": sorted(map(str, folder.iterdir()))}
Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
if os.environ.get("REFUSE"):
    sys.exit("INFO: reading\\nERROR: Model Abacus is not supported")
writer = gguf.GGUFWriter(sys.argv[3], "llama")
tensors = load_file(folder / "model.safetensors")
for name in [name for name in tensors if name != "t2d"][int(os.environ.get("LEAVE_OUT", 0)):]:
    writer.add_tensor(name, tensors[name])
writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
"""


@pytest.fixture
def converter(tmp_path, monkeypatch):
    """The stand-in's folder, named in the environment."""
    folder = tmp_path / "llama.cpp" / "source"
    folder.mkdir(parents=True)
    (folder / CONVERTER).write_text(STAND_IN)
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def seen(converter):
    return json.loads((converter / "seen.json").read_text())


def names(path):
    return {tensor.name for tensor in gguf.GGUFReader(path).tensors}


def test_a_draft_lm_becomes_one_file(tiny_run, tmp_path, converter):
    source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", str(tiny_run / "target")))
    export(source, "gguf", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [FILE, SERVE_FILE]
    assert "lm_head.weight" in names(tmp_path / "out" / FILE)
    serve = (tmp_path / "out" / SERVE_FILE).read_text()
    assert f"llama-server --model target.gguf --model-draft {tmp_path / 'out' / FILE}" in serve
    assert "--spec-type draft-simple --spec-draft-n-max 3" in serve
    assert f"python {converter / CONVERTER} {tiny_run / 'target'} --outfile target.gguf --outtype f32" in serve
    found = seen(converter)
    assert found["argv"][3:] == ["--outtype", "f32", "--target-model-dir", str(tiny_run / "target")]
    assert any(path.endswith("tokenizer.json") for path in found["files"])
    assert found["path"].startswith(str(converter.parent / "python"))


def test_eagle_keeps_its_ids_and_offsets(write, converter):
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "gguf", written.out)
    assert seen(converter)["config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert {"d2t", "fc.weight", "lm_head.weight"} <= names(written.out / FILE)
    assert "--spec-type draft-eagle3 --spec-draft-n-max 3" in (written.out / SERVE_FILE).read_text()


def test_dflash_names_the_blocks_and_drafts_whole_ones_and_no_other_number(write, converter):
    written = write(DFLASH, num_speculative_tokens=2)
    assert [written.source(num_speculative_tokens=asked).num_speculative_tokens for asked in (None, 3)] == [3, 3]
    with pytest.raises(InputError, match=r"num_speculative_tokens 2: .* fills blocks of 3 drafts"):
        written.source(num_speculative_tokens=2)
    export(written.source(), "gguf", written.out)
    assert seen(converter)["config"]["dflash_config"]["target_layer_ids"] == [0, 2]
    assert "--spec-type draft-dflash --spec-draft-n-max 3" in (written.out / SERVE_FILE).read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 2}, "has 2 layers"),
        ({"norm_feedback": True}, "norm_taps, norm_feedback"),
        ({"taps": [1, 3]}, "reads 2 of the target's states"),
    ],
)
def test_an_eagle_head_that_llama_cpp_does_not_know_is_refused(write, converter, change, words):
    written = write(EAGLE.model_copy(update=change))
    with pytest.raises(InputError, match=words):
        export(written.source(), "gguf", written.out)
    assert not written.out.exists()


@pytest.mark.parametrize(
    ("variable", "error", "words"),
    [
        ("REFUSE", InputError, "converter refuses it: ERROR: Model Abacus is not supported"),
        ("LEAVE_OUT", RuntimeError, r"draft\.gguf was written with \d+ numbers of \d+"),
    ],
)
def test_what_the_converter_refuses_or_leaves_out_is_told_and_not_kept(write, converter, monkeypatch, variable, error, words):
    monkeypatch.setenv(variable, "1")
    written = write(EAGLE)
    with pytest.raises(error, match=words):
        export(written.source(), "gguf", written.out)
    assert not written.out.exists()


def test_without_the_converter_its_set_up_is_named(write, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    written = write(EAGLE)
    with pytest.raises(InputError, match=r"CONVERTER=1 sh scripts/setup_llama_cpp\.sh"):
        export(written.source(), "gguf", written.out)
