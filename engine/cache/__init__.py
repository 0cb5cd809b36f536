"""Block tables, recurrent-state slots: who owns which part of the caches (no torch here)."""
