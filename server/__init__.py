"""The OpenAI-compatible HTTP server and the command line."""
