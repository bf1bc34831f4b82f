"""`scripts/refresh.py` on the tiny target: from a log to a verdict, resumed, without secrets; drift by week."""

import importlib
import json
import shutil
from pathlib import Path

import pytest

from configs.runtime.command import BAD_INPUT, DONE, GATE_FAILED, run_command
from configs.runtime.errors import InputError
from configs.schema.commands.refreshing import RefreshConfig
from configs.schema.commands.release import ExportConfig
from configs.schema.data import DataConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.training import DistillConfig, HeadsConfig
from eval.report.schema import load_report
from scripts import refresh
from scripts.refresh_steps.mixing import mix
from scripts.refresh_steps.run import write_weeks
from scripts.refresh_steps.traffic import read_traffic, write_traffic
from scripts.run import steps
from train.launch import run_heads

SCHEMAS = {
    "scripts.data": DataConfig,
    "train.distill": DistillConfig,
    "train.heads": HeadsConfig,
    "eval.run": EvalConfig,
    "eval.gate": GateConfig,
    "scripts.export": ExportConfig,
}
STEPS = ["scripts.data", "eval.run", "train.heads", "eval.run", "eval.gate"]
KEY, MAIL = "sk-" + "a1B2" * 8, "ann@example.com"
PEM = "-----BEGIN RSA PRIVATE KEY-----\\nMIIEow\\n-----END RSA PRIVATE KEY-----"


def asked(number):
    return " ".join(f"w{(7 * number + 3 * place) % 59}" for place in range(3 + number % 5))


def log_lines(num=30):
    """Requests of three weeks, a day apart, with two secrets, a duplicate, a private key and a row that no format fits."""
    rows = [
        {"id": f"user-{number}", "time": 1_790_000_000 + 43_200 * number, "request": {"messages": [user(asked(number))]}}
        for number in range(num)
    ]
    rows[3]["request"]["messages"] = [{"role": "system", "content": f"w5 {MAIL}"}, user(f"w9 w8 key {KEY} w1")]
    rows[4] = {"time": "2026-09-24T12:00:00Z", "request": {"messages": [user(PEM)]}}
    rows[6] = {**rows[6], "id": MAIL, "request": rows[5]["request"]}
    rows.append({"time": 1_790_000_000, "what": "ever"})
    return "".join(json.dumps(row) + "\n" for row in rows)


def lines_of(path):
    return Path(path).read_text().splitlines()


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def head(recipe, tmp_path_factory):
    """A head trained on the tiny data, by a recipe that its artifact holds."""
    output = tmp_path_factory.mktemp("head")
    settings = {"head": {"kind": "medusa", "num_depths": 2}, "sanity": {"enabled": False}, "output": str(output)}
    assert run_heads(HeadsConfig.model_validate(recipe | settings)) == DONE
    return output / "artifact"


