"""pilotfish: exact speculative serving of hybrid language models with their own MTP head."""

__version__ = "0.1.0"
