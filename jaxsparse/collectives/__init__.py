"""Sums of vectors over workers, dense and sparse."""
