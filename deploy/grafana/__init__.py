"""Grafana dashboards, generated from panels.py. `python -m pilotfish.deploy.grafana.generate` writes every file."""
