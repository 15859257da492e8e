"""Watching a run: what each warning needs to appear, the GPU's numbers, waiting for data, and the progress line."""

import random
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import read_events
from tqdm import tqdm

import recipe.run.watch
from recipe.arguments import OPTIONS
from recipe.command_line import load_config
from recipe.data.batches import TrainBatches
from recipe.hardware import devices
from recipe.run.log import RunReport
from recipe.run.watch import GpuSampler, Watch

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config_of(*arguments: str):
    return load_config(["--dataset_dir", "d", "--warmup_steps", "100", *arguments])[0]


def log_lines(count: int, change=lambda line: {}) -> list[tuple[int, dict]]:
    """Return log lines of a healthy run, one every 10 steps and 10 seconds. change: of line n, counted from 0."""
    rng = random.Random(0)
    healthy = [
        {
            "train_seconds": 10.0 * (n + 1),
            "tokens_per_second": 1000 * rng.uniform(0.9, 1.1),
            "grad_norm": rng.lognormvariate(0, 0.5),
            "share_waiting_for_data": 0.01 * rng.random(),
            "share_of_memory": 0.9,
            "gpu_utilization": rng.uniform(0.9, 1.0),
            **change(n),
        }
        for n in range(count)
    ]
    return [(10 * (n + 1), values) for n, values in enumerate(healthy)]


def warnings_of(lines: list[tuple[int, dict]], *arguments: str) -> list[tuple[int, str]]:
    """Return the number of the line and the kind of each warning."""
    watch = Watch(config_of(*arguments))
    return [(n, kind) for n, (step, values) in enumerate(lines) for kind in watch.check(step, values)]


PROBLEMS = {  # kind: (how a line shows it, the number of the line at which it is reported if it starts at line 60)
    "waiting_for_data": (lambda n: {"share_waiting_for_data": 0.2}, 65),
    "low_utilization": (lambda n: {"gpu_utilization": 0.4}, 65),
    "memory": (lambda n: {"share_of_memory": 0.96}, 65),
    "throughput": (lambda n: {"tokens_per_second": 700.0}, 65),
    "gradient_norm": (lambda n: {"grad_norm": 1.05 ** (n - 60)}, None),
}


def test_a_healthy_run_has_no_warnings():
    """Neither on a GPU nor on a CPU, which has no utilization, nor where waiting cannot be measured."""
    assert warnings_of(log_lines(1000)) == []
    assert warnings_of(log_lines(1000, lambda n: {"gpu_utilization": None, "share_waiting_for_data": None})) == []


@pytest.mark.parametrize("kind", PROBLEMS)
def test_each_problem_has_one_warning(kind):
    """It appears once, after a minute, and not before the problem."""
    change, expected = PROBLEMS[kind]
    ((line, found),) = warnings_of(log_lines(200, lambda n: change(n) if n >= 60 else {}))
    assert found == kind and (line == expected if expected else 60 + 30 <= line <= 60 + 50)


@pytest.mark.parametrize("kind", ["waiting_for_data", "low_utilization", "memory", "throughput"])
def test_a_brief_problem_is_none(kind):
    """Fifty seconds in which another program runs, or two slow lines of a minute each, are no reason to warn."""
    change = PROBLEMS[kind][0]
    assert warnings_of(log_lines(100, lambda n: change(n) if 60 <= n < 65 else {})) == []
    slow = log_lines(100, lambda n: change(n) | {"train_seconds": 60.0 * n} if n % 3 else {"train_seconds": 60.0 * n})
    assert warnings_of(slow) == []


def test_the_first_lines_do_not_count():
    """The first one compiles, and throughput needs earlier lines to compare with."""
    assert warnings_of(log_lines(20, lambda n: {"share_waiting_for_data": 0.9} if n == 0 else {})) == []
    assert warnings_of(log_lines(10, lambda n: {"tokens_per_second": 1000.0 if n < 4 else 500.0})) == []


def test_a_problem_that_comes_and_goes_is_reported_once():
    """It is reported again only after it has been absent for long."""
    waits = {"share_waiting_for_data": 0.5}
    assert warnings_of(log_lines(400, lambda n: waits if n % 20 < 10 else {})) == [(6, "waiting_for_data")]
    found = warnings_of(log_lines(400, lambda n: waits if n % 100 < 10 else {}))
    assert found == [(n, "waiting_for_data") for n in (6, 105, 205, 305)]


def test_throughput_is_compared_with_the_laps_before():
    """After 240 lines at the lower rate, a further fall is another problem."""
    rates = [1000.0] * 60 + [700.0] * 240 + [500.0] * 100
    found = warnings_of(log_lines(400, lambda n: {"tokens_per_second": rates[n]}))
    assert found == [(65, "throughput"), (305, "throughput")]


