"""`python -m coterie_trainer` is the command `coterie`."""

import sys

from coterie_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
