"""From the records of decoding to numbers: acceptance, speed, quality, energy.

Enter with `Tally`, which takes in records and merges over processes; `eval.report.build` makes the report of it.
"""

from eval.metrics.acceptance import Acceptance, summarise_acceptance
from eval.metrics.speed import compare_speed, summarise_speed
from eval.metrics.tally import Tally

__all__ = ["Acceptance", "Tally", "compare_speed", "summarise_acceptance", "summarise_speed"]
