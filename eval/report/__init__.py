"""The report of an evaluation: its typed model, how it is compared and rendered.

Enter with `load_report`; `eval.evaluation` makes a report, `eval.report.page` and `eval.report.tables` render it.
"""
