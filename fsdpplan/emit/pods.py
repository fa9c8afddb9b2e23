"""What a job asks of Kubernetes beside what the plan says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """How the pods of a job look."""

    image: str | None = None
    """Container image with torch and, for the reference trainer, fsdpplan."""
    namespace: str | None = None
    """None: that of whoever applies the manifest."""
    queue: str | None = None
    """Kueue's LocalQueue, or Volcano's queue."""
    volumes: tuple[str, ...] = ()
    """Persistent volume claims and where they are mounted: `CLAIM:PATH`."""
    rdma: tuple[str, ...] = ()
    """Extended resources of RDMA adapters a pod: `rdma/ib=8`."""
    topology: str | None = None
    """Node label of the level within which all pods are wanted, for topology-aware placement."""
