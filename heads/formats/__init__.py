"""Other programs' checkpoints: `importing` makes artifacts of them, `exporting` makes them of artifacts.

`layout` holds what both directions need.
"""
