"""Other programs' checkpoints.

`importing` makes an artifact of them, `exporting` makes them of an artifact; `layout` is what both say of a folder.
"""
