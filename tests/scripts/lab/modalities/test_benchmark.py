"""The benchmark of drafts for codes on a tiny target: rows that are those of the reports, made once."""

import json
from pathlib import Path

import pytest

from configs.runtime.command import DONE
from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig
from configs.schema.evaluation import LosslessConfig
from configs.schema.training import DistillConfig, HeadsConfig
from distill.generation.make_dataset import make_dataset
from eval.report.schema import load_report
from scripts.lab.modalities import benchmark
from scripts.lab.modalities.benchmark import compare_modalities
from scripts.lab.settings import BenchModalitiesConfig
from scripts.trials import trained_runs
from tests.support.evaluations import tiny_evaluation
from train.launch import run_distillation, run_heads


def is_short(prompt, answer, reference):
    return float(len(answer.split()) < 6)


def numbers(answer):
    return [float(answer.count("1")), float(len(answer.split()))]


@pytest.fixture(scope="module")
def bench(tmp_path_factory, tiny_llama):
    """The benchmark's config as a dict, on a target of 12 ids with an EAGLE-3 head and a relaxed evaluation, as of a demo."""
    folder = tmp_path_factory.mktemp("codes")
    model = tiny_llama(seed=3, vocab_size=12, layers=3, spread=4.0).float()
    model.config.eos_token_id = model.generation_config.eos_token_id = 11
    model.save_pretrained(folder / "target")
    target = {"name": str(folder / "target"), "tokens": "ids", "dtype": "float32", "device": "cpu"}
    rows = [json.dumps({"prompt_ids": [8 + n % 3], "sample": n}) + "\n" for n in range(48)]
    (folder / "prompts.jsonl").write_text("".join(rows[:40]))
    (folder / "suite.jsonl").write_text("".join(rows[40:]))
    data = {
        "target": target,
        "prompts": {"source": "file", "path": f"{folder}/prompts.jsonl", "num_prompts": 40},
        "answers": {"max_new_tokens": 8, "temperature": 1.0},
        "held_out_share": 0.2,
        "output": f"{folder}/data",
    }
    make_dataset(DataConfig.model_validate(data))
    decode = {"num_speculative_tokens": 2, "max_new_tokens": 8, "temperature": 1.0}
    shared = {
        "target": target,
        "data": {name: f"{folder}/data/{name}.jsonl" for name in ("train", "held_out")} | {"max_length": 16},
        "schedule": {"max_steps": 2, "mixed_precision": "no", "trackers": []},
        "held_out": {"num_prompts": 1, "decode": decode},
        "num_speculative_tokens": 2,
    }
    unchecked = shared | {"sanity": {"enabled": False}}
    eagle3 = unchecked | {"head": {"kind": "eagle3", "num_depths": 2, "taps": [1, 2, 3]}, "output": f"{folder}/eagle3"}
    run_heads(HeadsConfig.model_validate(eagle3))
    lossy = {"kind": "tolerance", "samples": 3}
    quality = {"perplexity": False, "scorers": [f"{__name__}.is_short"], "features": f"{__name__}.numbers"}
    relaxed = tiny_evaluation(folder, folder / "out", target=target, draft=f"{folder}/eagle3/artifact", quality=quality)
    relaxed = relaxed.model_copy(
        update={
            "decode": relaxed.decode.model_copy(update=decode),
            "baselines": [],
            "lossless": LosslessConfig(false_alarm_rate=None),
        }
    )
    written = {
        "medusa": unchecked | {"head": {"kind": "medusa", "num_depths": 2}},
        "draft": shared | {"student": {"layers": [0]}},
        "relaxed": (settings := relaxed.model_dump(mode="json")) | {"decode": settings["decode"] | {"lossy": lossy}},
        "strict": settings,
    }
    for name, content in written.items():
        (folder / f"{name}.yaml").write_text(json.dumps(content))
    modality = {"relaxed": f"{folder}/relaxed.yaml", "recipes": [f"{folder}/medusa.yaml"]}
    return {
        "modalities": {"codes": modality | {"draft_models": [f"{folder}/draft.yaml"]}},
        "num_timed": 3,
        "runs": f"{folder}/runs",
        "output": f"{folder}/results.json",
    }


