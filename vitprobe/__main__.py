"""`python -m vitprobe`, as torchrun starts it."""

import sys

from vitprobe.cli import main

if __name__ == "__main__":
    sys.exit(main())
