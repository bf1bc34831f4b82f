"""Records on disk: the same after reading as before writing, in the order of the batches, and complete up to a broken end."""

import json
from dataclasses import replace

import pytest

from configs.runtime.errors import InputError
from eval.decoder.records import AUTOREGRESSIVE, Generation
from eval.measure.record_files import RECORDS, BatchFiles, drop_batches, read_records


def written(folder, generations, timings=()):
    files = BatchFiles(folder, "job")
    files.write(0, generations, timings)
    path = files.join(1)
    drop_batches(folder)
    return path


def test_what_was_written_is_read(random_generations, random_timings, tmp_path):
    path = written(tmp_path, random_generations, random_timings)
    assert list(read_records(path)) == [*random_generations, *random_timings]
    assert [each.name for each in tmp_path.iterdir()] == [RECORDS]


def test_rounds_of_every_kind_are_read_as_they_were(make_round, make_generation, tmp_path):
    plain = make_generation([make_round(0, 0)] * 3, mode=AUTOREGRESSIVE)
    mixed = make_generation([make_round(3, 1, overlap=(0.5, 0.25)), make_round(0, 0), make_round(2, 2, cut=True, overlap=())])
    empty = replace(make_generation([], prompt_id="\u2028 \ud800"), tokens=(), stop_reason="error", turn=2)
    assert list(read_records(written(tmp_path, [plain, mixed, empty]))) == [plain, mixed, empty]


def test_batches_are_joined_in_order_and_none_may_be_missing(make_round, make_generation, tmp_path):
    generations = [make_generation([make_round(3, n % 3)] * (n + 1), prompt_id=f"q{n}") for n in range(12)]
    files = BatchFiles(tmp_path, "job")
    for batch in reversed(range(1, 12)):
        files.write(batch, [generations[batch]], [])
    with pytest.raises(FileNotFoundError):
        files.join(12)
    files.write(0, [generations[0]], [])
    assert list(read_records(files.join(12))) == generations


def test_another_job_begins_anew(random_generations, tmp_path):
    files = BatchFiles(tmp_path, "job")
    files.write(0, random_generations[:2], [])
    assert (BatchFiles(tmp_path, "job").finished(0), files.finished(1)) == (random_generations[:2], None)
    assert BatchFiles(tmp_path, "other").finished(0) is None


@pytest.mark.parametrize("line", ["", "{", '{"generation": {"prompt_id": "q"}}', '{"timing": {"mode": 1}}', "9" * 5000])
def test_a_line_that_is_no_record_is_named(random_generations, tmp_path, line):
    path = written(tmp_path, random_generations[:1])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"records\.jsonl, line 2 is neither a generation nor a timing"):
        list(read_records(path))
    with pytest.raises(InputError, match=r"cannot read records .*nosuch"):
        list(read_records(tmp_path / "nosuch"))


def test_each_line_is_one_json_object_of_plain_values(random_generations, tmp_path):
    lines = written(tmp_path, random_generations).read_text().split("\n")[:-1]
    values = [json.loads(line)["generation"] for line in lines]
    assert all(isinstance(Generation(**each), Generation) for each in values)
    assert values[0]["rounds"]["accepted"] == [round_.num_accepted for round_ in random_generations[0].rounds]