def test_each_draft_has_a_strict_and_a_relaxed_row_of_its_reports_and_nothing_is_made_twice(bench, monkeypatch):
    made = []

    def run_training(entry, path):
        made.append(entry.name)
        schema, run = {"heads.py": (HeadsConfig, run_heads), "distill.py": (DistillConfig, run_distillation)}[entry.name]
        return run(load_config(schema, path))

    def evaluate(config, evaluate=benchmark.evaluate):
        made.append(config)
        return evaluate(config)

    monkeypatch.setattr(trained_runs, "run_training", run_training)
    monkeypatch.setattr(benchmark, "evaluate", evaluate)
    monkeypatch.setattr("eval.evaluation.render_html", lambda report: "")  # drawing takes longer than all the rest
    config = BenchModalitiesConfig.model_validate(bench)
    assert compare_modalities(config) == DONE
    rows = json.loads(Path(bench["output"]).read_text())["rows"]
    families = [("eagle3", "strict"), ("eagle3", "tolerance"), ("medusa", "strict"), ("medusa", "tolerance")]
    families += [("draft_lm", "strict"), ("draft_lm", "tolerance")]
    assert [(row["family"], row["rule"]) for row in rows] == families
    assert [row["lossless"] for row in rows] == ["by its rule", "lossy_by_design"] * 3
    evaluations = [each for each in made if not isinstance(each, str)]
    assert ([each for each in made if isinstance(each, str)], len(evaluations)) == (["heads.py", "distill.py"], 12)
    reports = [load_report(Path(each.output) / "report.json") for each in evaluations]
    for row, whole, timed in zip(rows, reports[::2], reports[1::2], strict=True):
        assert (whole.decode.batch_size, timed.decode.batch_size, row["prompts"], timed.prompts.num_prompts) == (2, 1, 8, 3)
        assert [row["tau_low"], row["tau_high"]] == whole.acceptance.tokens_per_target_step_ci
        assert (row["tau"], row["speedup"]) == (whole.acceptance.tokens_per_target_step, timed.speed.decode_speedup)
        score = whole.quality.scores[f"{__name__}.is_short"]
        assert (row["is_short_less_plain"], row["is_short_less_plain_low"]) == (score.difference, score.difference_ci[0])
        assert row["frechet_distance"] == whole.quality.feature_distance.between
    for strict, relaxed in zip(rows[::2], rows[1::2], strict=True):
        assert (strict["tau_vs_strict"], relaxed["tau_vs_strict"]) == (None, pytest.approx(relaxed["tau"] / strict["tau"]))
        assert relaxed["tau_vs_strict_low"] <= relaxed["tau_vs_strict"] <= relaxed["tau_vs_strict_high"]
    made.clear()
    assert compare_modalities(config) == DONE
    assert made == []
    suite = Path(evaluations[0].suite.path)
    suite.write_text(suite.read_text() + json.dumps({"prompt_ids": [8], "sample": 99}) + "\n")
    monkeypatch.setattr(benchmark, "evaluate", lambda config: pytest.fail("measured anew"))
    with pytest.raises(pytest.fail.Exception, match="measured anew"):
        compare_modalities(config)


def test_a_config_without_relaxed_modalities_is_refused(bench):
    with pytest.raises(ConfigError, match=r"scripts/lab/configs/bench/modalities\.yaml"):
        compare_modalities(BenchModalitiesConfig())
    codes = bench["modalities"]["codes"]
    strict = {"codes": codes | {"relaxed": codes["relaxed"].replace("relaxed", "strict")}}
    with pytest.raises(ConfigError, match=r"modalities\.codes\.relaxed: .*strict\.yaml decodes strictly"):
        compare_modalities(BenchModalitiesConfig.model_validate(bench | {"modalities": strict}))
