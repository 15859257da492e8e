"""--profile shows where the time of a step goes."""

import gzip
import json
import time

import pytest
import torch._inductor.config
from conftest import read_events


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """The profiler sets this for the process. The sample at the end of a run takes longer than the run."""
    monkeypatch.setattr("recipe.evaluation.validation.sample_text", lambda *args, **kwargs: "")
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": False}):
        yield


def test_a_profile_of_a_run(train, capsys, monkeypatch):
    """The trace holds three steps after the named one, and the table their slowest operators; the losses stay.

    The time that writing it takes is not the run's.
    """
    export = torch.profiler.profile.export_chrome_trace
    slowly = lambda found, path: (time.sleep(3), export(found, path))  # noqa: E731
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", slowly)
    options = ["--max_steps", "8", "--attn_implementation", "sdpa"]
    run = train(*options, "--profile", "3")
    trace = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 3
    steps = {name for name in names if str(name).startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{step}" for step in (3, 4, 5)}  # counted from 0: the steps 4, 5 and 6
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert read_events(run, "train")[-1]["train_seconds"] < 3
    printed = capsys.readouterr().out
    assert "aten::addmm" in printed and str(run / "trace.json.gz") in printed
    plain = train(*options, output_dir=run.with_name("plain"))
    assert not (plain / "trace.json.gz").exists()
    losses = [[(event["step"], event["loss"]) for event in read_events(path, "train")] for path in (run, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == 8
