"""The tasks of the training loop: distilling a draft LM, and training a head; both are evaluated by `held_out`.

`DraftTask` and `HeadTask` are made by `train.launch`.
"""

from train.tasks.draft import DraftTask
from train.tasks.head import HeadTask

__all__ = ["DraftTask", "HeadTask"]
