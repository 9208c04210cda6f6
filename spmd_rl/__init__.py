"""Reinforcement-learning post-training for language models as a plain SPMD program."""

__version__ = "0.1.0"
