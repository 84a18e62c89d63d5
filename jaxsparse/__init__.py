"""Sketched and sparse gradient exchange for data-parallel training in JAX."""
