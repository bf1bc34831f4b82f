"""The library lines of docs/serving.md run as they stand, on a tiny target."""

import re
from pathlib import Path

from tests.support.caches import random_conversations, write_rows

DOC = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


def test_the_library_lines_run(tiny_run, tmp_path, capsys):
    section = DOC.read_text(encoding="utf-8").partition("# As a library")[2]
    first, with_lookup = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for name, place in {"embedded:smollm2-135m-instruct": "target", "runs/demo/train/artifact": "artifact"}.items():
        assert name in first
        first = first.replace(name, str(tiny_run / place))
    names = {}
    exec(first, names)  # the document is the project's own
    assert capsys.readouterr().out.strip()
    plain = names["answer"]
    assert "runs/demo/data/train.jsonl" in with_lookup
    data = write_rows(tmp_path / "train.jsonl", random_conversations([(4, 9)], 60, seed=0))
    exec(with_lookup.replace("runs/demo/data/train.jsonl", str(data)), names)
    assert names["answer"] == plain
