"""Tools to run pilotfish in production."""
