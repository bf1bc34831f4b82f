"""GGUF and OpenVINO: the converter is found, gets what it needs, and what it makes is checked. Stand-ins for both here."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import gguf
import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.heads import DFlashSettings, Eagle3Settings
from heads.formats.exporting import openvino
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.exporting.gguf import CONVERTER, FILE, VARIABLE
from heads.formats.exporting.openvino import MODEL, NUMBERS
from heads.formats.exporting.source import TargetFolder, read_source
from tests.support import family_checks as checks

EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2, 3], **checks.NO_NORMS)
DFLASH = DFlashSettings(kind="dflash", taps=[1, 3], num_layers=2, block_size=4, mask_token_id=2)

# Writes the tensors as they are, and beside the source what it was called with and what it found.
LLAMA_CPP = """
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


# Writes all numbers in a row, and beside itself what it was called with and what it found.
OPTIMUM = """#!{python}
import json, os, sys
from pathlib import Path
arguments = sys.argv[1:]
folder, made = Path(arguments[arguments.index("--model") + 1]), Path(arguments[-1])
config = json.loads((folder / "config.json").read_text())
seen = {{"argv": arguments, "files": sorted(path.name for path in folder.iterdir())}}
Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
os.link(folder / "model.safetensors", Path(__file__).with_name("tensors.safetensors"))
if os.environ.get("REFUSE"):
    sys.exit("WARNING: reading\\nValueError: abacus is not supported")
made.mkdir()
size = (folder / "model.safetensors").stat().st_size
(made / "{numbers}").write_bytes(bytes(10 if os.environ.get("LEAVE_OUT") else size))
eagle = config["architectures"][0] == "LlamaForCausalLMEagle3" and not os.environ.get("UNMARKED")
(made / "{model}").write_text("<net><rt_info>" + '<eagle3_mode value="True" />' * eagle + "</rt_info></net>")
(made / "config.json").write_text("{{}}")
"""


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch):
    """The stand-in's folder, named in the environment."""
    folder = tmp_path / "llama.cpp" / "source"
    folder.mkdir(parents=True)
    (folder / CONVERTER).write_text(LLAMA_CPP)
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.fixture
def optimum(tmp_path, monkeypatch):
    """The stand-in, in an environment that a variable names."""
    path = tmp_path / "environment" / openvino.CONVERTER
    path.parent.mkdir(parents=True)
    path.write_text(OPTIMUM.format(python=sys.executable, numbers=NUMBERS, model=MODEL))
    path.chmod(0o755)
    monkeypatch.setenv(openvino.VARIABLE, str(tmp_path / "environment"))
    return path


def seen(folder):
    return json.loads((folder / "seen.json").read_text())


def names(path):
    return {tensor.name for tensor in gguf.GGUFReader(path).tensors}


def states_of(folder):
    (found,) = ElementTree.parse(folder / MODEL).getroot().findall("rt_info/hidden_layers_list") or [None]
    return None if found is None else found.get("value")


