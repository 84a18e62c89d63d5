"""Predicts and measures from the shell: python -m jaxsparse --help."""

import sys

from jaxsparse.planner.command import main

if __name__ == "__main__":
    sys.exit(main())
