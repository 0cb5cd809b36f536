"""Anthropic's Messages API on the core of chat completions: requests become chat requests, answers its blocks."""
