"""Traffic: which collectives one rank calls in a step, how often, and with how many bytes."""
