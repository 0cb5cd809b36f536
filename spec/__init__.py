"""The speculative algorithm, free of models and devices."""
