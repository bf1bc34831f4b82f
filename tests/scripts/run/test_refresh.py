"""`draftsmith run --from ARTIFACT --prompts LOG`: from a log to a verdict, without secrets; drift by week."""

import json
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from configs.runtime.command import BAD_INPUT, DONE, TERMINATED
from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.schema.commands.running import RunConfig
from configs.schema.evaluation import SuiteConfig
from eval.report.schema import load_report
from scripts.run.drift import write_weeks
from scripts.run.log import read_log, write_log_prompts
from scripts.run.mix import mix

KEY, MAIL = "sk-" + "a1B2" * 8, "ann@example.com"
PEM = "-----BEGIN RSA PRIVATE KEY-----\\nMIIEow\\n-----END RSA PRIVATE KEY-----"
START = 1_790_000_000  # seconds since 1970, in the 39th week of 2026


def asked(number):
    return " ".join(f"w{(7 * number + 3 * place) % 58}" for place in range(3 + number % 5))


def user(text):
    return {"role": "user", "content": text}


def as_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def lines_of(path):
    return Path(path).read_text().splitlines()


def log_rows(num=30):
    """Requests of three weeks, two a day, with two secrets, a duplicate, private keys and a row that no format fits."""
    rows = [
        {"id": f"user-{number}", "time": START + 43_200 * number, "request": {"messages": [user(asked(number))]}}
        for number in range(num)
    ]
    rows[3]["request"]["messages"] = [{"role": "system", "content": f"w5 {MAIL}"}, user(f"w9 w8 key {KEY} w1")]
    rows[4] = {"time": "2026-09-24T12:00:00Z", "request": {"messages": [user(PEM)]}}
    rows[6] = {**rows[6], "id": MAIL, "request": rows[5]["request"]}
    rows[8]["request"]["messages"] = [user(PEM), {"role": "assistant", "content": "w4"}, user("w5 w6 w7")]
    return [*rows, {"time": START, "what": "ever"}]


@pytest.fixture
def refresh(draftsmith, tiny_run, head, tmp_path):
    """A function that trains the head on with `log.jsonl`, as its files say or with other options."""
    Path("gate.yaml").write_text("rules: [{metric: acceptance.tokens_per_target_step, min: 0.5, relative_to_baseline: true}]")
    Path("log.jsonl").write_text(as_lines(log_rows()))
    shutil.copytree(head, "served")

    def run(*more, served="served", target=tiny_run / "target", output="out"):
        begin = ["run", target, "--from", served, "--prompts", "log.jsonl", "--output", output, "--budget", "20m", "--yes"]
        settings = [
            "target.dtype=float32",
            "gate=gate.yaml",
            "eval.suites=[]",
            "eval.baselines=[]",
            "eval.decode.max_new_tokens=12",
            "train.schedule.epochs=1",
            "refresh.replay_share=0.2",
        ]
        return draftsmith(*begin, "--set", *settings, *more)

    run.called, run.stopped = draftsmith.called, draftsmith.stopped
    return run


def test_a_log_becomes_a_judged_draft_without_its_secrets_and_a_second_run_repeats_nothing(refresh):
    refresh.stopped.append("eval/gate.py")
    assert refresh() == TERMINATED
    in_small = ["scripts/data.py", "scripts/cache.py", "train/heads.py", "eval/run.py", "scripts.export"]
    exports = ["scripts.export", "scripts.export", "scripts.check"]
    assert refresh.called == ["scripts/data.py", *in_small, *in_small[:4], "eval/run.py", *exports, "eval/gate.py"]
    Path("log.jsonl").write_text(as_lines(log_rows(31)))  # a run keeps what it has read
    assert refresh() == DONE
    assert refresh.called == ["eval/gate.py", "eval/compare.py"]
    manifest = json.loads(Path("out/log/manifest.json").read_text())
    assert manifest["dropped"] == {"duplicate": 1, "private_key": 2, "unreadable": 1}
    assert manifest["masked"] == {"email": 1, "token": 1}
    assert manifest["kept"] == 27
    written = [path for path in Path("out").rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".md")]
    assert [path for path in written if any(each in path.read_text() for each in (KEY, MAIL, "MIIEow", "user-7"))] == []
    trained = json.loads(Path("out/train/artifact/draftsmith.json").read_text())
    assert trained["training"]["init"] == str(Path("served").absolute())
    counts = json.loads(Path("out/mix/manifest.json").read_text())["counts"]["train"]["by_source"]
    assert counts["replay"] == round(counts["traffic"] * 0.2 / 0.8)
    texts = [
        {json.dumps(json.loads(line)["messages"][:-1]) for line in lines_of(f"out/mix/{name}.jsonl")}
        for name in ("train", "held_out", "suite")
    ]
    assert all(texts)
    assert texts[0].isdisjoint(texts[1] | texts[2])
    assert texts[1].isdisjoint(texts[2])  # what chooses the checkpoint is not measured
    new, served = (load_report(Path("out") / name / "report.json") for name in ("eval", "baseline"))
    assert new.prompts.sha256 == served.prompts.sha256
    assert new.prompts.num_prompts == load_config(RunConfig, Path("out/draft.yaml")).eval["suite.num_prompts"]
    assert Path("out/comparison.md").is_file()


