"""Training, data, caches and evaluation on a target that processes share: the results of one process that holds all of it.

Groups of two and four processes over gloo on the CPU, float32.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.command import DONE
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import EvalConfig
from distill.cache.writer import make_cache
from distill.generation.make_dataset import make_dataset
from eval.evaluation import evaluate
from heads.frozen.loading import load_target
from heads.frozen.processes import join_processes
from tests.support.launched_runs import NEEDS_DEEPSPEED, Runs, assert_same_metrics, read_metric
from tests.support.training_runs import read_evaluations
from train.loop.telemetry import METRICS_FILE

STEPS, TOLERANCE = 20, 1e-5


class SplitRuns(Runs):
    """Runs that share a target, beside those of one process."""

    def settings(self, name, task, num_processes, shards=1, **changes):
        """Return a config whose step takes four conversations, one in each micro-batch."""
        target = self.project.target | {"shards": shards}
        rhythm = {"batch_size": 1, "gradient_accumulation_steps": 4 // num_processes, "max_steps": STEPS}
        rhythm |= {"eval_every_steps": 10, "checkpoint_every_steps": 5, "process_timeout_seconds": 60}
        return self.config(name, task, num_processes, {"target": target} | changes, **rhythm)

    def alone(self, task, **changes):
        """Return the output of one process that holds the whole target."""
        key = f"alone-{task}-{json.dumps(changes)}"
        if key not in self.done:
            config = self.settings(f"alone-{len(self.done)}", task, 1, **changes)
            (child,) = self.start(config, None, 1)
            assert child.end() == DONE, child.said[-3000:]
            self.done[key] = Path(config.output)
        return self.done[key]

    def together(self, task, num_processes, recipe, **changes):
        """Return the output of processes that share the target."""
        name = f"{task}-{num_processes}-{recipe}-{len(self.children)}"
        config = self.settings(name, task, num_processes, 2, **changes)
        ended(self.start(config, recipe, num_processes))
        return Path(config.output)


def ended(children):
    codes = [child.end(100) for child in children]
    assert codes == [DONE] * len(children), [child.said[-3000:] for child in children]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = SplitRuns(tmp_path_factory.mktemp("split"), num_prompts=120)  # all steps within an epoch
    yield runs
    for child in runs.children:
        child.kill()


def assert_same(found: Path, expected: Path) -> None:
    """Two runs had the same losses, gradients and scores, and the same weights in the end."""
    losses = read_metric(expected, "loss")
    assert len(set(losses)) == STEPS
    assert_same_metrics(found, expected)
    files = (folder / "artifact" / "model.safetensors" for folder in (found, expected))
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=TOLERANCE)
    scores = [
        [row["tokens_per_target_step"] for row in read_evaluations(folder / METRICS_FILE)] for folder in (found, expected)
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2


MTP = {"head": {"kind": "mtp"}}  # its module starts as a copy of one of the target's blocks
CHECKED = {"sanity": {"enabled": True}}
slow = pytest.mark.slow
CASES = [
    pytest.param("heads", 2, "ddp_cpu", {}, id="two"),
    pytest.param("heads", 4, "fsdp2", {}, id="two groups, the head under FSDP2", marks=slow),
    pytest.param("distill", 2, "zero3", {}, id="a draft LM under ZeRO-3", marks=[slow, NEEDS_DEEPSPEED]),
    pytest.param("heads", 2, "ddp_cpu", MTP, id="MTP", marks=slow),
    pytest.param("heads", 2, "ddp_cpu", CHECKED, id="after sanity checks", marks=slow),
]


@pytest.mark.parametrize(("task", "num_processes", "recipe", "changes"), CASES)
def test_processes_that_share_the_target_have_the_losses_the_weights_and_the_scores_of_one(
    runs, task, num_processes, recipe, changes
):
    together = runs.together(task, num_processes, recipe, **changes)
    assert_same(together, runs.alone(task, **changes))


def making(config):
    """Make what this config is of."""
    if isinstance(config, EvalConfig):
        return evaluate(config)
    (make_dataset if isinstance(config, DataConfig) else make_cache)(config)
    return DONE


@pytest.mark.slow
def test_groups_make_the_data_the_caches_and_the_reports_of_one_process(runs):
    results = []
    draft = str(runs.alone("heads") / "artifact")
    for num_processes, shards in ((1, 1), (4, 2)):
        folder = runs.folder / f"made-{num_processes}"
        target = runs.project.target | {"shards": shards}
        cache = runs.project.cache(folder / "cache").model_dump() | {"taps": [1, 3], "dtype": "float32"}
        evaluated = {
            "draft": draft,
            "suite": {"path": str(runs.folder / "prompts.jsonl"), "num_prompts": 6},
            "decode": {"max_new_tokens": 12, "num_speculative_tokens": 3, "batch_size": 2, "temperature": 0.8},
            "repeats": 1,
            "output": str(folder / "report"),
        }
        configs = (
            DataConfig.model_validate(runs.project.data(folder / "data").model_dump() | {"target": target}),
            CacheConfig.model_validate(cache | {"target": target}),
            EvalConfig.model_validate(evaluated | {"target": target}),
        )
        for config in configs:
            ended(runs.start(config, None if shards == 1 else "ddp_cpu", num_processes, main=making))
        results.append(folder)
    texts = [(folder / "data" / "train.jsonl").read_text() for folder in results]
    assert texts[0] == texts[1]
    shards = [sorted((folder / "cache").glob("*.safetensors")) for folder in results]
    assert len(shards[0]) == len(shards[1]) > 1
    for pair in zip(*shards, strict=True):
        rows = [{name: values for name, values in load_file(file).items() if name != "checksums"} for file in pair]
        torch.testing.assert_close(*rows, rtol=0, atol=1e-4)
    first, second = (json.loads((folder / "report" / "report.json").read_text()) for folder in results)
    for name in ("tokens_per_target_step", "num_rounds", "accepted_histogram", "per_prompt"):
        assert first["acceptance"][name] == second["acceptance"][name], name
    assert first["lossless"]["verdict"] == second["lossless"]["verdict"]


def test_a_process_holds_its_share_of_the_weights(runs, tmp_path):
    def counting(config):
        place = join_processes(config.target).process_index
        weights = list(load_target(config.target).model.parameters())
        held = sum(getattr(each, "_local_tensor", each).nbytes for each in weights)
        (tmp_path / f"{place}.json").write_text(json.dumps({"held": held, "whole": sum(each.nbytes for each in weights)}))
        return DONE

    config = runs.settings("counted", "heads", 4, shards=4)
    ended(runs.start(config, "ddp_cpu", 4, main=counting))
    held = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert len(held) == 4
    assert all(each["held"] <= 0.4 * each["whole"] for each in held)
