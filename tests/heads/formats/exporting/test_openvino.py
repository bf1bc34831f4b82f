"""OpenVINO models: the converter is found, gets what it needs, and what it makes is checked. A stand-in for it here."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.heads import Eagle3Settings
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.exporting.openvino import CONVERTER, MODEL, NUMBERS, VARIABLE
from heads.formats.exporting.source import TargetFolder, read_source
from tests.support import family_checks as checks

EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2, 3])

# Writes all numbers in a row, and beside itself what it was called with and what it found.
STAND_IN = """#!{python}
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
def converter(tmp_path, monkeypatch):
    """The stand-in, in an environment that a variable names."""
    path = tmp_path / "environment" / CONVERTER
    path.parent.mkdir(parents=True)
    path.write_text(STAND_IN.format(python=sys.executable, numbers=NUMBERS, model=MODEL))
    path.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "environment"))
    return path


def seen(converter):
    return json.loads(converter.with_name("seen.json").read_text())


def states_of(folder):
    (found,) = ElementTree.parse(folder / MODEL).getroot().findall("rt_info/hidden_layers_list") or [None]
    return None if found is None else found.get("value")


def test_a_draft_lm_becomes_a_model_folder(tiny_run, tmp_path, converter):
    source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", str(tiny_run / "target")))
    out = tmp_path / "out"
    export(source, "openvino", out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", NUMBERS, MODEL, SERVE_FILE]
    assert states_of(out) is None
    found = seen(converter)
    assert found["argv"][:2] == ["export", "openvino"]
    assert found["argv"][4:-1] == ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    assert {"tokenizer.json", "generation_config.json"} <= set(found["files"])
    serve = (out / SERVE_FILE).read_text()
    assert f"openvino_genai.draft_model({str(out)!r}, 'CPU')" in serve
    assert "num_assistant_tokens=3" in serve
    assert f"export openvino --model {tiny_run / 'target'} --task text-generation-with-past" in serve


def test_eagle_says_which_blocks_states_it_reads(write, converter):
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "openvino", written.out)
    assert states_of(written.out) == "0 1 2"  # h_1 is what block 0 gives
    assert "--trust-remote-code" in seen(converter)["argv"]
    assert "tokenizer.json" in seen(converter)["files"]
    tensors = load_file(converter.with_name("tensors.safetensors"))
    assert {"d2t", "fc.weight", "lm_head.weight", "midlayer.hidden_norm.weight"} <= tensors.keys()
    assert tensors["embed_tokens.weight"].equal(written.model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_feedback": True}, "norm_taps, norm_feedback"),
        ({"taps": [0, 1, 3]}, "reads h_0"),
    ],
)
def test_an_eagle_head_that_openvino_does_not_know_is_refused(write, converter, change, words):
    written = write(EAGLE.model_copy(update=change))
    with pytest.raises(InputError, match=words):
        export(written.source(), "openvino", written.out)
    assert not written.out.exists()


@pytest.mark.parametrize(
    ("variable", "error", "words"),
    [
        ("REFUSE", InputError, "optimum-intel refuses it: ValueError: abacus is not supported"),
        ("LEAVE_OUT", RuntimeError, r"openvino_model\.bin was written with 10 bytes of \d+"),
        ("UNMARKED", RuntimeError, "its rt_info lacks eagle3_mode"),
    ],
)
def test_what_the_converter_refuses_or_leaves_out_is_told_and_not_kept(write, converter, monkeypatch, variable, error, words):
    monkeypatch.setenv(variable, "1")
    written = write(EAGLE)
    with pytest.raises(error, match=words):
        export(written.source(), "openvino", written.out)
    assert not written.out.exists()


def test_bfloat16_is_refused_with_what_is_taken(write, converter):
    written = write(EAGLE)
    with pytest.raises(InputError, match=r"bfloat16, and OpenVINO models are written in float32 or float16: .*dtype=float32"):
        export(written.source(dtype=torch.bfloat16), "openvino", written.out)
