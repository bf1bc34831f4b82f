"""Several processes share a run: no prompt dropped or doubled, the same numbers as one process has, failures listed."""

import json
import multiprocessing
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

import eval.measure.interleaved
from configs.runtime.errors import InputError
from configs.runtime.files import write_json
from eval.decoder.decode import decode
from eval.decoder.records import (
    AUTOREGRESSIVE,
    RECORDS,
    SPECULATIVE,
    WITH_LOOKUP,
    BatchFiles,
    Records,
    drop_batches,
    read_records,
)
from eval.evaluation import evaluate
from tests.support.evaluations import report_in, tiny_evaluation, write_suite
from tests.support.reports import numbers_of

MODES = [AUTOREGRESSIVE, SPECULATIVE, "prompt_lookup", WITH_LOOKUP]
TIMES = ("seconds", "speed", "shares", "phases")


@pytest.fixture
def config(tiny_run, tmp_path):
    rows = [{"question_id": f"q{n}", "category": f"c{n % 3}", "turns": [f"w{n} w{2 * n}", "w3"][: 1 + n % 2]} for n in range(7)]
    return tiny_evaluation(tiny_run, tmp_path / "evaluation", suite=write_suite(tmp_path / "suite.jsonl", rows))


def records_of(config):
    return read_records(Path(config.output) / RECORDS)