def test_gradient_norms_that_do_not_keep_rising():
    """Neither the rise in warm-up, nor a step up, nor spikes, nor numbers that are not finite are a rising norm."""
    norms = [lambda n: 1.0 if n < 60 else 9.0, lambda n: 1e4 if n % 4 == 0 else 1.0, lambda n: float("nan")]
    for norm in norms:
        assert warnings_of(log_lines(200, lambda n, norm=norm: {"grad_norm": norm(n)})) == []
    rising = log_lines(200, lambda n: {"grad_norm": 1.1**n})
    assert warnings_of(rising, "--warmup_steps", "2000") == [] and warnings_of(rising, "--warmup_steps", "1000") != []


@pytest.mark.parametrize("arguments", [(), ("--data_placement", "ram"), ("--streaming", "--train_file", "a.txt")])
def test_remedies_name_real_options(arguments):
    """Every option in a warning is one of recipe/train.py."""
    config = load_config([*(arguments if "--streaming" in arguments else ("--dataset_dir", "d", *arguments))])[0]
    watch, texts = Watch(config), []
    for change, _ in PROBLEMS.values():
        for step, values in log_lines(200, lambda n, change=change: change(n) if n >= 60 else {}):
            texts += watch.check(step + 10_000, values).values()
    assert len(texts) == len(PROBLEMS)
    named = {name for text in texts for name in re.findall(r"--([a-z_]+)", text)}
    assert len(named) >= 8 and named <= set(OPTIONS)


def test_a_warning_is_printed_and_recorded(train, monkeypatch, capsys):
    for name, value in {"WAITING": 0.0, "LINES": 2, "SECONDS": 0.0}.items():
        monkeypatch.setattr(recipe.run.watch, name, value)
    (event,) = read_events(train(), "warning")
    assert (event["step"], event["kind"]) == (3, "waiting_for_data")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"warning: {event['text']}" in printed and "--dataloader_num_workers" in event["text"]


# --- waiting for data


def test_on_a_cpu_every_fetch_is_waiting():
    """A fetch that sleeps for 20 ms takes at least that long; the first one comes before the first step."""

    def slow():
        while True:
            time.sleep(0.02)
            yield torch.zeros(1, 3), None

    batches = TrainBatches(slow(), CPU)
    for _ in range(5):
        next(batches)
    assert 0.1 <= batches.take_wait() < 1 and batches.take_wait() == 0


@pytest.mark.parametrize(
    ("fetch_ms", "launch_ms", "work_ms", "waited_ms"),
    [
        (3, 2, 10, 3),  # the host is ahead: only the first fetch, before any work
        (10, 1, 4, 10 + 9 * 6),  # the GPU finishes 4 ms into each later fetch
        (2, 8, 1, 2 + 9 * 1),  # the GPU is idle most of the time, but not because of the fetches
    ],
)
def test_on_a_gpu_only_fetches_that_it_notices_are_waiting(monkeypatch, fetch_ms, launch_ms, work_ms, waited_ms):
    """Ten steps of a host that fetches, then launches work, and of a GPU that works through its queue in order."""
    clock = SimpleNamespace(host=0.0, gpu_free=0.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(clock.host, clock.gpu_free)  # after the work that is queued by now

        def elapsed_time(self, other):
            return other.at - self.at

    def fetches():
        while True:
            clock.host += fetch_ms
            yield torch.zeros(1, 3), None

    monkeypatch.setattr(torch.cuda, "Event", Event)
    batches = TrainBatches(fetches(), GPU)
    for _ in range(10):
        next(batches)
        clock.host += launch_ms
        clock.gpu_free = max(clock.host, clock.gpu_free) + work_ms
    assert batches.take_wait() == pytest.approx(waited_ms / 1e3)


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("queued", [pytest.param(False, marks=on_gpu), pytest.param(True, marks=on_gpu)])
def test_waiting_on_a_real_gpu(queued):
    """Five fetches of 20 ms are 100 ms of waiting, or none if a second of work is queued."""

    def slow():
        while True:
            time.sleep(0.02)
            yield torch.zeros(1, 3), None

    batches = TrainBatches(slow(), GPU)
    if queued:
        torch.cuda._sleep(2_000_000_000)  # clock cycles
    for _ in range(5):
        next(batches)
    torch.cuda.synchronize()
    waited = batches.take_wait()
    assert waited < 0.01 if queued else 0.1 <= waited < 0.3


# --- the GPU


class NVMLError(Exception):
    pass


def fake_nvml(utilization: dict[str, int], **failing: str) -> SimpleNamespace:
    """Return pynvml on a machine with these GPUs. utilization: {uuid: percent}. failing: {function: reason}."""

    def handle(uuid):
        if uuid not in utilization:
            raise NVMLError("Not Found")
        return uuid

    def fail(reason):
        raise NVMLError(reason)

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=utilization[gpu], memory=1),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=80_000, used=utilization[gpu] * 1000),
        nvmlDeviceGetPowerUsage=lambda gpu: 650_000,  # milliwatts
        nvmlDeviceGetTemperature=lambda gpu, sensor: {0: 71}[sensor],
    )
    for name, reason in failing.items():
        setattr(nvml, name, lambda *_, reason=reason: fail(reason))
    return nvml


