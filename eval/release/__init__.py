"""A release gate's rules and its verdict on a report.

Start with `checks`.
"""
