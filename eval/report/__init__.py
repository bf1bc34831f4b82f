"""The report of an evaluation: its typed model, how it is built, compared and rendered.

Enter with `load_report`; `eval.report.build` makes a report, `eval.report.html` and `eval.report.markdown` render one.
"""

from eval.report.schema import Report, load_report, parse_report, write_report

__all__ = ["Report", "load_report", "parse_report", "write_report"]
