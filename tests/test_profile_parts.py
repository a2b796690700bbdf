"""What a profile calls the kernels it finds, by names that an H200 really gave."""

from __future__ import annotations

import pytest
from benchmarks.profile import part, report

NAMES = {
    "gradient_statistics": "conv statistics (our kernels)",
    "combine_statistics": "conv statistics (our kernels)",
    "gradient_sums": "conv sums (our kernels)",
    "add_positions": "sums over positions and chunks (our kernel)",
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, float>": "layout changes",
    "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": "convolutions (cuDNN)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "nvjet_sm90_tss_192x128_64x5_1x2_h_bz_coopB_NTT": "products of matrices",
    "triton_red_fused__to_copy_native_group_norm_20": "compiled reductions",
    "triton_poi_fused_as_strided_clone_198": "compiled elementwise",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_known_by_its_name(name):
    assert part(name) == NAMES[name]


def test_short_kernels_are_added_up(capsys):
    report(
        "a step", [("gradient_sums", 0.5, 2.0), ("triton_poi_fused_1", 0.006, 3.0), ("triton_per_fused_2", 0.002, 1.0)]
    )
    said = capsys.readouterr().out
    assert "0.500 ms  conv sums (our kernels)" in said
    assert "0.008 ms  of these in 4 kernels" in said
