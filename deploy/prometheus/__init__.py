"""Prometheus: what to scrape, recording and alert rules, and their promtool tests, generated from rules.py."""