def test_what_the_served_draft_was_trained_on_is_not_measured_and_what_is_asked_now_is_not_trained_on(
    tiny_run, tiny_data, head, tmp_path
):
    data, made = tmp_path / "data", Path(tiny_data.output)
    shutil.copytree(made, data)
    train, held_out = lines_of(made / "train.jsonl"), lines_of(made / "held_out.jsonl")
    (data / "held_out.jsonl").write_text("\n".join([*held_out, train[0]]) + "\n")
    (tmp_path / "suite.jsonl").write_text(as_lines([{"messages": json.loads(train[1])["messages"][:1]}]))
    (data / "old.jsonl").write_text("\n".join([*held_out, train[1], train[2]]) + "\n")
    mix(
        run_of(tiny_run, tmp_path, head, replay=str(data / "old.jsonl"), replay_share=0.5),
        [SuiteConfig(path=str(tmp_path / "suite.jsonl"))],
        data,
        tmp_path / "mix",
    )
    counts = json.loads((tmp_path / "mix" / "manifest.json").read_text())["counts"]
    assert counts["held_out"]["left_out_trained_on"] == 1
    assert counts["train"]["left_out_of_suites"] == 1
    assert counts["train"]["by_source"]["replay"] == 1


def test_drift_is_tau_by_week_and_trains_nothing(refresh):
    Path("log.jsonl").write_text(as_lines([*log_rows(), {"messages": [user("w40 w41 w42")]}]))
    weeks = (
        "refresh.min_prompts=2",
        "refresh.prompts_per_week=3",
        "eval.decode.max_new_tokens=6",
    )
    assert refresh("--drift", "--set", *weeks) == DONE
    assert refresh.called == ["eval/run.py"]
    found = load_report(Path("out/drift/eval/report.json"))
    assert [found.prompts.suite, *found.suites] == ["2026-W39", "2026-W40", "2026-W41"]
    assert [each.prompts.num_prompts for each in (found, *found.suites.values())] == [3, 3, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "log.jsonl"),
        ('{"what": 1}\n', "--prompts"),
        (json.dumps({"messages": [user("w1")]}) + "\n", "refresh.time_field"),
    ],
)
def test_a_log_that_cannot_be_used_is_one_sentence(refresh, capsys, text, said):
    Path("log.jsonl").write_text(text)
    assert refresh("--drift") == BAD_INPUT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_a_served_draft_of_another_target_and_a_log_that_is_none_are_refused(
    refresh, draftsmith, tiny_llama, tiny_tokenizer, capsys
):
    tiny_llama(seed=7).save_pretrained("other")
    tiny_tokenizer.save_pretrained("other")
    assert refresh(target="other") == BAD_INPUT
    assert "--from" in capsys.readouterr().err
    assert draftsmith("run", "other", "--from", "served") == BAD_INPUT
    assert "--from" in capsys.readouterr().err
    assert draftsmith("run", "other", "--drift") == BAD_INPUT
    assert "--drift" in capsys.readouterr().err
    assert refresh.called == []


# --- the log ----------------------------------------------------------------------------------------------------------


