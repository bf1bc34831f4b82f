"""Measuring proposers on a suite of prompts, interleaved with plain decoding.

Enter with `measure_share`, for the processes of an evaluation, or `measure`, for one process.
"""

from eval.measure.interleaved import Measurement, Records, measure
from eval.measure.record_files import read_records
from eval.measure.shards import measure_share
from eval.measure.suite import Suite, load_suite
from eval.measure.turns import Turns

__all__ = ["Measurement", "Records", "Suite", "Turns", "load_suite", "measure", "measure_share", "read_records"]
