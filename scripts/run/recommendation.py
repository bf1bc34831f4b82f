"""Which export of a run to serve: that of the draft or of what needs no training, whichever is faster; in words and a code."""

from __future__ import annotations

from pathlib import Path

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.files import read_text, write_text
from configs.schema.commands.running import RunConfig
from eval.report.schema import load_report
from eval.report.text import faster_way, what_to_serve
from heads.formats.exporting.exporter import SERVE_FILE


def recommend(run: RunConfig) -> tuple[str, int]:
    """Return what to serve, by the run's report, and 1 where that is a lookup of which there is no export; else 0.

    Writes `export/serve.txt`, which has the lines of the export that is recommended.
    """
    output = Path(run.output)
    if not (output / "eval" / "report.json").is_file():
        return "", DONE
    report = load_report(output / "eval" / "report.json")
    advice, way = what_to_serve(report), faster_way(report)
    if run.engine is None or way is None:
        return advice, DONE
    if way == "suffix_lookup":
        advice += " Its export knows the answers of the data and learns no others: draftsmith check measures it."
    folder, lines = output / "export" / (run.engine if way == "draft" else way), output / "export" / SERVE_FILE
    if (folder / SERVE_FILE).is_file():
        write_text(lines, f"{advice}\n\n{read_text(folder / SERVE_FILE, 'lines of the export')}")
        return f"{advice} {lines} says how.", DONE
    lines.unlink(missing_ok=True)
    if way == "draft":
        return advice, DONE
    return f"{advice} No export for {run.engine} does that, so the run ends with {GATE_FAILED}.", GATE_FAILED
