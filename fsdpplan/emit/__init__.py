"""Plan to text: launch scripts and NCCL environment."""
