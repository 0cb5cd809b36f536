"""Metric definitions and collectors."""
