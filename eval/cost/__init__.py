"""What a round costs on a machine, and predictions of speed from it.

Enter at `predict_speed`, which times rounds and makes a `CostModel` of them; `draft_length` and `tree_shapes` choose drafts.
"""

from eval.cost.draft_length import fit_stopping, stopping_from_report
from eval.cost.model import CostModel
from eval.cost.predict import predict_speed, prediction_of
from eval.cost.tree_shapes import fastest_tree, measure_profile

__all__ = [
    "CostModel",
    "fastest_tree",
    "fit_stopping",
    "measure_profile",
    "predict_speed",
    "prediction_of",
    "stopping_from_report",
]
