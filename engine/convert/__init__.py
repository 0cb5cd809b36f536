"""Checkpoints made from others: quantised, calibrated, with adapters merged and heads grafted."""