@pytest.fixture
def run(tiny_run, tiny_data, head, tmp_path, monkeypatch):
    """A function that runs the command, its steps in this process; `run.ran` is which of them were started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eval.evaluation.render_html", lambda report: "")
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    ran = []

    def call(arguments):
        _, *arguments = arguments if arguments[0] == "-m" else (None, *arguments)
        name = ".".join(Path(arguments[0]).parts).removesuffix(".py")
        ran.append(name)
        entry = importlib.import_module(name)
        more = {"add_arguments": entry.add_arguments} if name in ("eval.gate", "scripts.export") else {}
        return run_command(SCHEMAS[name], entry.main, description="", argv=arguments[1:], **more)

    monkeypatch.setattr(steps, "run_step", call)

    def start(*arguments, **settings):
        values = {
            "target": {"name": str(tiny_run / "target"), "dtype": "float32", "device": "cpu"},
            "served": str(head),
            "log": {"path": "log.jsonl"},
            "answers": {"max_new_tokens": 8},
            "held_out_share": 0.4,
            "training": {"schedule": {"max_steps": 2}},
            "decode": {"num_speculative_tokens": 2, "max_new_tokens": 6},
            "old_suite": {"path": f"{tiny_data.output}/held_out.jsonl", "num_prompts": 4},
            "lossless": {"first_token_samples": 64},
            "bootstrap_samples": 200,
            "drift": {"min_prompts": 2, "prompts_per_week": 3},
            "gate": {"rules": []},
            "output": "out",
        }
        Path("config.json").write_text(json.dumps(values | settings))
        argv = ["--config", "config.json", *arguments]
        return run_command(RefreshConfig, refresh.main, description="", argv=argv, add_arguments=refresh.add_arguments)

    start.ran = ran
    return start


def test_a_log_becomes_a_judged_draft_without_its_secrets_and_a_second_run_repeats_nothing(run, head, monkeypatch):
    Path("log.jsonl").write_text(log_lines())
    assert run(exports=["vllm"]) == DONE
    assert run.ran == [*STEPS, "scripts.export"]
    manifest = json.loads(Path("out/traffic/manifest.json").read_text())
    assert manifest["dropped"] == {"duplicate": 1, "private_key": 1, "unreadable": 1}
    assert manifest["masked"] == {"email": 1, "token": 1}
    assert manifest["kept"] == 28
    written = [path for path in Path("out").rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".md")]
    assert [path for path in written if any(each in path.read_text() for each in (KEY, MAIL, "MIIEow", "user-7"))] == []
    trained = json.loads(Path("out/train/artifact/draftsmith.json").read_text())
    assert trained["training"]["init"] == str(head)
    found = json.loads(Path("out/refresh.json").read_text())
    assert found["verdict"] == "pass"
    new, replayed = found["trained_on"]["traffic"], found["trained_on"]["replay"]
    assert replayed == round(new * 0.3 / 0.7)
    assert found["tokens_per_target_step"]["old"]["num_prompts"] == 4
    low, high = found["tokens_per_target_step"]["traffic"]["ratio_ci"]
    assert low <= found["tokens_per_target_step"]["traffic"]["ratio"] <= high
    texts = [
        {json.dumps(json.loads(line)["messages"][:-1]) for line in lines_of(f"out/training_data/{name}.jsonl")}
        for name in ("train", "held_out", "suite")
    ]
    assert all(texts)
    assert texts[0].isdisjoint(texts[1] | texts[2])
    assert texts[1].isdisjoint(texts[2])  # what chooses the checkpoint is not measured
    assert run(exports=["vllm"]) == DONE
    assert run.ran == [*STEPS, "scripts.export", "eval.gate", "scripts.export"]
    verdict = [Path("out") / name for name in ("refresh.json", "refresh.md", "export")]
    assert all(path.exists() for path in verdict)
    Path("log.jsonl").write_text(log_lines(31))
    monkeypatch.setattr(steps, "run_step", lambda arguments: 143)
    assert run(exports=["vllm"]) == 143
    assert not any(path.exists() for path in verdict)  # a run that is cut off leaves no verdict of the one before


def test_what_the_served_draft_was_trained_on_is_not_measured(tiny_data, head, tmp_path):
    data, made = tmp_path / "data", Path(tiny_data.output)
    shutil.copytree(made, data)
    held_out = lines_of(made / "held_out.jsonl")
    (data / "held_out.jsonl").write_text("\n".join([*held_out, lines_of(made / "train.jsonl")[0]]) + "\n")
    suite = {"path": f"{made}/held_out.jsonl", "num_prompts": 1}
    config = RefreshConfig.model_validate({"old_suite": suite})
    mix(config, head, data, None, tmp_path / "mixed")
    counts = json.loads((tmp_path / "mixed" / "manifest.json").read_text())["counts"]["held_out"]
    assert counts["left_out_trained_on"] == 1


def test_a_run_that_was_cut_off_resumes_with_the_log_it_had_read_and_the_next_takes_the_new_one(run, monkeypatch):
    def prompts_after(code, num):
        Path("log.jsonl").write_text(log_lines(num))
        monkeypatch.setattr(steps, "run_step", lambda arguments: code)
        assert run() == code
        return Path("out/traffic/prompts.jsonl").read_text()

    Path("log.jsonl").write_text("")
    assert run() == BAD_INPUT  # which ends a run, too
    first = prompts_after(143, 30)
    assert prompts_after(BAD_INPUT, 31) == first
    assert prompts_after(143, 31) != first


def test_a_draft_lm_is_trained_on_from_its_own_weights_and_a_gate_that_fails_exports_nothing(run, recipe, tiny_run):
    Path("log.jsonl").write_text(log_lines())
    Path("recipe.json").write_text(json.dumps(recipe | {"output": "unused", "student": {"layers": [0]}}))
    rule = {"metric": "acceptance.tokens_per_target_step", "suite": "old", "min": 9, "relative_to_baseline": True}
    served = {"served": str(tiny_run / "artifact"), "recipe": "recipe.json", "training": {"optimizer.learning_rate": 1e-9}}
    assert run(**served, gate={"rules": [rule]}, exports=["vllm"]) == GATE_FAILED
    assert json.loads(Path("out/refresh.json").read_text())["verdict"] == "fail"
    assert "scripts.export" not in run.ran
    found = json.loads(Path("out/refresh.json").read_text())["tokens_per_target_step"]["old"]
    assert found["ours"] == pytest.approx(found["theirs"])
    assert found["theirs"] > 1.2  # so it is not a new draft that is as bad


def test_drift_is_tau_by_week_and_trains_nothing(run):
    Path("log.jsonl").write_text(log_lines() + json.dumps({"messages": [user("w40 w41 w42")]}) + "\n")
    assert run("--drift") == DONE
    assert run.ran == ["eval.run"]
    found = load_report(Path("out/drift/eval/report.json"))
    assert [found.prompts.suite, *found.suites] == ["2026-W39", "2026-W40", "2026-W41"]
    assert [each.prompts.num_prompts for each in (found, *found.suites.values())] == [3, 3, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "log log.jsonl is empty"),
        ('{"what": 1}\n', "log.jsonl has 1 rows, of which none can be taken; the first that is not: log log.jsonl"),
        (json.dumps({"messages": [user("w1")]}), "1 of 1 rows do not say when they were served, log log.jsonl, line 1"),
    ],
)
def test_a_log_that_cannot_be_used_is_one_sentence(run, capsys, text, said):
    Path("log.jsonl").write_text(text)
    assert run("--drift") == BAD_INPUT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_a_served_draft_of_another_target_and_one_in_the_output_are_one_sentence_each(
    run, head, tiny_llama, tiny_tokenizer, capsys
):
    Path("log.jsonl").write_text(log_lines())
    tiny_llama(seed=7).save_pretrained("other")
    tiny_tokenizer.save_pretrained("other")
    assert run(target={"name": "other", "device": "cpu"}) == BAD_INPUT
    assert "target.name other has other weights: name the target that it serves" in capsys.readouterr().err
    assert run(output=str(head.parent)) == BAD_INPUT
    assert "lies in output, which a refresh replaces" in capsys.readouterr().err
    assert run.ran == []


def test_the_newest_conversations_are_taken_whatever_their_order_in_the_log(tiny_run, tmp_path):
    rows = [{"prompt": f"w{number}", "time": 1_790_000_000 + number} for number in (4, 0, 8, 2, 6, 1, 7, 3, 5)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = {"path": str(tmp_path / "log.jsonl"), "num_conversations": 5}
    write_traffic(RefreshConfig.model_validate({"target": {"name": str(tiny_run / "target")}, "log": log}), tmp_path / "out")
    taken = [json.loads(line)["messages"][0]["content"] for line in lines_of(tmp_path / "out" / "prompts.jsonl")]
    assert sorted(taken) == ["w4", "w5", "w6", "w7", "w8"]


def test_drift_is_measured_on_no_prompt_that_the_draft_was_trained_on(tiny_run, tiny_data, head, tmp_path):
    known = json.loads(lines_of(f"{tiny_data.output}/train.jsonl")[0])["messages"][:-1]
    rows = [{"messages": each, "time": 1_790_000_000} for each in (known, [user("w40 w41 w42")])]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"target": {"name": str(tiny_run / "target")}, "log": {"path": str(tmp_path / "log.jsonl")}}
    config = RefreshConfig.model_validate(values | {"drift": {"min_prompts": 1}})
    write_weeks(config, head, read_traffic(config), tmp_path / "weeks")
    (week,) = (tmp_path / "weeks").glob("*.jsonl")
    assert [json.loads(line)["messages"] for line in lines_of(week)] == [[user("w40 w41 w42")]]


def test_conversations_that_begin_alike_are_one_prompt_of_their_week(tiny_run, tmp_path):
    rows = [{"turns": ["w1 w2", f"w{3 + number}"], "time": 1_790_000_000 + number} for number in range(3)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"target": {"name": str(tiny_run / "target")}, "log": {"path": str(tmp_path / "log.jsonl")}}
    config = RefreshConfig.model_validate(values | {"drift": {"min_prompts": 1}})
    write_weeks(config, tiny_run / "artifact", read_traffic(config), tmp_path / "weeks")
    (week,) = (tmp_path / "weeks").glob("*.jsonl")
    assert [json.loads(line)["messages"] for line in lines_of(week)] == [[user("w1 w2")]]  # eval/run.py refuses one twice


ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') == loop.index0 % 2 %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def read(path, tiny_run, template=None):
    target = {"name": str(tiny_run / "target"), "chat_template": template}
    return read_traffic(RefreshConfig.model_validate({"target": target, "log": {"path": str(path)}}))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([user("w3"), user("w4")], "line 2: the target's chat template does not take the conversation: roles must alternate"),
        ([user("w3 \ud83d")], "line 2: the target's chat template does not take the conversation: 'utf-8' codec"),
        (
            [user([{"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}])],
            "line 2: the conversation has images",
        ),
    ],
    ids=["roles", "half a character", "image"],
)
def test_a_conversation_that_the_target_cannot_be_asked_costs_its_row_and_not_the_run(
    tiny_run, tmp_path, caplog, messages, said
):
    (tmp_path / "alternating.jinja").write_text(ALTERNATING)
    rows = [{"messages": [user("w1")]}, {"messages": messages}, {"messages": [user("w2")]}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(tmp_path / "log.jsonl", tiny_run, str(tmp_path / "alternating.jinja"))
    assert [row.prompt.turns for row in found.rows] == [("w1",), ("w2",)]
    assert found.dropped == {"unreadable": 1}
    assert said in caplog.text


def test_a_line_that_is_still_written_is_left_for_the_next_run_and_one_in_the_middle_is_bad_input(tiny_run, tmp_path):
    whole = json.dumps({"messages": [user("w1 ü")]}, ensure_ascii=False).encode() + b"\n"
    log = tmp_path / "log.jsonl"
    log.write_bytes(2 * whole + whole[:-6])  # in the middle of a character
    assert read(log, tiny_run).num_rows == 2
    log.write_bytes(whole[:-6] + b"\n" + whole)
    with pytest.raises(InputError, match="cannot read log"):
        read(log, tiny_run)
