"""A release on the Hub: checks, the files that are sent, the model card, the upload.

Start with `steps`.
"""
