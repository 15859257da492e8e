"""The launcher's configs, loaded as the launcher loads them."""

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from conftest import ROOT

FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def test_each_kind_of_hardware_has_a_config():
    assert {p.stem for p in FILES} >= {"cpu", "single_gpu", "single_gpu_fp16", "multi_gpu"}


@pytest.mark.parametrize(
    ("name", "distributed_type", "precision", "dynamo", "use_cpu"),
    [
        ("cpu", "NO", "no", {}, True),
        ("single_gpu", "NO", "bf16", {"dynamo_backend": "INDUCTOR"}, False),
        ("single_gpu_fp16", "NO", "fp16", {"dynamo_backend": "INDUCTOR"}, False),
        ("multi_gpu", "MULTI_GPU", "bf16", {"dynamo_backend": "INDUCTOR"}, False),
    ],
)
def test_values_of_the_configs(name, distributed_type, precision, dynamo, use_cpu):
    """An unknown key is fatal to the launcher, and to this test."""
    config = load_config_from_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    assert (config.distributed_type, config.mixed_precision, config.use_cpu) == (distributed_type, precision, use_cpu)
    assert config.dynamo_config == dynamo


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_configs_are_short_and_start_with_a_comment(path):
    text = path.read_text()
    assert text.startswith("# ") and len(text.splitlines()) <= 20
