"""Records on disk: the same after reading as before writing, in the order of the batches, and complete up to a broken end."""

from dataclasses import replace

import pytest

from configs.runtime.errors import InputError
from eval.decoder.records import AUTOREGRESSIVE
from eval.measure.record_files import RECORDS, BatchFiles, Records, drop_batches, read_records


def written(folder, generations, timings=()):
    files = BatchFiles(folder, "job")
    files.write(0, Records(list(generations), list(timings)))
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
        files.write(batch, Records([generations[batch]]))
    with pytest.raises(FileNotFoundError):
        files.join(12)
    files.write(0, Records([generations[0]]))
    assert list(read_records(files.join(12))) == generations


@pytest.mark.parametrize("line", ["", "{", '{"generation": {"prompt_id": "q"}}', '{"timing": {"mode": 1}}', "9" * 5000])
def test_a_line_that_is_no_record_is_named(random_generations, tmp_path, line):
    path = written(tmp_path, random_generations[:1])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"records\.jsonl, line 2 is neither a generation nor a timing"):
        list(read_records(path))
    with pytest.raises(InputError, match=r"cannot read records .*nosuch"):
        list(read_records(tmp_path / "nosuch"))
