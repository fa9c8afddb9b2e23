"""Runtime: what the software that trains does, as traits with physical meaning.

A trait is a fact of that software with its source, never a number fitted to a table. The cost
model reads traits, not names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from fsdpplan.errors import SpecError, did_you_mean

RuntimeName = Literal[
    "fsdp2",
    "fsdp2_2024",
    "fsdp2_wrapped",
    "fsdp2_others",
    "fsdp1",
    "fsdp1_2024",
    "composer",
    "autocast",
    "megatron",
    "megatron_lm",
    "megatron_2020",
    "megatron_deepspeed",
    "internevo",
    "nanotron",
    "nanotron_zero1",
    "libai",
    "half_states",
    "xla",
    "llama3",
    "hai_llm",
    "automodel",
]

StackFamily = Literal["own", "pytorch", "megatron", "early_megatron", "other"]
HalfGradients = Literal["transient", "backward", "resident"]
PipelineOutputs = Literal["freed", "split", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Traits of one training software."""

    name: RuntimeName
    words: str
    """What to call it in a sentence."""
    family: StackFamily = "pytorch"
    """Softwares whose kernels come from the same hands: what they lose against what the device
    sustains, beside what the traits say, is fitted over the projects of a family
    (`DeviceFit.sustained`). `own` is the trainer of this package, which loses nothing."""
    flat_parameters: bool = False
    """One flat parameter an FSDP unit (FSDP1): gathered in place, so nothing is copied out."""
    units_of_ends: bool = False
    """FSDP gathers the embedding's tables as a unit, and the final norm and the head as another;
    without, or where both have one table, they are of the root, which is there all the time."""
    gathers_fp32: bool = False
    """Parameters are gathered in fp32 and cast by autocast."""
    half_parameters: bool = False
    """Resident parameters are in the compute dtype; fp32 masters are optimizer state."""
    half_states: bool = False
    """A model loaded in the compute dtype and trained as it is: parameters, gradients and AdamW's
    moments are all in it, and there are no fp32 masters."""
    half_gradients: bool = False
    """Resident gradients are in the compute dtype; otherwise fp32."""
    fp32_residual: bool = False
    """The residual stream is fp32, as plain autocast leaves it."""
    fused_kernels: bool = False
    """Norms, rotations and activations are one hand-written kernel each: priced as compiled
    ones where the layout is not compiled."""
    flash_attention: bool = True
    """Attention keeps no score matrix; without, scores are written, masked, normalised and read."""
    reference_decoder: bool = False
    """Blocks are the trainer's own, on PyTorch's attention function: heads of one width, masks for
    windows where PyTorch has no kernel for them, routers that read a copy in fp32."""
    wraps_alone: bool = True
    """DDP wraps whole parameters also where it has nothing to reduce: buckets of all gradients are
    there on one GPU, too. Without, they are bare, and so they are in a pipeline."""
    caches_casts: bool = True
    """Autocast keeps each weight's copy to the end of forward, as by default; without, where
    backward recomputes, no longer than its product."""
    overlaps_reduction: bool = True
    """Gradient reductions run beside backward; without, after it."""
    overlaps_tensor_parallel: bool = False
    """Tensor-parallel collectives run beside their matmuls, without the layout's `async_tp`."""
    overlaps_weight_gradient: bool = False
    """In backward, what tensor parallelism does with gradients of inputs runs beside the matmul
    that makes the gradients of weights; sequence parallelism gathers inputs again for it."""
    regathers_inputs: bool = False
    """Sequence parallelism keeps a rank's part of what the split matmuls read, and gathers it again
    in backward; `overlaps_weight_gradient` does so, too. Without, the gathered input is kept."""
    joined_projections: bool = False
    """Projections that read the same input are one matrix: without sequence parallelism, tensor
    parallelism then reduces the gradient of that input once, not once a projection."""
    repeats_kv_heads: bool = False
    """Tensor parallelism may be wider than the key and value heads: ranks gather what all of them
    projected and take their queries, and the keys and values that these share."""
    ring_attention: bool = False
    """Context parallelism passes keys and values around a ring beside attention, piece by piece;
    without, forward gathers them at once and only their gradients go around."""
    routes_whole_sequence: bool = False
    """Beside tensor parallelism each rank gathers the sequence, routes all of it alike, sends all
    of it to the experts' ranks, and sums the router's gradient in every backward pass; without, a
    rank sends its own part, and the experts' ranks gather the rows that came."""
    spreads_experts: bool = False
    """Tensor-parallel ranks can have whole experts each, in place of a part of every one."""
    repeats_whole_block: bool = False
    """Recomputation repeats forward to its end (a checkpoint function that returns the block's
    output again); without, it stops once backward has all that it needs."""
    reduce_scatters_gradients: bool = True
    """ZeRO-1 and ZeRO-2 reduce-scatter gradients over the shard group; without, they all-reduce
    them over all data-parallel ranks."""
    overlaps_parameter_gather: bool = False
    """ZeRO-1 and ZeRO-2 gather updated parameters beside the next forward; without, before it."""
    broadcasts_parameters: bool = False
    """Each rank of ZeRO-1 updates whole tensors, and broadcasts them, one rank after another;
    without, all ranks gather their shards at once."""
    bucket_bytes: int | None = None
    """fp32 bytes of gradients that are reduced together; None: all of a rank, in one piece."""
    bucket_bytes_a_rank: int = 0
    """Buckets are at least this large for each data-parallel rank."""
    fused_loss: bool = False
    """Cross-entropy is one kernel on the logits as they are: no fp32 copy beside them."""
    grows_segments: bool = False
    """It is launched with `expandable_segments`, if by a launcher that sets it: torch's allocator
    then has segments that grow."""
    compiles_loss: bool = True
    """Where blocks are compiled the loss is, too, if the program hands it over."""
    dropout: bool = False
    """Attention's probabilities and both residual branches drop elements at random, as in GPT."""
    fp32_logits: int = 3
    """fp32 tensors as large as the logits at the loss's highest, gradients among them: 3 in PyTorch
    (log-probabilities and two gradients), fewer where the loss works in place on its fp32 copy, 0
    where one kernel makes the gradient from the logits as they are."""
    fp32_gradients_of_bf16: bool = False
    """With `half_gradients`: those of fp16 only; gradients of bf16 are summed in fp32 buffers."""
    half_gradients_beside_fp32: HalfGradients = "transient"
    """How long gradients in the compute dtype live beside their fp32 sums: until they are added
    (`transient`), until the end of the backward pass (`backward`), always (`resident`)."""
    gradient_buckets: bool = False
    """Buckets of data-parallel reductions are memory beside the gradients, as in DDP without
    `gradient_as_bucket_view`."""
    pipeline_outputs: PipelineOutputs = "freed"
    """What a pipeline stage keeps of its output until its backward pass: nothing, its part of the
    tensor-parallel group (`split`), or all (`kept`). Torch's schedules are counted apart."""
    shortens_warmup: bool = False
    """1F1B takes fewer micro-batches than stages: a rank goes forward with as many as there are.
    Torch's schedule asks for one a stage."""
    keeps_stages: bool = False
    """FSDP in a pipeline keeps the parameters of all stages of a rank gathered; torch's schedules
    only those of the next few, and gather the others again."""
    reshards_stages: bool = False
    """FSDP in a pipeline can reshard the blocks of a stage after each forward pass, and gathers
    them again for the pass of it that follows. What a backward pass gathered stays for the next
    one, as torch's schedules let FSDP do nothing behind it before the last."""
    reduces_rounds: bool = False
    """FSDP in a pipeline reduces the gradients of a stage after each round of its micro-batches and
    keeps shards; torch's schedules keep them whole until the last one reduces them."""
    frees_messages: bool = False
    """Inputs and outputs of stages are freed as soon as nothing reads them: an input is what its
    first block keeps, an output goes when it is sent. Torch's schedules have buffers for them."""
    sends_once_a_node: bool = False
    """A token goes once to each node that has experts of it, and is passed on inside; without, each
    of its rows goes all the way."""
    dispatches_fp8: bool = False
    """With fp8 matmuls, rows go to their experts in fp8; what experts return stays as it is."""
    overlaps_passes: bool = False
    """Where DualPipe has a forward and a backward pass side by side, what one of them waits for
    inside blocks of experts runs beside what the other computes; torch's schedule, unless it is
    given a function for both, runs one behind the other."""
    exchange_multiprocessors: int = 0
    """Multiprocessors that the kernels of such exchanges hold while passes run side by side."""
    half_moments: bool = False
    """AdamW's moments are in 16 bits beside fp32 masters."""
    keeps_fp8: bool = False
    """With fp8 matmuls, their inputs, rows of experts, and gate and up are kept in fp8; and what
    attention returns once, in 12 bits, for its own backward and the next product's."""
    remakes_latents: bool = False
    """What norms return, and queries, keys and values that latent attention makes of its latents,
    are made again in backward."""
    remakes_product: bool = False
    """The input of the down projection is made again in backward, from gate and up."""
    composite_norms: bool = False
    """Eager RMSNorms are operators in fp32, one by one; without, one kernel (torch since 2.9)."""
    native_attention: bool = False
    """Fused attention is written for the device's own instructions (cuDNN, FlashAttention-3);
    without, for those of 2020, as FlashAttention-2 and PyTorch's kernel are."""
    foreach_optimizer: bool = False
    """AdamW is a list of operators over all tensors, PyTorch's default; without, one kernel."""
    flat_optimizer: bool = False
    """AdamW is operators, one by one, over one flat tensor of all that a rank updates: its root and
    its denominator are as large as that."""
    pads_vocabulary: bool = False
    """The vocabulary is padded, so that rows of logits are aligned."""
    source: str = ""
    """Where the traits were read."""

    @property
    def splits_optimizer(self) -> bool:
        """It has ZeRO-1 and ZeRO-2: an optimizer of its own that shards fp32 masters."""
        return self.half_parameters


