"""Checks of a head before a long run, on the run's own target.

`check_before_training` runs all of them.
"""

from train.preflight.sanity import check_before_training

__all__ = ["check_before_training"]
