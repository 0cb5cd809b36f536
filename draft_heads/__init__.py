"""Draft heads: what proposes tokens for the trunk to verify."""
