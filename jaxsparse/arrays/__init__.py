"""Vectors and their entries, before anything is sent: bits, hashes, passes, streams, settings."""
