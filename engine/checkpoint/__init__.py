"""Checkpoints: recognised from metadata, checked, loaded."""