FSDP2 = Runtime(
    name="fsdp2",
    words="FSDP2",
    family="own",
    units_of_ends=True,
    reference_decoder=True,
    routes_whole_sequence=True,
    wraps_alone=False,
    caches_casts=False,
    grows_segments=True,
    bucket_bytes=25 * 2**20,
    source="torch 2.13 torch/distributed/fsdp/_fully_shard, torch/nn/parallel/distributed.py; "
    "units as fsdpplan/trainer/parallel/data_parallel.py and torchtitan "
    "torchtitan/models/llama3/infra/parallelize.py have them; "
    "experts as fsdpplan/trainer/parallel/expert_parallel.py has them, and torchtitan "
    "torchtitan/distributed/expert_parallel.py where experts are split as wide as all else",
)
FSDP1 = Runtime(
    name="fsdp1",
    words="FSDP1",
    flat_parameters=True,
    bucket_bytes=25 * 2**20,
    source="torch 2.13 torch/distributed/fsdp/_flat_param.py, _runtime_utils.py",
)
MEGATRON = Runtime(
    name="megatron",
    words="Megatron Core",
    family="megatron",
    half_parameters=True,
    joined_projections=True,
    fused_kernels=True,
    overlaps_weight_gradient=True,
    repeats_kv_heads=True,
    ring_attention=True,
    spreads_experts=True,
    repeats_whole_block=True,
    overlaps_parameter_gather=True,
    bucket_bytes=4 * 40_000_000,
    bucket_bytes_a_rank=4 * 1_000_000,
    fused_loss=True,
    fp32_logits=1,
    shortens_warmup=True,
    pads_vocabulary=True,
    native_attention=True,
    source="Megatron-LM megatron/core/distributed/distributed_data_parallel_config.py, "
    "tensor_parallel/layers.py, tensor_parallel/random.py, parallel_state.py (expert_tensor_"
    "parallel_size), transformer/attention.py (num_query_groups below the tensor-parallel ranks), "
    "pipeline_parallel/schedules.py (num_warmup_microbatches is at most num_microbatches); "
    "overlaps of data parallelism as in NeMo nemo/collections/llm/recipes",
)
MEGATRON_2020 = Runtime(
    name="megatron_2020",
    words="Megatron-LM before FlashAttention",
    family="early_megatron",
    half_parameters=True,
    joined_projections=True,
    half_gradients=True,
    fused_kernels=True,
    flash_attention=False,
    overlaps_reduction=False,
    regathers_inputs=True,
    repeats_whole_block=True,
    reduce_scatters_gradients=False,
    fused_loss=True,
    dropout=True,
    fp32_logits=1,
    fp32_gradients_of_bf16=True,
    pipeline_outputs="kept",
    shortens_warmup=True,
    pads_vocabulary=True,
    source="Megatron-LM before Megatron Core, megatron/model/distributed.py, megatron/schedules.py "
    "(num_warmup_microbatches is at most num_microbatches); with sequence "
    "parallelism arXiv 2205.05198, section 4.2.2",
)
NANOTRON = Runtime(
    name="nanotron",
    words="nanotron",
    family="other",
    half_parameters=True,
    joined_projections=True,
    overlaps_weight_gradient=True,
    repeats_whole_block=True,
    reduce_scatters_gradients=False,
    bucket_bytes=2 * 25 * 2**20,
    fp32_logits=2,
    half_gradients_beside_fp32="backward",
    gradient_buckets=True,
    pipeline_outputs="kept",
    source="nanotron 0e0a27ea src/nanotron/trainer.py (torch's DDP, 25 MiB of bf16 gradients a "
    "bucket), optim/gradient_accumulator.py (its hook sums and all-reduces them in fp32), "
    "parallel/tensor_parallel/functional.py",
)