def run_as(rank, count, folder, config):
    """Evaluate as one of several processes that a launcher started."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    os.environ.update({name: str(value) for name, value in variables.items()} | {"ACCELERATE_USE_CPU": "true"})
    PartialState._reset_state()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    code = evaluate(config)
    torch.distributed.destroy_process_group()
    os._exit(code)  # what pytest would do at the end of a process is not this one's business


def run_shared(config, count, folder):
    context = multiprocessing.get_context("fork")  # a fresh interpreter would spend seconds on imports
    processes = [context.Process(target=run_as, args=(rank, count, folder, config)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=250)
    return [process.exitcode for process in processes]


def test_two_processes_report_what_one_reports(config, tmp_path):
    alone = config.model_copy(update={"output": str(tmp_path / "alone")})
    assert evaluate(alone) == 0
    assert run_shared(config, 2, tmp_path) == [0, 0]

    places = Counter((each.mode, each.prompt_id, each.turn) for each in records_of(config).generations)
    assert places == {(mode, f"q{n}", turn): 1 for mode in MODES for n in range(7) for turn in range(1 + n % 2)}
    assert comparable(config) == comparable(alone)
    labels = [sorted((each.prompt_ids, each.mode) for each in records_of(one).timings) for one in (config, alone)]
    assert labels[0] == labels[1]
    ours, theirs = report_in(config), report_in(alone)
    assert (ours.hardware["processes"], theirs.hardware["processes"]) == (2, 1)
    assert untimed(ours) == pytest.approx(untimed(theirs))
    assert ours.prompts == theirs.prompts
    assert sorted(path.name for path in Path(config.output).iterdir()) == sorted(
        path.name for path in Path(alone.output).iterdir()
    )


def comparable(config):
    """Return the generations, without the rounds of the lookup that learns from the prompts before it in its own process."""
    generations = records_of(config).generations
    return [replace(each, rounds=()) if each.mode == WITH_LOOKUP else each for each in generations]


def untimed(report):
    """Return the numbers of the measured sections that are no times."""
    sections = ("acceptance.", "prompts.", "by_category.", "baselines.")
    numbers = dict(numbers_of(report.to_dict())).items()
    return {path: value for path, value in numbers if path.startswith(sections) and not any(word in path for word in TIMES)}


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.fixture
def without_memory(monkeypatch):
    """Let decoding fail for want of memory, in one mode, for the batch with one prompt, at one repeat."""

    def install(mode, prompt_id, repeat=0):
        def failing(target, batch, *arguments, **labels):
            wanted = labels.get("mode") == mode and labels.get("repeat") == repeat
            if wanted and (prompt_id is None or prompt_id in {request.prompt_id for request in batch}):
                raise torch.OutOfMemoryError("no memory left")
            return decode(target, batch, *arguments, **labels)

        monkeypatch.setattr(eval.measure.interleaved, "decode", failing)

    return install


@pytest.fixture
def decoding(monkeypatch):
    """Stop decoding before the prompt named by `stop_at`; note which prompts were decoded."""
    state = SimpleNamespace(stop_at="q4", decoded=set())

    def stopping(target, batch, *arguments, **labels):
        if state.stop_at in {request.prompt_id for request in batch}:
            raise KeyboardInterrupt
        state.decoded.update(request.prompt_id for request in batch)
        return decode(target, batch, *arguments, **labels)

    monkeypatch.setattr(eval.measure.interleaved, "decode", stopping)
    return state


def test_a_run_that_was_cut_off_goes_on_and_reports_what_an_uninterrupted_one_reports(config, tmp_path, decoding):
    config = config.model_copy(update={"baselines": ["suffix_lookup"]})  # which learns from the prompts before
    with pytest.raises(KeyboardInterrupt):
        evaluate(config)
    decoding.stop_at, decoding.decoded = None, set()
    assert evaluate(config) == 0
    assert decoding.decoded == {"q4", "q5", "q6"}
    assert "4 of 7 prompts were measured in an earlier session" in report_in(config).warnings[0]

    alone = config.model_copy(update={"output": str(tmp_path / "alone")})
    assert evaluate(alone) == 0
    assert records_of(config).generations == records_of(alone).generations
    assert untimed(report_in(config)) == pytest.approx(untimed(report_in(alone)))
    assert report_in(alone).warnings == []


@pytest.mark.parametrize("changed", [{"repeats": 2}, {}], ids=["config", "draft"])
def test_a_run_with_another_config_or_draft_begins_anew(config, changed, tiny_run, tmp_path, decoding):
    artifact = shutil.copytree(tiny_run / "artifact", tmp_path / "copy")
    config = config.model_copy(update={"draft": str(artifact)})
    with pytest.raises(KeyboardInterrupt):
        evaluate(config)
    if not changed:  # another artifact in the same place
        metadata = json.loads((artifact / "draftsmith.json").read_text())
        write_json(artifact / "draftsmith.json", metadata | {"num_speculative_tokens": 1})
    decoding.stop_at, decoding.decoded = None, set()
    assert evaluate(config.model_copy(update=changed)) == 0
    assert decoding.decoded == {f"q{n}" for n in range(7)}
    assert report_in(config).warnings == []


@pytest.mark.parametrize("repeat", [0, 1])
def test_a_batch_that_the_machine_gives_up_on_is_listed_and_timed_in_no_mode(config, without_memory, repeat):
    without_memory(SPECULATIVE, "q2", repeat)
    assert evaluate(config.model_copy(update={"repeats": 2})) == 0
    report = report_in(config)
    assert [(each.prompt_id, each.turn, each.mode, each.stop_reason) for each in report.prompts.failed] == [
        ("q2", 0, SPECULATIVE, "error"),
        ("q3", 0, SPECULATIVE, "error"),
    ]
    assert (report.prompts.num_asked, report.prompts.num_prompts) == (7, 5)
    timed = {prompt_id for each in records_of(config).timings for prompt_id in each.prompt_ids}
    assert "q2" not in timed
    assert report.lossless.verdict == "lossless"  # what was not decoded is no evidence against it


def test_a_machine_that_can_decode_nothing_is_no_report_and_what_failed_is_tried_again(config, without_memory, monkeypatch):
    without_memory("prompt_lookup", None)
    with pytest.raises(RuntimeError, match="not one batch could be decoded in every mode"):
        evaluate(config)
    assert not (Path(config.output) / "report.json").exists()
    monkeypatch.undo()
    assert evaluate(config) == 0
    assert (report_in(config).prompts.failed, report_in(config).warnings) == ([], [])


# --- records on disk ------------------------------------------------------------------------------------------------


def written(folder, generations, timings=()):
    files = BatchFiles(folder, "job")
    files.write(0, Records(list(generations), list(timings)))
    path = files.join(1)
    drop_batches(folder)
    return path


def test_what_was_written_is_read(random_generations, random_timings, make_round, make_generation, tmp_path):
    plain = make_generation([make_round(0, 0)] * 3, mode=AUTOREGRESSIVE)
    mixed = make_generation([make_round(3, 1, overlap=(0.5, 0.25)), make_round(0, 0), make_round(2, 2, cut=True, overlap=())])
    empty = replace(make_generation([], prompt_id="\u2028 \ud800"), tokens=(), stop_reason="error", turn=2)
    generations = [*random_generations, plain, mixed, empty]
    assert read_records(written(tmp_path, generations, random_timings)) == Records(generations, random_timings)
    assert [each.name for each in tmp_path.iterdir()] == [RECORDS]


@pytest.mark.parametrize("line", ["", "{", '{"generation": {"prompt_id": "q"}}', '{"timing": {"mode": 1}}', "9" * 5000])
def test_a_line_that_is_no_record_is_named(random_generations, tmp_path, line):
    path = written(tmp_path, random_generations[:1])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"records .*records\.jsonl"):
        read_records(path)
    with pytest.raises(InputError, match=r"cannot read records .*nosuch"):
        read_records(tmp_path / "nosuch")
