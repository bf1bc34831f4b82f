"""The training loop, its checkpoints, and the engines that hold the weights over processes.

`train` runs a `Task` to the end of its schedule.
"""

from train.loop.loop import TrainingResult, train
from train.loop.task import Task

__all__ = ["Task", "TrainingResult", "train"]
