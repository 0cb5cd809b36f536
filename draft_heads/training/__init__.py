"""Fitting an MTP head to a frozen trunk."""
