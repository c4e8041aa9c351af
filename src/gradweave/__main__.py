"""``python -m gradweave``: the command line of a package that need not be installed."""

from __future__ import annotations

from gradweave.cli import main

if __name__ == "__main__":
    main()
