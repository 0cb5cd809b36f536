"""Prompt look-up: drafts copied from the sequence's own text."""
