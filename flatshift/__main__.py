"""`python -m flatshift` is the `flatshift` command."""

from flatshift.cli import main

if __name__ == "__main__":
    main()
