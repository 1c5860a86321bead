"""Run the suite from the command line; see `coterie_parallel.conformance.report`."""

import sys

from coterie_parallel.conformance.report import main

if __name__ == "__main__":
    sys.exit(main())
