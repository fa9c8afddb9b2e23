"""How a data worker begins (`worker.py`): as a file, in a package that is nothing but its folder.

The trainer's own package would import torch.
"""

import os
import sys
from importlib import import_module
from types import ModuleType

PACKAGE = "fsdpplan_data_worker"


def main() -> None:
    """Serve until the input ends; whoever started this has gone where the output cannot be
    written."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    package = ModuleType(PACKAGE)
    package.__path__ = [folder]
    sys.modules[PACKAGE] = package
    try:
        import_module(f"{PACKAGE}.text.worker").serve()
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
