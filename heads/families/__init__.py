"""The head families, one file each.

`registry` names them; adding one is a file here, a class in `configs.schema.heads` and a line in the registry.
"""
