"""The measuring program of `fsdpplan calibrate`, started on every rank:

    python -m torch.distributed.run ... -m fsdpplan.topology.measure --device cuda --out LOG.jsonl

What it times is one row of `fsdpplan.spec.measurement` each, appended to the log as soon as it is
known. torch is imported inside functions only.
"""
