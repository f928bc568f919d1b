"""HTTP: the OpenAI-compatible API over an engine that runs in its own thread. The only async code."""
