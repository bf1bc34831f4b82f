"""An export tried in the engine that it is for: servers, a client, and what is compared."""
