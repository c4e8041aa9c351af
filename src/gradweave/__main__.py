"""``python -m gradweave``: the command line where the package is not installed."""

from __future__ import annotations

from gradweave.cli import main

if __name__ == "__main__":
    main()
