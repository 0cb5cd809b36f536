"""Text and tokens: tokenizer, templates, prompts, stops, and what constrains an answer."""
