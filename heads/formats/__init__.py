"""Other programs' checkpoint formats: what is written for the engines that serve drafts, and what is read back from them.

`tensors` streams weights from file to file, `source` is what an export is made from, `layout` what it consists of, and one file
a group of families says how each engine wants them. `exporting` and `importing` are the two ways through.
"""
