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


def parsed(line):
    """Return a command's words before its first flag, and its flags with their values."""
    words = shlex.split(line)
    first = next(number for number, word in enumerate(words) if word.startswith("--"))
    return words[:first], dict(zip(words[first::2], words[first + 1 :: 2], strict=True))


@pytest.mark.parametrize("kind", FORMS["vllm"])
def test_vllm(serve_lines, kind):
    line, out, tokens = serve_lines("vllm", kind)
    command, flags = parsed(line)
    config = {"method": VLLM_METHODS.get(kind, kind), "model": out, "num_speculative_tokens": tokens}
    assert command == ["vllm", "serve", TARGET]
    assert json.loads(flags.pop("--speculative-config")) == config | ({"parallel_drafting": True} if kind == "peagle" else {})
    assert flags.keys() == ({"--hf-overrides"} if kind == "mtp" else set())


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
    chain = {"steps": tokens, "eagle-topk": 1, "num-draft-tokens": tokens + 1}  # with the pending one
    chain = {f"--speculative-{'num-steps' if name == 'steps' else name}": str(value) for name, value in chain.items()}
    command, flags = parsed(line)
    assert command == ["python", "-m", "sglang.launch_server"]
    assert flags == {
        "--model-path": TARGET,
        "--speculative-algorithm": SGLANG_ALGORITHMS[kind],
        "--speculative-draft-model-path": out,
    } | ({} if kind in ("dflash", "domino") else chain)  # a block has its own length


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("draft_lm", {"assistant_model"}),
        ("dflash", {"assistant_model", "speculation_type", "do_sample"}),
        ("mtp", {"use_mtp", "do_sample"}),
    ],
)
def test_transformers(serve_lines, kind, options):
    lines, out, _ = serve_lines("transformers", kind)
    calls = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    (generate,) = [call for call in calls if call.func.attr == "generate"]
    assert {keyword.arg for keyword in generate.keywords} - {None} == options
    loads = [call.args[0].value for call in calls if call.func.attr == "from_pretrained"]
    assert loads == ([out] if kind == "mtp" else [TARGET, out])
