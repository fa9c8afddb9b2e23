"""Names of kernels and operators, as profiles of real programs have them."""

from __future__ import annotations

import pytest

from fsdpplan.trainer.watch.kinds import PATTERNS, kernel_kind, nccl_collective, operator_kind

KERNELS = {
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collective",
    "ncclKernel_ReduceScatter_RING_LL_Sum_float": "collective",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "matmul",
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn": "matmul",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN": "matmul",
    "void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>": "matmul",
    "Cijk_Ailk_Bljk_BBS_BH_MT256x256x64_MI16x16x16": "matmul",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>": "attention",
    "void cutlass::device_kernel<flash::FlashAttnBwdSm90<cutlass::bfloat16_t>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<float>": "copy",
    "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>": "copy",
    "triton_poi_fused_mul_silu_3": "elementwise",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2": "elementwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "elementwise",
    "a_kernel_of_a_user": "elementwise",
}

OPERATORS = {
    "aten::mm": "matmul",
    "aten::linear": "matmul",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::mul": "elementwise",
    "fsdp::split_with_sizes_copy": "copy",
    "fsdp::chunk_cat": "copy",
    "c10d::_allgather_base_": "collective",
    "autograd::engine::evaluate_function: AddBackward0": "host",
    "MmBackward0": "matmul",
}


def test_kernels_are_known_by_their_names() -> None:
    assert {name: kernel_kind(name) for name in KERNELS} == KERNELS


def test_operators_are_known_by_their_names() -> None:
    assert {name: operator_kind(name) for name in OPERATORS} == OPERATORS


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.kind)
def test_each_pattern_says_where_its_names_are_from(pattern: object) -> None:
    assert getattr(pattern, "source")  # noqa: B009


def test_what_a_kernel_of_nccl_carries_is_in_its_name() -> None:
    found = [nccl_collective(name) for name, kind in KERNELS.items() if kind == "collective"]
    assert found == ["all_gather", "reduce_scatter"]
    assert nccl_collective("ncclDevKernel_SendRecv(...)") == "send_recv"
    assert nccl_collective("ncclDevKernel_Generic") is None
