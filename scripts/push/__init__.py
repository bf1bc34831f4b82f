"""`draftsmith push`: checks, files, model card, upload."""
