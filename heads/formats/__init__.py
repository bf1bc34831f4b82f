"""Other programs' checkpoints: `importing` makes artifacts of them, `exporting` makes them of artifacts.

`layout` and `names` hold what both directions need.
"""
