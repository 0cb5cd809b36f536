"""Checks that drive an engine of their own: the audit, the head, acceptance, what a round costs, what really ran."""
