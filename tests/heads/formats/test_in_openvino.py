"""OpenVINO's real converter: what it makes of our exports gives our logits, in OpenVINO itself.

Slow: `make serve-check` makes the environment and runs this. That OpenVINO GenAI drafts with these models what we draft is
what `scripts/lab/benchmark.py serve` finds out.
B batch, T positions, F all taps side by side, W draft vocabulary.
"""

import json
import subprocess

import pytest
import torch

from configs.schema.heads import Eagle3Settings
from configs.schema.target import TargetConfig
from heads.formats.exporting.exporter import export
from heads.formats.exporting.openvino import MODEL, find_converter
from heads.formats.exporting.source import TargetFolder, read_source
from heads.frozen.loading import load_target
from tests.support import family_checks as checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]
IDS = [7, 12, 3, 44, 9, 20, 9, 9, 31, 5, 6, 2, 50, 17]

# Run in the other environment: prints the outputs that have names asked for.
INFER = """
import json, sys
import numpy, openvino
model, inputs = sys.argv[1], json.loads(sys.stdin.read())
request = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
arrays = {name: numpy.array(value, dtype="float32" if name == "hidden_states" else "int64") for name, value in inputs.items()}
length = arrays["input_ids"].shape[1]
arrays |= {"attention_mask": numpy.ones((1, length), "int64"), "position_ids": numpy.arange(length)[None]}
arrays["beam_idx"] = numpy.zeros(1, "int32")
wanted = {port.any_name for port in request.model_inputs}
found = request.infer({name: value for name, value in arrays.items() if name in wanted})
outputs = {port.any_name: value.tolist() for port, value in found.items()}
print(json.dumps(outputs))
"""


def infer(folder, **inputs):
    """Run an exported model on a text; return its outputs by name."""
    command = [str(find_converter().with_name("python")), "-c", INFER, str(folder / MODEL)]
    done = subprocess.run(command, input=json.dumps(inputs), capture_output=True, text=True, check=True)
    return {name: torch.tensor(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


@torch.no_grad()
def test_a_draft_lm_gives_our_logits(tiny_run, tmp_path):
    source = read_source(
        tiny_run / "artifact", TargetFolder(tiny_run / "target", str(tiny_run / "target")), dtype=torch.float32
    )
    export(source, "openvino", tmp_path / "out")
    draft = load_target(TargetConfig(name=str(tiny_run / "artifact"), dtype="float32", device="cpu"))
    ours_TW, ids_W = draft.model(torch.tensor([IDS])).logits[0], slice(None)
    if source.vocabulary is not None:
        ids_W = source.vocabulary.token_ids_W
    theirs_TV = infer(tmp_path / "out", input_ids=[IDS])["logits"][0]
    torch.testing.assert_close(theirs_TV[:, ids_W], ours_TW[:, ids_W], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_eagle_gives_our_logits_and_names_its_tokens(write):
    written = write(Eagle3Settings(kind="eagle3", taps=[1, 2, 3], num_depths=1), vocabulary=checks.SOME_TOKENS)
    export(written.source(), "openvino", written.out)
    batch, states = checks.inputs_of(written.model, [IDS], written.head.taps)
    (first,) = written.head(batch, states)
    found = infer(written.out, input_ids=[IDS[1:]], hidden_states=states.joined_BTF[:, :-1].tolist())
    torch.testing.assert_close(found["logits"][0, first.origins_N], first.logits_of(first.hidden_ND), rtol=1e-4, atol=1e-4)
    ids_W = checks.SOME_TOKENS.token_ids_W
    assert torch.equal(found["d2t"] + torch.arange(len(ids_W)), ids_W)
