"""What may be set: one frozen pydantic model for each concern, checked when a config is loaded.

Training configs are in `training`, those of an evaluation in `evaluation`; both are made of the smaller modules beside them.
"""
