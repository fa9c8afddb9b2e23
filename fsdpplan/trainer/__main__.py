"""`torchrun -m fsdpplan.trainer`, or a copy of this folder: `torchrun trainer/__main__.py`."""

import os
import sys
from importlib import import_module

package = __package__
if not package:
    # Run as a file: the folder itself leads sys.path, where its modules would hide the standard
    # library's (tokenize). Put the folder above in its place and be a package again.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(folder), *(entry for entry in sys.path if entry != folder)]
    package = os.path.basename(folder)

if __name__ == "__main__":
    import_module(f"{package}.train").main()
