"""OpenAI's Responses API on the core of chat completions, nothing stored: the whole conversation comes each time."""
