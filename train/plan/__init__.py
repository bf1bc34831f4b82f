"""What a recipe takes in memory, disk and time, before it is run.

Start with `plan.make_plan`.
"""
