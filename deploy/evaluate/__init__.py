"""Scores of a served model: a small set that ships, and any task of lm-eval."""
