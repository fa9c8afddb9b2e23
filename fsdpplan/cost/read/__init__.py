"""Read: what is read off a step that was played: its passes, what it waits for, its bottleneck."""
