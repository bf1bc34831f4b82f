"""Did speculation change the output?

Start with `verdict`.
"""
