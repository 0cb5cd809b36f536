"""Replacing a running version by another one, and back by itself if that fails."""
