"""`python -m fsdpplan.topology.measure`."""

from fsdpplan.topology.measure.program import main

if __name__ == "__main__":
    main()
