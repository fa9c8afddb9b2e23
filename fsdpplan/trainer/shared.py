"""What the planner declares and the trainer reads: modules that need the standard library only.

In the package they stand in `fsdpplan/spec`; the copy of the trainer in a job folder has them in a
folder `spec` of its own (`run/folder.py`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__ == "fsdpplan.trainer":
    from ..spec import conventions as conventions
    from ..spec import trainer_options as trainer_options
else:
    from .spec import conventions as conventions
    from .spec import trainer_options as trainer_options
