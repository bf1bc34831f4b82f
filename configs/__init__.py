"""Typed configuration: the schema, its loading, and the small things every command shares. Imports no torch."""
