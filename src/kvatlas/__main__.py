"""`python -m kvatlas` is the `kvatlas` command."""

from kvatlas.cli import main

if __name__ == "__main__":
    main()
