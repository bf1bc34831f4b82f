"""Tools a person runs. Nothing imports this package."""
