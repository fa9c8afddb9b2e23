"""What the trainer uses of torch that it does not document: one function a need, with its reason.

Everything here was read in torch 2.13 and is tried under all releases that the trainer claims. What
one of them needs and others do not is in torch_versions.py; private modules that not all of them
have are imported where they are used.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that torch does not keep from compilers: nothing is compiled beneath it, and
    the keeping is a third of what it costs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def join_fake_group(*, rank: int, world: int) -> None:
    """Join a process group of `world` ranks that are not there: messages arrive at once, as they
    are. Only this module makes the "fake" backend known."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if find_spec("torch.distributed._meta_registrations") is None:
        # before torch 2.12 collectives take fake tensors when this has been imported
        import_module("torch.distributed._tools.fake_collectives")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def fake_tensors() -> FakeTensorMode:
    """Tensors without storage, whose shapes, dtypes and saved tensors are those of the real
    program. Real ones may be among them: meshes are."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def goes_back_again() -> bool:
    """Whether the backward pass under way keeps its graph (`retain_graph`), so that what was saved
    for it may be asked for once more. Only inside of a saved tensor's hook."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def ambient_fake_mode() -> FakeTensorMode | None:
    """The fake mode under way."""
    mode: FakeTensorMode | None = active_fake_mode()
    return mode


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no values, so that nothing may depend on them."""
    return isinstance(tensor, FakeTensor)


def asks_device(operator: Any, args: Any) -> bool:
    """Whether an operator only asks a fake tensor for its device: more than half of all do."""
    return operator is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)


def fake_device(tensor: Tensor) -> torch.device:
    """The device that a fake tensor stands for, without asking its mode."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_device


@contextmanager
def own_propagation_mode() -> Iterator[None]:
    """Let DTensor infer shapes in a fake mode of its own.

    In the ambient one it would run each operator at global shapes among those of the program, and
    they would be taken for it. Before torch 2.10 it has a mode of its own.
    """
    module: Any = import_module("torch.distributed.tensor._sharding_prop")
    original = getattr(module, "detect_fake_mode", None)
    if original is None:
        yield
        return
    module.detect_fake_mode = lambda *args, **kwargs: None
    try:
        yield
    finally:
        module.detect_fake_mode = original


def forget_meshes() -> None:
    """Empty DTensor's caches: equal meshes of a later process group would find this one's."""
    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    propagate.cache.cache_clear()
    redistribute: Any = import_module("torch.distributed.tensor._redistribute")
    caches = (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),  # since torch 2.10
        (redistribute, "clear_redistribute_planner_cache"),  # since torch 2.10
        (getattr(redistribute, "_gen_transform_infos", None), "cache_clear"),  # before
    )
    for module, name in caches:
        if hasattr(module, name):
            getattr(module, name)()
    # torch 2.8 takes a mesh for a part of another that an equal one was
    resources = getattr(device_mesh, "_mesh_resources", None)
    getattr(resources, "child_to_root_mapping", {}).clear()


def group_of(argument: Any) -> dist.ProcessGroup:
    """The process group that an operator was given: boxed, or by its name."""
    by_name: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
    named = isinstance(argument, str)
    group: dist.ProcessGroup = by_name(argument) if named else dist.ProcessGroup.unbox(argument)
    return group


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells a storage from others as long as it lives; fake ones have no address."""
    key: int = storage._cdata
    return key


@contextmanager
def on_storage_resize(seen: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Call `seen(storage, size_bytes)` after each resizing in place, by which FSDP frees."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        result = original(storage, size_bytes)
        seen(storage, size_bytes)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextmanager
def stated_pipeline_shapes() -> Iterator[None]:
    """Let pipeline stages take the shapes that they were given.

    Before their first step they ask each other whether all have them, which ranks that are not
    there do not answer; in torch 2.9 to 2.11 they only greet each other, and in 2.8 nothing.
    """
    schedules = import_module("torch.distributed.pipelining.schedules")._PipelineSchedule
    stages = import_module("torch.distributed.pipelining.stage")

    def without_asking(_: Any, stages_here: Any, *__: Any) -> None:
        for stage in stages_here:
            stage._inference_mode = stages.InferenceMode.STATIC

    with ExitStack() as stack:
        if hasattr(schedules, "_warmup_p2p"):
            stack.enter_context(replaced(schedules, "_warmup_p2p", without_asking))
        elif hasattr(stages.PipelineStage, "_get_init_p2p_neighbors_ops"):
            greet = "_get_init_p2p_neighbors_ops"
            stack.enter_context(replaced(stages._PipelineStageBase, greet, lambda _: []))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute be another one for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def ddp_buckets(parameters: list[Tensor], limits_bytes: list[int]) -> list[list[int]]:
    """How DDP groups `parameters`, in this order: numbers of those that are reduced together."""
    fill: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    buckets, _ = fill(parameters, limits_bytes)
    return [list(bucket) for bucket in buckets]


def ddp_first_bucket_bytes() -> int:
    """Limit of DDP's first bucket, unless it is told the others'."""
    limit: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    return limit


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """The fp32 norm of each tensor, in few kernels; the public functions give one of them all."""
    return list(torch._foreach_norm(tensors, dtype=torch.float32))


def set_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let `parameter` stay the same object, with values in another dtype; as `Module.to` does."""
    with torch.no_grad():
        parameter.data = parameter.data.to(dtype)


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place, in few kernels; no value is read back from the device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, there in by_device.items():
        # waited for: the host would multiply before a copy from the device has arrived
        torch._foreach_mul_(there, factor.to(device))


