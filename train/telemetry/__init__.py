"""What a training run measures of itself: metrics, utilisation, history, profiles, trackers.

Start with `step_metrics`.
"""