def run_of(tiny_run, folder, served="none", template=None, **settings):
    return RunConfig.model_validate(
        {
            "target": {"name": str(tiny_run / "target"), "chat_template": template},
            "prompts": {"source": "file", "path": str(folder / "log.jsonl"), "num_prompts": settings.pop("num_prompts", 100)},
            "refresh": {"served": str(served), **settings},
            "output": str(folder),
        }
    )


def weeks_of(run, served, folder):
    """Return the messages that drift asks by week."""
    write_weeks(run, served, read_log(run), folder)
    return {week.stem: [json.loads(line)["messages"] for line in lines_of(week)] for week in folder.glob("*.jsonl")}


def test_the_newest_conversations_are_taken_whatever_their_order_in_the_log(tiny_run, tmp_path):
    zones = [timezone(timedelta(hours=9 - 12 * (number % 2))) for number in range(9)]
    times = [datetime.fromtimestamp(START + 3600 * number, zone).isoformat() for number, zone in enumerate(zones)]
    rows = [{"prompt": f"w{number}", "time": times[number]} for number in (4, 0, 8, 2, 6, 1, 7, 3, 5)]
    (tmp_path / "log.jsonl").write_text(as_lines(rows))
    write_log_prompts(run_of(tiny_run, tmp_path, num_prompts=5), tmp_path / "log" / "prompts.jsonl")
    taken = [json.loads(line)["messages"][0]["content"] for line in lines_of(tmp_path / "log" / "prompts.jsonl")]
    assert taken == ["w8", "w7", "w6", "w5", "w4"]  # a run answers the first


def test_drift_is_measured_on_no_prompt_that_the_draft_was_trained_on(tiny_run, tiny_data, head, tmp_path):
    known = json.loads(lines_of(f"{tiny_data.output}/train.jsonl")[0])["messages"][:-1]
    rows = [{"messages": each, "time": "2027-01-01T12:00:00Z"} for each in (known, [user("w40 w41 w42")])]
    (tmp_path / "log.jsonl").write_text(as_lines(rows))
    found = weeks_of(run_of(tiny_run, tmp_path, min_prompts=1), head, tmp_path / "weeks")
    assert found == {"2026-W53": [[user("w40 w41 w42")]]}


def test_conversations_that_begin_alike_are_one_prompt_of_their_week(tiny_run, head, tmp_path):
    rows = [{"turns": ["w1 w2", f"w{3 + number}"], "time": START + number} for number in range(3)]
    (tmp_path / "log.jsonl").write_text(as_lines(rows))
    assert weeks_of(run_of(tiny_run, tmp_path, min_prompts=1), head, tmp_path / "weeks") == {"2026-W39": [[user("w1 w2")]]}


ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') == loop.index0 % 2 %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.mark.parametrize(
    "messages",
    [
        [user("w3"), user("w4")],
        [user("w3 \ud83d")],
        [user([{"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}])],
    ],
    ids=["roles", "half a character", "image"],
)
def test_a_conversation_that_the_target_cannot_be_asked_costs_its_row_and_not_the_run(tiny_run, tmp_path, caplog, messages):
    (tmp_path / "alternating.jinja").write_text(ALTERNATING)
    rows = [{"messages": [user("w2")]}, {"messages": messages}, {"messages": [user("w1")]}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_log(run_of(tiny_run, tmp_path, template=str(tmp_path / "alternating.jinja")))
    assert [row.prompt.turns for row in found.rows] == [("w1",), ("w2",)]
    assert found.dropped == {"unreadable": 1}
    assert "line 2" in caplog.text


def test_a_line_that_is_still_written_is_left_for_the_next_run_and_one_in_the_middle_is_bad_input(tiny_run, tmp_path):
    whole = as_lines([{"messages": [user("w1 ü")]}]).encode()
    (tmp_path / "log.jsonl").write_bytes(2 * whole + whole[:-6])  # in the middle of a character
    assert read_log(run_of(tiny_run, tmp_path)).num_rows == 2
    (tmp_path / "log.jsonl").write_bytes(whole[:-6] + b"\n" + whole)
    with pytest.raises(InputError, match="log"):
        read_log(run_of(tiny_run, tmp_path))
