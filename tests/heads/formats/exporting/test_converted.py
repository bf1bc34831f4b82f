"""GGUF and OpenVINO: the converter is found, gets what it needs, and what it makes is checked. Stand-ins for both here."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import gguf
import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.heads import DFlashSettings, Eagle3Settings
from heads.formats.exporting.converted import (
    GGUF_CONVERTER,
    GGUF_FILE,
    GGUF_VARIABLE,
    MODEL,
    NUMBERS,
    OPENVINO_VARIABLE,
    OPTIMUM,
)
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.exporting.source import TargetFolder, read_source
from tests.support import family_checks as checks

EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2, 3], **checks.NO_NORMS)
DFLASH = DFlashSettings(kind="dflash", taps=[1, 3], num_layers=2, block_size=4, mask_token_id=2)

# Both converters in one: writes beside itself what it was called with and what it found, and then all tensors as they are.
STAND_IN = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
import gguf
from safetensors.numpy import load_file
argv, here = sys.argv[1:], Path(__file__)
is_gguf = "--outfile" in argv
folder = Path(argv[0] if is_gguf else argv[argv.index("--model") + 1])
config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
files = sorted(path.name for path in folder.iterdir())
seen = dict(argv=argv, config=config, files=files, tensors=sorted(tensors), path=os.environ.get("PYTHONPATH"))
here.with_name("seen.json").write_text(json.dumps(seen))
if os.environ.get("REFUSE"):
    sys.exit("INFO: reading\\nERROR: Model Abacus is not supported")
left_out = int(os.environ.get("LEAVE_OUT", 0))
if is_gguf:
    writer = gguf.GGUFWriter(argv[2], "llama")
    for name in [name for name in tensors if name != "t2d"][left_out:]:
        writer.add_tensor(name, tensors[name])
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
else:
    made = Path(argv[-1])
    (made / "{NUMBERS}").write_bytes(bytes(10 if left_out else sum(each.nbytes for each in tensors.values())))
    eagle = "Eagle3" in config["architectures"][0] and not os.environ.get("UNMARKED")
    (made / "{MODEL}").write_text("<net><rt_info>" + '<eagle3_mode value="True" />' * eagle + "</rt_info></net>")
"""


@pytest.fixture
def converters(tmp_path, monkeypatch):
    """The stand-ins, in folders that variables name; returns what one of them saw."""
    folders = {}
    for engine, variable, file in (("gguf", GGUF_VARIABLE, GGUF_CONVERTER), ("openvino", OPENVINO_VARIABLE, OPTIMUM)):
        path = tmp_path / "converters" / engine / "source" / file
        path.parent.mkdir(parents=True)
        path.write_text(STAND_IN)
        path.chmod(0o755)
        monkeypatch.setenv(variable, str(tmp_path / "converters" / engine / "source"))
        folders[engine] = path.parent
    return lambda engine: json.loads((folders[engine] / "seen.json").read_text())


def option(argv, name):
    return argv[argv.index(name) + 1]


def names(path):
    return {tensor.name for tensor in gguf.GGUFReader(path).tensors}


def test_a_draft_lm_becomes_a_file_or_a_model_folder(tiny_run, tmp_path, converters):
    target = str(tiny_run / "target")
    source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", target))
    for engine, files in (("gguf", [GGUF_FILE, SERVE_FILE]), ("openvino", [NUMBERS, MODEL, SERVE_FILE])):
        out = tmp_path / engine
        export(source, engine, out)
        found = converters(engine)
        assert sorted(path.name for path in out.iterdir()) == files
        assert {"tokenizer.json", "generation_config.json"} <= set(found["files"])
        assert str(out) in (out / SERVE_FILE).read_text()
    assert "lm_head.weight" in names(tmp_path / "gguf" / GGUF_FILE)
    argv = converters("gguf")["argv"]
    assert (option(argv, "--outtype"), option(argv, "--target-model-dir")) == ("f32", target)
    assert converters("gguf")["path"].startswith(str(tmp_path / "converters" / "gguf" / "python"))
    assert option(converters("openvino")["argv"], "--weight-format") == "fp32"


def test_eagle_keeps_its_ids_and_offsets(write, converters, tmp_path):
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "gguf", tmp_path / "gguf")
    assert converters("gguf")["config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert {"d2t", "fc.weight", "lm_head.weight"} <= names(tmp_path / "gguf" / GGUF_FILE)
    assert "--spec-type draft-eagle3 --spec-draft-n-max 3" in (tmp_path / "gguf" / SERVE_FILE).read_text()
    export(written.source(), "openvino", tmp_path / "openvino")
    (states,) = ElementTree.parse(tmp_path / "openvino" / MODEL).getroot().findall("rt_info/hidden_layers_list")
    assert states.get("value") == "0 1 2"  # h_1 is what block 0 gives
    found = converters("openvino")
    assert "--trust-remote-code" in found["argv"]
    assert "tokenizer.json" in found["files"]
    assert {"d2t", "fc.weight", "lm_head.weight", "midlayer.hidden_norm.weight", "embed_tokens.weight"} <= set(found["tensors"])


def test_a_window_that_an_engine_does_not_know_is_told_to_who_serves_it(write, converters, tmp_path):
    written = write(EAGLE.model_copy(update={"window": 9}))
    for engine in ("gguf", "openvino", "sglang"):
        export(written.source(), engine, tmp_path / engine)
        assert "to 9 tokens of it" in (tmp_path / engine / SERVE_FILE).read_text()
    assert "sliding" not in json.dumps(converters("gguf")["config"])


def test_dflash_names_the_blocks_and_drafts_whole_ones_and_no_other_number(write, converters):
    written = write(DFLASH, num_speculative_tokens=2)
    assert [written.source(num_speculative_tokens=asked).num_speculative_tokens for asked in (None, 3)] == [3, 3]
    for other in (2, 4):  # no whole block, and more than one
        with pytest.raises(InputError, match="num_speculative_tokens"):
            written.source(num_speculative_tokens=other)
    export(written.source(), "gguf", written.out)
    assert converters("gguf")["config"]["dflash_config"]["target_layer_ids"] == [0, 2]
    assert "--spec-type draft-dflash --spec-draft-n-max 3" in (written.out / SERVE_FILE).read_text()


@pytest.mark.parametrize(
    ("engine", "variable", "error", "words"),
    [
        ("gguf", "REFUSE", InputError, "ERROR: Model Abacus is not supported"),
        ("gguf", "LEAVE_OUT", RuntimeError, GGUF_FILE),
        ("openvino", "LEAVE_OUT", RuntimeError, NUMBERS),
        ("openvino", "UNMARKED", RuntimeError, MODEL),
    ],
)
def test_what_a_converter_refuses_or_leaves_out_is_told_and_not_kept(
    write, converters, monkeypatch, engine, variable, error, words
):
    monkeypatch.setenv(variable, "1")
    written = write(EAGLE)
    with pytest.raises(error, match=words):
        export(written.source(), engine, written.out)
    assert not written.out.exists()


def test_a_missing_converter_and_a_dtype_that_is_not_taken_are_refused(write, converters, monkeypatch, tmp_path):
    written = write(EAGLE)
    with pytest.raises(InputError, match="dtype"):
        export(written.source(dtype=torch.bfloat16), "openvino", written.out)
    monkeypatch.setenv(GGUF_VARIABLE, str(tmp_path))
    with pytest.raises(InputError, match=GGUF_VARIABLE):
        export(written.source(), "gguf", written.out)
