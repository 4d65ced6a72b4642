"""`python -m benchmarks`: see README.md beside this file."""

import sys

if __name__ == "__main__":
    try:        # loading torch takes seconds, in which Ctrl-C counts, too
        from benchmarks.command import main
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
