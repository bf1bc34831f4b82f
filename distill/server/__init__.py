"""The target behind an OpenAI-compatible API. Start with `connection.Connection`."""
