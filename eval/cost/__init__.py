"""What a round costs on a machine, and predictions of speed from it.

Enter at `predict_speed`, which times rounds and makes a `CostModel` of them; `draft_length` and `tree_choice` choose drafts.
"""
