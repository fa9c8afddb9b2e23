"""`torchrun ... -m fsdpplan.trainer.preflight`, before a program of your own."""

from .program import main

main()
