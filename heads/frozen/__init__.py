"""The frozen target: its loading, its hidden states, its identity, the files of its checkpoint and the devices it lies on.

Enter at `load_target`, which turns the settings of `target` into a `Target` ready to run.
"""

from heads.frozen.hidden_states import TargetStates
from heads.frozen.loading import Target, load_target

__all__ = ["Target", "TargetStates", "load_target"]