@pytest.fixture
def sample(monkeypatch):
    """Start sampling torch's GPU with UUID `bbb` and this pynvml, ten times as often; returns the sampler."""
    started = []
    main_thread = threading.current_thread()

    def properties(device):
        assert threading.current_thread() is main_thread, "the sampling thread must not use CUDA"
        return SimpleNamespace(uuid="bbb")

    def start(nvml, device=GPU):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        started.append(GpuSampler(device))
        return started[-1]

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(recipe.run.watch, "SAMPLE_SECONDS", 0.01)
    yield start
    for sampler in started:
        sampler.close()


def wait_for(condition) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


MACHINE = {"GPU-aaa": 5, "GPU-bbb": 90}  # CUDA_VISIBLE_DEVICES=1 makes the second one torch's first


def test_the_runs_own_gpu_is_sampled(sample):
    """It is found by UUID. Units are shares, bytes, watts and degrees, averaged since the last line."""
    utilization = dict(MACHINE)
    sampler = sample(fake_nvml(utilization))
    wait_for(lambda: len(sampler.samples) >= 3)
    means = sampler.means()
    assert means == pytest.approx(
        {
            "gpu_utilization": 0.9,
            "gpu_memory_bytes": 90_000,
            "gpu_power_watts": 650,
            "gpu_temperature_celsius": 71,
        }
    )
    sampler.samples.clear()
    utilization["GPU-bbb"] = 40
    wait_for(lambda: len(sampler.samples) >= 10)
    assert sampler.means()["gpu_utilization"] == pytest.approx(0.4, abs=0.06)  # one sample may be older
    assert list(sampler.errors) == []


def test_means_are_over_the_samples_since_the_last_call():
    """A reading that some samples lack is averaged over the others; without samples there is nothing."""
    sampler = GpuSampler(CPU)
    sampler.samples.extend([{"gpu_power_watts": 100, "gpu_utilization": 0.5}, {"gpu_power_watts": 300}])
    assert sampler.means() == {"gpu_power_watts": 200, "gpu_utilization": 0.5}
    assert sampler.means() == {}


def test_the_sampling_thread_ends(sample):
    """It does not keep the process alive, and ends when the report closes it."""
    sampler = sample(fake_nvml(MACHINE))
    assert sampler.thread.daemon and sampler.thread.is_alive()
    sampler.close()
    sampler.thread.join(timeout=20)
    assert not sampler.thread.is_alive()


def test_a_reading_that_fails_is_reported_once_and_the_others_continue(sample):
    sampler = sample(fake_nvml(MACHINE, nvmlDeviceGetPowerUsage="Not Supported"))
    wait_for(lambda: len(sampler.samples) >= 3)
    assert set(sampler.means()) == {"gpu_utilization", "gpu_memory_bytes", "gpu_temperature_celsius"}
    assert list(sampler.errors) == ["NVML could not read gpu_power_watts (Not Supported)"]


def test_an_unknown_gpu_is_reported(sample):
    """For example a part of a GPU (MIG), for which NVML has no utilization."""
    sampler = sample(fake_nvml({"GPU-aaa": 5}))
    wait_for(lambda: not sampler.thread.is_alive())
    assert list(sampler.errors) == ["NVML does not know this run's GPU (Not Found)"] and sampler.means() == {}


