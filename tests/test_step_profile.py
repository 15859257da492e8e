"""--profile shows where the time of a step goes."""

import gzip
import json
import shutil
import types

import pytest
import torch
from conftest import read_events
from torch.autograd import DeviceType

import recipe.train
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.run.profile import KINDS, StepProfiler, describe, kind_of, summarize


@pytest.fixture(autouse=True)
def no_sample(monkeypatch):
    """The text that a run generates at its end takes longer than the run."""
    monkeypatch.setattr(recipe.evaluation.validation, "sample_text", lambda *args, **kwargs: "")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matmul"),
        ("aten::addmm", "matmul"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_32", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("triton_per_fused__softmax_5", "attention"),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", "loss"),
        ("graph_0_cpp_fused__log_softmax__log_softmax_backward_data_2", "loss"),
        ("aten::_fused_adamw_", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("aten::linalg_vector_norm", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "data"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data"),
        ("triton_poi_fused_add_mul_pow_tanh_view_2", "elementwise"),
        ("graph_0_cpp_fused_add_mul_pow_tanh_view_2", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("aten::copy_", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", "communication"),
        ("Torch-Compiled Region: 0/0", None),
        ("ProfilerStep*", None),
    ],
)
def test_kinds(name, kind):
    """The profiler's names of GPU kernels, ATen operators and inductor's kernels."""
    assert kind_of(name) == kind


def measured(name, cpu_us=0, device_us=0, device_type=DeviceType.CPU, parent=None, is_span=False):
    return types.SimpleNamespace(
        name=name,
        self_cpu_time_total=cpu_us,
        self_device_time_total=device_us,
        device_type=device_type,
        cpu_parent=parent,
        is_user_annotation=is_span,
    )


def test_on_a_gpu_the_time_of_its_kernels_counts():
    """The host's operators do not count, and time without a kernel is idle. 3 steps in 0.03 s."""
    events = [
        measured("aten::mm", cpu_us=9000, device_us=15000),
        measured("nvjet_tst_192x192", device_us=15000, device_type=DeviceType.CUDA),
        measured("triton_poi_fused_add", device_us=6000, device_type=DeviceType.CUDA),
        measured("aten::_scaled_dot_product_flash_attention", cpu_us=10),
        measured("Optimizer.step#AdamW.step", device_us=9000, device_type=DeviceType.CUDA, is_span=True),
    ]
    numbers = summarize(events, 0.03, torch.device("cuda"))
    assert numbers["step_ms"] == pytest.approx(10) and numbers["attention_kernel"] == "flash"
    expected = {"matmul": 5, "elementwise": 2, "idle": 3}
    for kind in (*KINDS, "idle"):
        assert numbers[f"{kind}_ms"] == pytest.approx(expected.get(kind, 0))
    assert "  matmul               5.0 ms   50%" in describe(numbers)


def test_on_a_cpu_the_optimizer_owns_what_it_calls():
    """An elementwise operator in the optimizer's step counts as optimizer, and every operator counts once."""
    step = measured("Optimizer.step#AdamW.step", cpu_us=300)
    inner = measured("aten::mul_", cpu_us=3000, parent=measured("aten::outer", cpu_us=0, parent=step))
    numbers = summarize([step, inner, measured("aten::mul_", cpu_us=6000)], 0.03, torch.device("cpu"))
    assert numbers["optimizer_ms"] == pytest.approx(1.1) and numbers["elementwise_ms"] == pytest.approx(2)


def test_a_profile_that_would_come_too_late(train):
    with pytest.raises(UserError, match="--profile 1"):
        train("--max_steps", "4", "--profile", "2")


@pytest.mark.parametrize(("attention", "kernel"), [("sdpa", "flash (CPU)"), ("eager", "matmuls")])
def test_a_profile_of_a_run(train, capsys, attention, kernel):
    """The trace contains the operators, and the kinds of work add up to the step."""
    output_dir = train("--max_steps", "8", "--profile", "3", "--attn_implementation", attention)
    (profile,) = read_events(output_dir, "profile")
    assert (profile["step"], profile["attention_kernel"]) == (6, kernel)
    parts = [profile[f"{kind}_ms"] for kind in (*KINDS, "idle")]
    assert sum(parts) == pytest.approx(profile["step_ms"]) and min(parts) >= 0
    assert all(
        profile[f"{kind}_ms"] > 0 for kind in ("matmul", "attention", "loss", "optimizer", "elementwise", "data")
    )
    trace = json.loads(gzip.decompress((output_dir / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in trace["traceEvents"]) == 3
    assert "one step takes" in capsys.readouterr().out
    assert [e["step"] for e in read_events(output_dir, "train")] == list(range(1, 9))


@pytest.mark.parametrize("max_steps", [5, 7])
def test_a_run_with_a_profile_resumes_near_its_end(train, max_steps):
    """Too few steps are left for another profile, or none at all."""
    options = ["--max_steps", max_steps, "--profile", "2", "--save_steps", "5"]
    output_dir = train(*options)
    shutil.rmtree(output_dir / "checkpoint-7", ignore_errors=True)
    train(*options, "--resume_from_checkpoint", "auto")
    assert [e["step"] for e in read_events(output_dir, "train")] == list(range(1, max_steps + 1))


def test_a_run_without_profile_has_none(train):
    output_dir = train("--max_steps", "2")
    assert not read_events(output_dir, "profile") and not (output_dir / "trace.json.gz").exists()


def test_a_run_that_becomes_too_short_is_not_profiled(tmp_path, monkeypatch):
    """`--max_minutes` may choose an end before the profile's; it must not stay open."""
    monkeypatch.setattr(torch._inductor.config.cpp, "enable_kernel_profile", False)  # the profiler changes it
    config = load_config(["--profile", "10"])[0]
    accelerator = types.SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
    profiler = StepProfiler(config, accelerator, tmp_path, first_step=0)
    assert profiler.after_step == 10
    profiler.set_schedule(types.SimpleNamespace(max_steps=12))
    assert profiler.after(10) is None and profiler.profile is None
