"""``python -m autoflash.cli``: the program where its script is not on the path."""

import sys

from autoflash.cli.application import main

if __name__ == "__main__":
    sys.exit(main())
