"""`python -m fsdpplan`."""

from __future__ import annotations

from fsdpplan.cli.app import main

if __name__ == "__main__":
    main()
