"""Every line of `serve.txt` has the spelling that its engine reads: flags, methods, keys."""

import ast
import json
import shlex
from dataclasses import replace

import pytest

from heads.formats.exporting.exporter import FORMS, SERVE_FILE, export
from heads.formats.exporting.source import TargetFolder, read_source
from tests.support import family_checks as checks

VLLM_METHODS = {"draft_lm": "draft_model", "peagle": "eagle3", "dflash2": "dflash"}  # the others bear the family's name
SGLANG_ALGORITHMS = {"draft_lm": "STANDALONE", "eagle3": "EAGLE3", "dflash": "DFLASH", "domino": "DFLASH"}
TARGET = "a target's name"


@pytest.fixture
def serve_lines(write, tiny_run, tmp_path):
    """A function that exports a draft of a kind; gives the lines that serve it, its folder and its number of drafts."""

    def make(engine, kind):
        out = tmp_path / 'it\'s {served} "well" $HOME'  # to be quoted
        if kind == "draft_lm":
            source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", TARGET))
        else:
            written = write(checks.SETTINGS[kind])
            source = replace(written.source(), target=TargetFolder(written.target_folder, TARGET))
        export(source, engine, out)
        lines = (out / SERVE_FILE).read_text().partition("\n\n")[2].splitlines()
        return "\n".join(line for line in lines if not line.startswith("- ")).strip(), str(out), source.num_speculative_tokens

    return make


@pytest.mark.parametrize("kind", FORMS["vllm"])
def test_vllm(serve_lines, kind):
    line, out, tokens = serve_lines("vllm", kind)
    config = {"method": VLLM_METHODS.get(kind, kind), "model": out, "num_speculative_tokens": tokens}
    config |= {"parallel_drafting": True} if kind == "peagle" else {}
    options = ["--hf-overrides", '{"num_nextn_predict_layers": 1}'] if kind == "mtp" else []
    assert shlex.split(line) == ["vllm", "serve", TARGET, *options, "--speculative-config", json.dumps(config)]


@pytest.mark.parametrize(
    ("kinds", "flags"),
    [
        (["full_attention"], set()),
        (["sliding_attention", "full_attention"], {"--disable-hybrid-kv-cache-manager"}),
        (["linear_attention", "full_attention"], set()),
    ],
)
def test_vllm_keeps_the_caches_of_a_draft_lm_and_of_a_target_of_several_kinds_of_layers_apart(tiny_run, kinds, flags):
    target = TargetFolder(tiny_run / "target", TARGET)
    target.model.config.layer_types = kinds
    words = shlex.split(FORMS["vllm"]["draft_lm"](read_source(tiny_run / "artifact", target)).serve("folder"))
    assert set(words[3 : words.index("--speculative-config")]) == flags


@pytest.mark.parametrize("kind", FORMS["sglang"])
def test_sglang(serve_lines, kind):
    line, out, tokens = serve_lines("sglang", kind)
    words = ["python", "-m", "sglang.launch_server", "--model-path", TARGET, "--speculative-algorithm", SGLANG_ALGORITHMS[kind]]
    words += ["--speculative-draft-model-path", out]
    if kind not in ("dflash", "domino"):  # a block has its own length; the last number has the pending token in it
        words += ["--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(tokens + 1)]
    assert shlex.split(line) == words


@pytest.mark.parametrize(
    ("kind", "options"), [("draft_lm", {"assistant_model"}), ("dflash", {"assistant_model", "speculation_type", "do_sample"})]
)
def test_transformers(serve_lines, kind, options):
    lines, out, _ = serve_lines("transformers", kind)
    calls = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    (generate,) = [call for call in calls if call.func.attr == "generate"]
    assert {keyword.arg for keyword in generate.keywords} - {None} == options
    loads = [call.args[0].value for call in calls if call.func.attr == "from_pretrained"]
    assert loads == [TARGET, out]
