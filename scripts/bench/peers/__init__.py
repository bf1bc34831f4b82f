"""The other libraries that benchmarks compare with.

One file each; all are optional.
"""
