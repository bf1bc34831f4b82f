"""The other libraries that benchmarks compare with, one file each; all are optional."""
