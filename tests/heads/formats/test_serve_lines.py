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
    """A function that exports a draft of a kind; gives the lines that serve it, and its folder."""

    def make(engine, kind):
        out = tmp_path / 'it\'s {served} "well" $HOME'  # to be quoted
        if kind == "draft_lm":
            source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", TARGET))
        else:
            written = write(checks.SETTINGS[kind])
            source = replace(written.source(), target=TargetFolder(written.target_folder, TARGET))
        export(source, engine, out)
        title, _, rest = (out / SERVE_FILE).read_text().partition("\n\n")
        assert title == f"Serve with {engine}:"
        lines = [line for line in rest.splitlines() if not line.startswith("- ")]
        return "\n".join(lines).strip(), out.resolve(), source

    return make


def parsed(line):
    """Return a command's words before its first flag, and its flags with their values."""
    words = shlex.split(line)
    first = next(number for number, word in enumerate(words) if word.startswith("--"))
    return words[:first], dict(zip(words[first::2], words[first + 1 :: 2], strict=True))


@pytest.mark.parametrize("kind", FORMS["vllm"])
def test_vllm(serve_lines, kind):
    line, out, source = serve_lines("vllm", kind)
    command, flags = parsed(line)
    method = {
        "method": VLLM_METHODS.get(kind, kind),
        "model": str(out),
        "num_speculative_tokens": source.num_speculative_tokens,
    }
    assert command == ["vllm", "serve", TARGET]
    assert json.loads(flags.pop("--speculative-config")) == method | ({"parallel_drafting": True} if kind == "peagle" else {})
    assert flags.keys() == ({"--hf-overrides"} if kind == "mtp" else set())


@pytest.mark.parametrize(
    ("kinds", "flags", "is_noted"),
    [
        (["full_attention"], set(), False),
        (["sliding_attention"], set(), False),
        (["sliding_attention", "full_attention"], {"--disable-hybrid-kv-cache-manager"}, True),
        (["linear_attention", "full_attention"], set(), True),
    ],
)
def test_vllm_keeps_the_caches_of_a_draft_lm_and_of_a_target_of_several_kinds_of_layers_apart(tiny_run, kinds, flags, is_noted):
    target = TargetFolder(tiny_run / "target", TARGET)
    target.model.config.layer_types = kinds
    layout = FORMS["vllm"]["draft_lm"](read_source(tiny_run / "artifact", target))
    words = shlex.split(layout.serve("folder"))
    assert set(words[3 : words.index("--speculative-config")]) == flags
    assert any("0.32" in note for note in layout.notes) is is_noted


@pytest.mark.parametrize("kind", FORMS["sglang"])
def test_sglang(serve_lines, kind):
    line, out, source = serve_lines("sglang", kind)
    tokens = source.num_speculative_tokens
    chain = {
        "--speculative-num-steps": str(tokens),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(tokens + 1),  # with the pending one
    }
    command, flags = parsed(line)
    assert command == ["python", "-m", "sglang.launch_server"]
    assert flags == {
        "--model-path": TARGET,
        "--speculative-algorithm": SGLANG_ALGORITHMS[kind],
        "--speculative-draft-model-path": str(out),
    } | ({} if kind in ("dflash", "domino") else chain)  # a block has its own length


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
    assert loads == ([str(out)] if kind == "mtp" else [TARGET, str(out)])
