"""The report of an evaluation: its typed model, how it is built, compared and rendered.

Enter with `load_report`; `eval.report.build` makes a report, `eval.report.page` and `eval.report.tables` render it.
"""
