"""`python -m opd` is `opd`."""

from opd.cli import main

if __name__ == "__main__":
    main()
