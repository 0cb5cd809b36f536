"""The HTTP application around the endpoints: keys, limits, logs, status."""
