"""Plain answers of the tiny target to four prompts, which engines and our decoder are compared on."""

import pytest

from configs.schema.target import TargetConfig
from eval.decoder.decode import Request
from heads.frozen.loading import load_target
from scripts.lab.engine_check.ours import decode_plainly

PROMPTS = [(7, 12, 3, 44, 9), (20, 9, 9, 31, 5, 6), (40, 11, 12), (50, 17, 2, 2)]
K = 3


@pytest.fixture(scope="session")
def bench(tiny_run):
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))
    requests = [Request(prompt_id=f"p{number}", category="c", tokens=ids) for number, ids in enumerate(PROMPTS)]
    return decode_plainly(target, requests, 20)