def test_a_draft_lm_becomes_one_file(tiny_run, tmp_path, llama_cpp):
    source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", str(tiny_run / "target")))
    export(source, "gguf", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [FILE, SERVE_FILE]
    assert "lm_head.weight" in names(tmp_path / "out" / FILE)
    serve = (tmp_path / "out" / SERVE_FILE).read_text()
    assert f"llama-server --model target.gguf --model-draft {tmp_path / 'out' / FILE}" in serve
    assert "--spec-type draft-simple --spec-draft-n-max 3" in serve
    assert f"python {llama_cpp / CONVERTER} {tiny_run / 'target'} --outfile target.gguf --outtype f32" in serve
    found = seen(llama_cpp)
    assert found["argv"][3:] == ["--outtype", "f32", "--target-model-dir", str(tiny_run / "target")]
    assert any(path.endswith("tokenizer.json") for path in found["files"])
    assert found["path"].startswith(str(llama_cpp.parent / "python"))


def test_eagle_keeps_its_ids_and_offsets(write, llama_cpp):
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "gguf", written.out)
    assert seen(llama_cpp)["config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert {"d2t", "fc.weight", "lm_head.weight"} <= names(written.out / FILE)
    assert "--spec-type draft-eagle3 --spec-draft-n-max 3" in (written.out / SERVE_FILE).read_text()


@pytest.mark.parametrize("engine", ["gguf", "openvino", "sglang"])
def test_a_window_that_an_engine_does_not_know_is_told_to_who_serves_it(write, llama_cpp, optimum, engine):
    written = write(EAGLE.model_copy(update={"window": 9}))
    export(written.source(), engine, written.out)
    assert "training to 9 tokens of it: in longer texts fewer drafts are accepted" in (written.out / SERVE_FILE).read_text()
    if engine == "gguf":
        assert "sliding" not in json.dumps(seen(llama_cpp)["config"])


def test_dflash_names_the_blocks_and_drafts_whole_ones_and_no_other_number(write, llama_cpp):
    written = write(DFLASH, num_speculative_tokens=2)
    assert [written.source(num_speculative_tokens=asked).num_speculative_tokens for asked in (None, 3)] == [3, 3]
    with pytest.raises(InputError, match=r"num_speculative_tokens 2: .* fills blocks of 3 drafts"):
        written.source(num_speculative_tokens=2)
    export(written.source(), "gguf", written.out)
    assert seen(llama_cpp)["config"]["dflash_config"]["target_layer_ids"] == [0, 2]
    assert "--spec-type draft-dflash --spec-draft-n-max 3" in (written.out / SERVE_FILE).read_text()


def test_a_draft_lm_becomes_a_model_folder(tiny_run, tmp_path, optimum):
    source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", str(tiny_run / "target")))
    out = tmp_path / "out"
    export(source, "openvino", out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", NUMBERS, MODEL, SERVE_FILE]
    assert states_of(out) is None
    found = seen(optimum.parent)
    assert found["argv"][:2] == ["export", "openvino"]
    assert found["argv"][4:-1] == ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    assert {"tokenizer.json", "generation_config.json"} <= set(found["files"])
    serve = (out / SERVE_FILE).read_text()
    assert f"openvino_genai.draft_model({str(out)!r}, 'CPU')" in serve
    assert "num_assistant_tokens=3" in serve
    assert f"export openvino --model {tiny_run / 'target'} --task text-generation-with-past" in serve


def test_eagle_says_which_blocks_states_it_reads(write, optimum):
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "openvino", written.out)
    assert states_of(written.out) == "0 1 2"  # h_1 is what block 0 gives
    assert "--trust-remote-code" in seen(optimum.parent)["argv"]
    assert "tokenizer.json" in seen(optimum.parent)["files"]
    tensors = load_file(optimum.with_name("tensors.safetensors"))
    assert {"d2t", "fc.weight", "lm_head.weight", "midlayer.hidden_norm.weight"} <= tensors.keys()
    assert tensors["embed_tokens.weight"].equal(written.model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("engine", "change", "words"),
    [
        ("gguf", {"norm_feedback": True}, "llama.cpp does not: train it with head.norm_taps=false head.norm_feedback=false"),
        ("openvino", {"norm_taps": True}, "OpenVINO GenAI does not"),
        ("gguf", {"taps": [1, 3]}, "reads 2 of the target's states"),
        ("gguf", {"qk_norm": True}, "norms queries and keys"),
        ("openvino", {"taps": [0, 1, 3]}, "reads h_0"),
    ],
)
def test_an_eagle_head_that_the_engine_does_not_know_is_refused(write, llama_cpp, optimum, engine, change, words):
    written = write(EAGLE.model_copy(update=change))
    with pytest.raises(InputError, match=words):
        export(written.source(), engine, written.out)
    assert not written.out.exists()


@pytest.mark.parametrize(
    ("engine", "variable", "error", "words"),
    [
        ("gguf", "REFUSE", InputError, "converter refuses it: ERROR: Model Abacus is not supported"),
        ("gguf", "LEAVE_OUT", RuntimeError, r"draft\.gguf was written with \d+ numbers of \d+"),
        ("openvino", "REFUSE", InputError, "optimum-intel refuses it: ValueError: abacus is not supported"),
        ("openvino", "LEAVE_OUT", RuntimeError, r"openvino_model\.bin was written with 10 bytes of \d+"),
        ("openvino", "UNMARKED", RuntimeError, "its rt_info lacks eagle3_mode"),
    ],
)
def test_what_a_converter_refuses_or_leaves_out_is_told_and_not_kept(
    write, llama_cpp, optimum, monkeypatch, engine, variable, error, words
):
    monkeypatch.setenv(variable, "1")
    written = write(EAGLE)
    with pytest.raises(error, match=words):
        export(written.source(), engine, written.out)
    assert not written.out.exists()


def test_without_the_converter_its_set_up_is_named(write, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    written = write(EAGLE)
    with pytest.raises(InputError, match=r"CONVERTER=1 sh scripts/setup_llama_cpp\.sh"):
        export(written.source(), "gguf", written.out)


def test_bfloat16_is_refused_with_what_is_taken(write, optimum):
    written = write(EAGLE)
    with pytest.raises(InputError, match=r"bfloat16, and OpenVINO models are written in float32 or float16: .*dtype=float32"):
        export(written.source(dtype=torch.bfloat16), "openvino", written.out)