@pytest.mark.parametrize(
    ("nvml", "device"),
    [(None, GPU), (fake_nvml(MACHINE, nvmlInit="Driver Not Loaded"), GPU), (fake_nvml(MACHINE), CPU)],
)
def test_without_the_library_or_a_driver_or_a_gpu_nothing_is_sampled(sample, nvml, device):
    """Without the package, or without a driver, a run samples nothing and does not fail."""
    sampler = sample(nvml, device)
    wait_for(lambda: sampler.thread is None or not sampler.thread.is_alive())
    assert sampler.means() == {} and list(sampler.errors) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_gpu_is_sampled(monkeypatch):
    """It shows the memory that this process has allocated."""
    pytest.importorskip("pynvml")
    monkeypatch.setattr(recipe.run.watch, "SAMPLE_SECONDS", 0.01)
    held = torch.zeros(2**28, device=GPU)  # 1 GB
    sampler = GpuSampler(GPU)
    wait_for(lambda: len(sampler.samples) >= 3)
    sampler.close()
    means = sampler.means()
    assert list(sampler.errors) == [] and set(means) == set(recipe.run.watch.READINGS)
    assert means["gpu_memory_bytes"] > held.nbytes and 0 <= means["gpu_utilization"] <= 1
    assert 10 < means["gpu_power_watts"] < 3000 and 10 < means["gpu_temperature_celsius"] < 120


# --- the log line


@pytest.fixture
def report(tmp_path):
    """The report of a run of `num_steps` on a stand-in for a device."""
    nothing = {"init_trackers": lambda *_, **__: None, "log": lambda *_, **__: None}
    accelerator = SimpleNamespace(is_main_process=True, device=CPU, **nothing)
    reports = []

    def make(num_steps: int) -> RunReport:
        reports.append(RunReport(accelerator, config_of("--max_steps", str(num_steps)), tmp_path, 0))
        return reports[-1]

    yield make
    for made in reports:
        made.close()


LINE = log_lines(1)[0][1] | {"loss": 3.281, "mfu": 0.462, "tokens_per_second": 555_321.0, "peak_memory_bytes": 61.2e9}


@pytest.mark.parametrize(
    ("num_steps", "step", "seconds", "change"),
    [
        (1, 1, 20, {"loss": 10.983, "mfu": 0.05, "peak_memory_bytes": 0.7e9}),
        (99_999, 45_999, 45_296, {}),
        (99_999, 99_999, 359_000, {"tokens_per_second": 12.34e6, "peak_memory_bytes": 141.2e9}),
    ],
)
def test_the_progress_line_fits_into_80_columns(report, num_steps, step, seconds, change):
    """With loss, tokens per second, MFU and memory, after hours and days. tqdm cuts what does not fit."""
    shown = report(num_steps)
    shown.train(step, LINE | change)
    line = tqdm.format_meter(**shown.bar.format_dict | {"n": step, "elapsed": seconds, "ncols": 79})
    assert len(line) <= 79 and re.search(r"loss \d+\.\d{3}, [\d.]+[kM] tok/s, \d+% MFU, [\d.]+ GB\]$", line)


def test_a_device_without_a_known_peak_has_no_mfu(report):
    shown = report(10)
    shown.train(1, LINE | {"mfu": None})
    assert shown.bar.postfix == "loss 3.281, 555k tok/s, 61 GB"


def test_log_lines_carry_the_gpus_numbers(report, tmp_path, capsys):
    """An error of NVML is printed above the bar."""
    shown = report(10)
    shown.gpu.samples.append({"gpu_utilization": 0.5, "gpu_power_watts": 650})
    shown.gpu.errors.append("NVML could not read it")
    shown.train(1, LINE)
    shown.train(2, LINE)
    first, second = read_events(tmp_path, "train")
    assert (first["gpu_utilization"], first["gpu_power_watts"]) == (0.5, 650) and "gpu_power_watts" not in second
    assert capsys.readouterr().out.count("warning: NVML could not read it") == 1


# --- memory


def test_memory_of_a_gpu_is_what_this_process_can_have(monkeypatch):
    """Of 80 GB, 40 are free and this process holds 10, so it can have 50, or 41 with that limit. It has needed 40."""
    numbers = {"mem_get_info": (40e9, 80e9), "memory_reserved": 10e9, "max_memory_allocated": 40e9}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert devices.share_of_memory(GPU, None) == pytest.approx(40 / 50)
    assert devices.share_of_memory(GPU, 41) == pytest.approx(40 / 41)


def test_the_memory_limit_of_a_container_counts(tmp_path):
    """The job's limit of 1,000 bytes is above the task's group, which has none. Page cache does not count."""
    job, task = tmp_path / "job", tmp_path / "job" / "task"
    task.mkdir(parents=True)
    (job / "memory.max").write_text("1000\n")
    (job / "memory.stat").write_text("anon 600\nfile 9000\nkernel 5\nshmem 100\ninactive_anon 44\n")
    (task / "memory.max").write_text("max\n")
    (task / "memory.stat").write_text("anon 1\n")
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/old\n0::/job/task\n")
    assert max(devices._shares_of_cgroups(tmp_path, own)) == 0.7
    assert max(devices._shares_of_cgroups(tmp_path, Path("missing"))) == 0
    assert 0 < devices.share_of_memory(CPU, None) < 1
