"""What a recipe takes in memory, disk and time, before it is run.

Enter at `make_plan`, which counts on models without weights, or at `plan_page` for its text.
"""

from train.plan.page import plan_page
from train.plan.plan import Plan, make_plan

__all__ = ["Plan", "make_plan", "plan_page"]
