"""Every line of `serve.txt` has the spelling that its engine reads: flags, methods, keys."""

import ast
import json
import shlex
from dataclasses import replace

import pytest
import yaml

from configs.schema.heads import DFlashSettings, Eagle3Settings, MedusaSettings, MtpSettings, PEagleSettings
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.formats.exporting.table import FORMS

SETTINGS = {
    "eagle3": Eagle3Settings(kind="eagle3", taps=[1, 2, 3]),
    "peagle": PEagleSettings(kind="peagle", taps=[1, 2, 3], num_layers=1, mask_token_id=5),
    "dflash": DFlashSettings(kind="dflash", taps=[1, 2, 3], block_size=4, mask_token_id=5),
    "medusa": MedusaSettings(kind="medusa", num_depths=3),
    "mtp": MtpSettings(kind="mtp"),
}
VLLM_METHODS = {
    "draft_lm": "draft_model",
    "medusa": "medusa",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "mtp": "mtp",
}
SGLANG_ALGORITHMS = {"draft_lm": "STANDALONE", "eagle3": "EAGLE3", "dflash": "DFLASH"}
SGLANG_FLAGS = {
    "--model-path",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
}
TARGET = "a target's name"
TENSORRT_TYPES = {"draft_lm": "Draft_Target", "eagle3": "Eagle3"}
TENSORRT_KEYS = {"decoding_type", "max_draft_len", "speculative_model", "eagle3_layers_to_capture"}


@pytest.fixture
def serve_lines(write, tiny_run, tmp_path):
    """A function that exports a draft of a kind; gives the lines that serve it, and its folder."""

    def make(engine, kind):
        out = tmp_path / 'it\'s {served} "well" $HOME'  # to be quoted
        if kind == "draft_lm":
            source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", TARGET))
        else:
            written = write(SETTINGS[kind], "qwen3" if (engine, kind) == ("speculators", "mtp") else "llama")
            source = replace(written.source(), target=TargetFolder(written.target_folder, TARGET))
        export(source, engine, out)
        title, _, rest = (out / SERVE_FILE).read_text().partition("\n\n")
        assert title == f"Serve with {engine}:"
        lines = [line for line in rest.splitlines() if not line.startswith("- ")]
        return "\n".join(lines).strip(), out, source

    return make


def flags_of(line):
    words = shlex.split(line)
    return words, {word for word in words if word.startswith("--")}


@pytest.mark.parametrize("kind", FORMS["vllm"])
def test_vllm(serve_lines, kind):
    line, out, source = serve_lines("vllm", kind)
    words, flags = flags_of(line)
    assert words[:3] == ["vllm", "serve", TARGET]
    assert flags == {"--speculative-config"} | ({"--hf-overrides"} if kind == "mtp" else set())
    method = json.loads(words[words.index("--speculative-config") + 1])
    assert method.pop("method") == VLLM_METHODS[kind]
    assert method.pop("model") == str(out.resolve())
    assert method.pop("num_speculative_tokens") == source.num_speculative_tokens
    assert method == ({"parallel_drafting": True} if kind == "peagle" else {})


@pytest.mark.parametrize("kind", FORMS["sglang"])
def test_sglang(serve_lines, kind):
    line, out, source = serve_lines("sglang", kind)
    words, flags = flags_of(line)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert words[words.index("--model-path") + 1] == TARGET
    assert words[words.index("--speculative-algorithm") + 1] == SGLANG_ALGORITHMS[kind]
    assert words[words.index("--speculative-draft-model-path") + 1] == str(out.resolve())
    counted = {"--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"}
    assert flags == (SGLANG_FLAGS - counted if kind == "dflash" else SGLANG_FLAGS)  # a block has its own length
    if kind != "dflash":
        tokens = source.num_speculative_tokens
        assert words[words.index("--speculative-num-steps") + 1] == str(tokens)
        assert words[words.index("--speculative-num-draft-tokens") + 1] == str(tokens + 1)  # with the pending one


@pytest.mark.parametrize("kind", FORMS["tensorrt_llm"])
def test_tensorrt_llm(serve_lines, kind):
    lines, out, source = serve_lines("tensorrt_llm", kind)
    if kind == "medusa":
        convert, build = (flags_of(line) for line in lines.splitlines())
        assert convert[1] == {"--model_dir", "--medusa_model_dir", "--output_dir", "--dtype", "--num_medusa_heads"}
        assert build[1] == {"--checkpoint_dir", "--output_dir", "--speculative_decoding_mode"}
        assert build[0][0] == "trtllm-build"
        assert convert[0][convert[0].index("--medusa_model_dir") + 1] == str(out.resolve())
        assert convert[0][convert[0].index("--model_dir") + 1] == TARGET
        return
    line, _, options = lines.partition("\n")
    assert flags_of(line)[0][:2] == ["trtllm-serve", TARGET]
    assert flags_of(line)[1] == {"--extra_llm_api_options"}
    method = yaml.safe_load(options)["speculative_config"]
    assert method["decoding_type"] == TENSORRT_TYPES[kind]
    assert method["speculative_model"] == str(out.resolve())
    assert method["max_draft_len"] == source.num_speculative_tokens
    assert method.keys() <= TENSORRT_KEYS
    if kind == "eagle3":
        assert method["eagle3_layers_to_capture"] == [0, 1, 2]


@pytest.mark.parametrize("kind", FORMS["transformers"])
def test_transformers(serve_lines, kind):
    lines, out, _ = serve_lines("transformers", kind)
    calls = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Call)]
    (generate,) = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "generate"]
    names = {keyword.arg for keyword in generate.keywords} - {None}
    expected = {
        "draft_lm": {"assistant_model"},
        "dflash": {"assistant_model", "speculation_type", "do_sample"},
        "mtp": {"use_mtp", "do_sample"},
    }
    assert names == expected[kind]
    loads = [
        call.args[0].value for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"
    ]
    assert loads == ([str(out.resolve())] if kind == "mtp" else [TARGET, str(out.resolve())])


@pytest.mark.parametrize("kind", FORMS["speculators"])
def test_speculators(serve_lines, kind):
    line, out, _ = serve_lines("speculators", kind)
    words = shlex.split(line)
    if words[0] == "vllm":  # which reads the form, too
        assert json.loads(words[-1])["model"] == str(out.resolve())
        return
    python, flag, code = words
    assert (python, flag) == ("python", "-c")
    (load,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert load.args[0].value == str(out.resolve())
