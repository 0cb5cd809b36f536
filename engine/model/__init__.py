"""Trunk modules of the Qwen3.5 hybrid family."""