@contextmanager
def parts_kept_on(mesh: DeviceMesh | None) -> Iterator[None]:
    """Let `fully_shard(reshard_after_forward=N)` take the groups of `mesh`, once for all units.

    It would make groups of its own for each unit: as many communicators as the model has blocks.
    """
    module: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
    original = module.DeviceMesh

    def existing(_: str, ranks: Tensor) -> DeviceMesh:
        assert mesh is not None
        assert mesh.mesh.tolist() == ranks.tolist()
        return mesh

    module.DeviceMesh = existing
    try:
        yield
    finally:
        module.DeviceMesh = original


def attend_around_a_ring(attention: nn.Module, mesh: DeviceMesh) -> None:
    """Let the scaled dot-product attention that `attention` calls go around the ranks of `mesh`,
    each of which has an early and a late piece of the sequence: torch's ring attention.

    The public `context_parallel` patches the function for the time of a context and cuts tensors
    itself; this is what it is made of since torch 2.10 (torch_versions.py refuses older ones).
    """
    ring = _ring_module()
    ring._cp_options.enable_load_balance = True
    ring._enable_context_parallel_dispatcher()
    style = ring._ContextParallel(
        seq_dim=2, attention_type=ring._ContextParallel.AttentionType.SDPA
    )
    parallelize_module(attention, mesh, style)


def share_of_pieces(length: int, ranks: int) -> Tensor:
    """The order of positions, rank after rank, that ring attention takes sequences to have."""
    balancer = _ring_module()._HeadTailLoadBalancer(length, ranks, "cpu")
    order: Tensor = balancer._generate_indices()[0]
    return order


def has_ring_attention() -> bool:
    """Whether this torch has what `attend_around_a_ring` is made of."""
    return hasattr(_ring_module(), "_ContextParallel")


def _ring_module() -> Any:
    return import_module("torch.distributed.tensor.experimental._attention")


def overlap_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Let torch.compile cut the collectives of `group` and their matmuls into chunks that run side
    by side: async TP, a pass of inductor over symmetric memory."""
    inductor: Any = import_module("torch._inductor.config")
    inductor._micro_pipeline_tp = True
    symmetric_memory = import_module("torch.distributed._symmetric_memory")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group.group_name)


def flight_records(*, only_active: bool) -> list[dict[str, Any]]:
    """Collectives that torch's flight recorder holds, in the order in which they were asked for;
    `only_active`: those that have not ended. Gloo and NCCL keep one each; its only public reader
    takes the files that NCCL writes after a timeout."""
    recorder: Any = torch._C._distributed_c10d
    dump = getattr(recorder, "_dump_nccl_trace_json", None)
    if dump is None or "nccl" not in str(dist.get_backend_config()):
        dump = recorder._dump_fr_trace_json
    records: list[dict[str, Any]] = json.loads(dump(True, only_active)).get("entries", [])
    return records


def flight_record_file() -> bytes:
    """The flight recorder's contents as torchfrtrace reads them, which NCCL writes only after its
    own timeout."""
    recorder: Any = torch._C._distributed_c10d
    dump = getattr(recorder, "_dump_nccl_trace", None)
    return bytes(b"" if dump is None else dump())


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees what is computed: selective recomputation counts
    operators, and is not to count those of whoever looks on."""
    modes: Any = import_module("torch.utils._python_dispatch")
    context: AbstractContextManager[Any] = modes._disable_current_modes()
    return context


def forget_forward_passes(part: nn.Module) -> None:
    """Let FSDP2 forget forward passes that no backward follows.

    Parameters are shards again, also those that stay gathered for backward, and of the order in
    which units ran, which tells backward what to gather ahead, nothing is left: it is recorded
    without gradients, too, and emptied by backward only.
    """
    for module in part.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.reshard()
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # of older releases, where there is one at most
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        for group in groups:
            group._post_forward_indices.clear()
        state._comm_ctx.post_forward_order.clear()


def meeting_store(prefix: str) -> dist.Store:  # type: ignore[name-defined]
    """The store by which the ranks of the default process group met, with keys of its own: what is
    asked of it ends at once, where a collective would wait."""
    return dist.PrefixStore(prefix, c10d._get_default_store())  # type: ignore[attr-defined]


def record_allocations(device: torch.device, *, most: int) -> None:
    """Let CUDA's allocator keep its last `most` events, with where in the program each was. What
    is documented of it (torch.org/docs/stable/torch_cuda_memory.html) begins with an underscore."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=most, device=device)


def dump_allocations(device: torch.device, path: str) -> list[dict[str, Any]]:
    """Write what was recorded as pytorch.org/memory_viz reads it, and keep no more; the events."""
    memory: Any = torch.cuda.memory
    memory._dump_snapshot(path)
    traces = memory._snapshot(device)["device_traces"]
    memory._record_memory_history(enabled=None, device=device)
    events: list[dict[str, Any]] = traces[device.index or 0]
    return events