RUNTIMES: tuple[Runtime, ...] = (
    FSDP2,
    FSDP1,
    replace(
        FSDP2,
        name="fsdp2_wrapped",
        words="FSDP2, or DDP also around one replica",
        wraps_alone=True,
        caches_casts=True,
        source="torch 2.13 torch/nn/parallel/distributed.py: a group of one rank has buckets as "
        "any other; fsdpplan/trainer until 2026-11 wrapped the model of one GPU",
    ),
    replace(
        FSDP2,
        name="fsdp2_others",
        words="FSDP2 in a program of others",
        family="pytorch",
        grows_segments=False,
        source="as above, of torchtitan and scripts: what they do beside it is not known",
    ),
    replace(
        FSDP2,
        name="fsdp2_2024",
        words="FSDP2 with torch before 2.9",
        family="pytorch",
        wraps_alone=True,
        caches_casts=True,
        units_of_ends=False,
        composite_norms=True,
        compiles_loss=False,
        grows_segments=False,  # it does, and kept as much as others: `fragmentation_fraction`
        source="torchtitan of 2024 torchtitan/models/norms.py and "
        "torchtitan/parallelisms/parallelize_llama.py (blocks and the root are units), train.py "
        "(the loss is eager, as it was until github.com/pytorch/torchtitan/pull/1033 at most); "
        "torch 2.5 aten rms_norm",
    ),
    replace(
        FSDP1,
        name="fsdp1_2024",
        words="FSDP1 with torch before 2.9",
        composite_norms=True,
        compiles_loss=False,
        source="torch 2.5 aten rms_norm, torch/distributed/fsdp/_flat_param.py",
    ),
    Runtime(
        name="composer",
        words="Composer",
        flat_parameters=True,
        bucket_bytes=25 * 2**20,
        fused_loss=True,
        fp32_logits=0,
        source="llm-foundry llmfoundry/models/mpt/modeling_mpt.py (loss_fn fused_crossentropy, "
        "from flash_attn.losses), torch 2.13 torch/distributed/fsdp/_flat_param.py",
    ),
    Runtime(
        name="autocast",
        words="DDP or FSDP1 under autocast, without mixed-precision policy",
        flat_parameters=True,
        gathers_fp32=True,
        fp32_residual=True,
        bucket_bytes=25 * 2**20,
        foreach_optimizer=True,
        source="torch 2.13 torch/amp/autocast_mode.py, torch/distributed/fsdp/_flat_param.py",
    ),
    MEGATRON,
    replace(
        MEGATRON,
        name="megatron_lm",
        words="Megatron-LM with its defaults",
        overlaps_reduction=False,
        overlaps_parameter_gather=False,
        bucket_bytes=None,
        bucket_bytes_a_rank=0,
        source="Megatron-LM megatron/core/distributed/distributed_data_parallel_config.py: "
        "overlap_grad_reduce and overlap_param_gather are off unless asked for; the rest as above",
    ),
    MEGATRON_2020,
    replace(
        MEGATRON_2020,
        name="megatron_deepspeed",
        words="Megatron-DeepSpeed",
        half_gradients_beside_fp32="resident",
        pipeline_outputs="split",
        source="DeepSpeed deepspeed/runtime/pipe/engine.py, runtime/bf16_optimizer.py",
    ),
    Runtime(
        name="internevo",
        words="InternEvo",
        family="other",
        half_parameters=True,
        joined_projections=True,
        half_gradients=True,
        fused_kernels=True,
        repeats_whole_block=True,
        reduce_scatters_gradients=False,
        broadcasts_parameters=True,
        overlaps_parameter_gather=True,
        bucket_bytes=4 * 512 * 2**20,
        fp32_logits=1,
        pipeline_outputs="kept",
        flat_optimizer=True,
        source="InternEvo 1738bee internlm/solver/optimizer/hybrid_zero_optim.py (all-reduce over "
        "all data-parallel ranks in buckets of 512 Mi elements; `_step` makes one flat fp32 "
        "gradient), compatible_adamw.py (AdamW is one kernel from torch 2.1 on, which its runs of "
        "2023 are before), configs/7B_sft.py (overlap_sync_grad, overlap_sync_param)",
    ),
    NANOTRON,
    replace(
        NANOTRON,
        name="nanotron_zero1",
        words="nanotron with ZeRO-1",
        overlaps_reduction=False,
        bucket_bytes=None,
        gradient_buckets=False,
        source="nanotron 0e0a27ea src/nanotron/trainer.py (no DDP where ZeRO meets fp32 "
        "accumulation: one all-reduce of all gradients after backward), optim/zero.py",
    ),
    replace(
        FSDP2,
        name="xla",
        grows_segments=False,
        words="JAX programs that XLA compiles",
        family="other",
        reference_decoder=False,
        routes_whole_sequence=False,
        native_attention=True,
        fused_kernels=True,
        fused_loss=True,
        source="MaxText MaxText/configs/base.yml (weight_dtype float32, dtype bfloat16), "
        "configs/gpu_smoke_test.yml and end_to_end/gpu (attention cudnn_flash_te)",
    ),
    replace(
        MEGATRON,
        name="hai_llm",
        words="HAI-LLM with DualPipe",
        family="other",
        sends_once_a_node=True,
        dispatches_fp8=True,
        overlaps_passes=True,
        exchange_multiprocessors=20,
        half_moments=True,
        keeps_fp8=True,
        remakes_latents=True,
        remakes_product=True,
        native_attention=True,
        source="arXiv 2412.19437, sections 3.2 (ZeRO-1; DualPipe hides both all-to-alls; "
        "20 multiprocessors exchange; norms and up-projections of latents are made again) and 3.3 "
        "(fp8 dispatch and caches, E5M6 behind attention, BF16 moments); "
        "its library DeepEP; what is not said there as in Megatron Core",
    ),
    replace(
        FSDP2,
        name="llama3",
        family="pytorch",
        grows_segments=False,
        words="Llama 3's FSDP, tensor, context and pipeline parallelism",
        reference_decoder=False,
        routes_whole_sequence=False,
        joined_projections=True,
        fused_kernels=True,
        fused_loss=True,
        regathers_inputs=True,
        remakes_product=True,
        keeps_stages=True,
        reduces_rounds=True,
        frees_messages=True,
        source="arXiv 2407.21783, section 3.3.2: optimizer states and gradients are sharded, "
        "parameters are not resharded after forward, tensors that will not be used again are "
        "deallocated, inputs and outputs of each stage among them, keys and values are gathered; "
        "sequence parallelism of arXiv 2205.05198, section 4.2.2. Not said there, and taken as "
        "the public library of the same house has it: fused kernels, xFormers xformers/ops, and "
        "its SwiGLU, xformers/ops/swiglu_op.py, whose backward makes the product again",
    ),
    replace(
        FSDP2,
        name="automodel",
        family="pytorch",
        grows_segments=False,
        words="NeMo AutoModel",
        units_of_ends=False,
        reference_decoder=False,
        reshards_stages=True,
        source="NeMo AutoModel nemo_automodel/components/distributed/config.py "
        "(FSDP2Config.reshard_after_forward: True reshards the layers of pipelines too, which "
        "gathers them for each micro-batch; defer_fsdp_grad_sync), parallelizer.py (blocks and the "
        "root are units, and the root stays gathered), components/moe/fsdp_mixin.py "
        "(patched_backward_maybe_with_nosync: as torch 2.13 "
        "torch/distributed/pipelining/stage.py has it, resharded behind the last backward pass); "
        "what is not said there as in FSDP2",
    ),
    replace(
        FSDP2,
        name="half_states",
        family="pytorch",
        grows_segments=False,
        words="FSDP2 or DDP over a model in half precision",
        wraps_alone=True,
        units_of_ends=False,
        reference_decoder=False,
        half_states=True,
        source="torch 2.13 torch/optim/adamw.py (moments are zeros_like the parameter), "
        "torch/distributed/fsdp/_fully_shard/_fsdp_param.py (shards keep the parameter's dtype); "
        "what transformers' Trainer does with a model loaded by torch_dtype=bfloat16, whose blocks "
        "and root accelerate wraps",
    ),
    Runtime(
        name="libai",
        words="LiBai",
        family="other",
        half_gradients=True,
        fused_kernels=True,
        flash_attention=False,
        joined_projections=True,
        repeats_whole_block=True,
        bucket_bytes=25 * 2**20,
        fp32_logits=1,
        pads_vocabulary=True,
        source="LiBai 622cff94 libai/models/gpt_model.py, layers/attention.py, "
        "models/utils/graph_base.py, configs/common/models/gpt.py (dropout 0)",
    ),
)


@lru_cache(maxsize=64)
def runtime_named(name: str) -> Runtime:
    """The runtime called `name`. Raises SpecError where there is none."""
    for runtime in RUNTIMES:
        if runtime.name == name:
            return runtime
    names = ", ".join(runtime.name for runtime in RUNTIMES)
    meant = did_you_mean(name, (runtime.name for runtime in RUNTIMES))
    raise SpecError(f"there is no runtime {name!r}{meant}: use one of {names}")
