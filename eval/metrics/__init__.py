"""From the records of decoding to numbers: acceptance, speed, quality, energy.

Enter with `tally.Tally`, which takes in records and merges over processes; `eval.report.build` makes the report of it.
"""
