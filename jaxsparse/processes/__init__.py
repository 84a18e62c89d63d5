"""Several processes of one run: they compare their steps, and end together."""
