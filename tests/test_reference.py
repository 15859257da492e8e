"""Is my loss normal? Which runs a reference applies to, what it expects of them, what they are told, and the files."""

import collections
import dataclasses
import json
import math
import re

import datasets
import numpy as np
import pytest
from conftest import BLOCK_SIZE, ROOT, read_events, run_script
from transformers import GPT2Config, LlamaConfig

import recipe.run.plan
import recipe.run.reference
from recipe.command_line import load_config
from recipe.run.reference import (
    REFERENCES,
    Yardstick,
    compute_unigram_loss,
    count_targets,
    find_references,
    interpolate,
)

FILES = sorted(REFERENCES.glob("*.json"))
LENGTH = 1_024_000  # tokens of the run below
CURVE = {
    "name": "the example",
    "applies_to": {"vocab_size": [500]},
    "optim": "adamw",
    "schedules": [
        {"lr_scheduler_type": "cosine"},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}},
    ],
    "band": 0.1,
    "source": "this test",
    "note": "",
    "runs": [[[LENGTH / 4, 5.0]], [[LENGTH / 8, 6.0], [LENGTH, 4.0]]],
}


@pytest.fixture
def add_reference(monkeypatch, tmp_path):
    """Return a function that writes a reference, with which runs are compared instead of the real ones."""
    folder = tmp_path / "references"
    folder.mkdir()
    monkeypatch.setattr(recipe.run.reference, "REFERENCES", folder)

    def add(file="example", **changes):
        path = folder / f"{file}.json"
        path.write_text(json.dumps({**CURVE, **changes}))
        return path

    return add


def yardstick_of(dataset, *arguments: object) -> Yardstick:
    """Return that of 1,000 steps of 1,024 tokens."""
    given = ["--dataset_dir", "d", "--global_batch_size", 32, "--block_size", BLOCK_SIZE, "--max_steps", 1000]
    given += ["--lr_scheduler_type", "cosine"]
    config = load_config([*map(str, [*given, "--warmup_steps", 20, *arguments])])[0]
    return Yardstick(config, dataset, GPT2Config(vocab_size=512, n_layer=2, n_head=2, n_embd=32))


# --- the unigram model


def test_the_unigram_loss(dataset, dataset_dir):
    """It is the mean of -log((count + 1) / (all counts + vocabulary)), in plain Python over the rows of `datasets`."""
    rows = datasets.load_from_disk(dataset_dir)
    train, validation = ([i for row in rows[split] for i in row["input_ids"][1:]] for split in ("train", "validation"))
    counts, total = collections.Counter(train), len(train) + dataset.vocab_size
    expected = sum(-math.log((counts[i] + 1) / total) for i in validation) / len(validation)
    assert compute_unigram_loss(dataset) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_rows", [10_000, 10_007, 99, 1])
def test_a_large_split_is_sampled_evenly(num_rows):
    """Each tenth of the rows gets about a tenth of the sample, of about 1,000 rows; a small split is counted whole."""

    class Split:
        block_size, vocab_size = 8, 10

        def __len__(self):
            return num_rows

        def __getitem__(self, rows):
            return np.repeat((10 * rows // num_rows)[:, None], 9, axis=1)

    counts = count_targets(Split(), max_tokens=8_000)
    if num_rows <= 1000:
        assert counts.sum() == 8 * num_rows
    else:
        assert 8_000 <= counts.sum() <= 8_400 and counts.min() >= 640 and counts.max() <= 960


# --- what is expected


def test_interpolation():
    """Between points, the loss is linear in the logarithm of the tokens; beyond 5% outside of them there is none."""
    points = [[1000, 5.0], [4000, 4.0], [64000, 3.0]]
    expected = {1000: 5.0, 2000: 4.5, 4000: 4.0, 16000: 3.5, 64000: 3.0, 66000: 3.0, 960: 5.0}
    assert {tokens: interpolate(points, tokens) for tokens in expected} == pytest.approx(expected)
    assert [interpolate(points, tokens) for tokens in (0, 900, 70000)] == [None] * 3
    assert interpolate([], 1000) is None and interpolate([[1000, 5.0]], 1010) == 5.0


def test_a_finished_run_is_compared_with_finished_runs(dataset, add_reference):
    """The ends of two runs, of 0.256 M and of 1.024 M tokens, give that of one of 0.512 M; other lengths have none."""
    add_reference()
    ends = {250: 5.0, 500: 4.5, 1000: 4.0, 125: None, 2000: None}
    for max_steps, expected in ends.items():
        found = yardstick_of(dataset, "--max_steps", max_steps).judge(max_steps, 4.5)
        assert (found and found["expected_loss"]) == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 5.0),
        ({"lr_scheduler_type": "linear"}, None),  # other learning rates on the way
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": "power=2"}, 5.0),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": "power=3"}, None),
        ({"max_steps": 1030}, 5.0),
        ({"max_steps": 1200}, None),
        ({"max_steps": 800}, None),
    ],
)
def test_a_loss_on_the_way_needs_the_same_length_and_schedule(dataset, add_reference, options, expected):
    """At the geometric mean of a run's two points, its loss is their mean."""
    add_reference()
    yardstick = yardstick_of(dataset, *(text for key, value in options.items() for text in (f"--{key}", value)))
    found = yardstick.judge(round(1000 / math.sqrt(8)), 4.5)
    assert (found and found["expected_loss"]) == (expected and pytest.approx(expected, abs=2e-3))


@pytest.mark.parametrize(("optim", "name"), [("adamw_torch", "by AdamW"), ("muon", "by Muon"), ("auto", "by AdamW")])
def test_the_reference_with_the_same_optimizer_is_chosen(dataset, add_reference, optim, name):
    add_reference("a", name="by AdamW"), add_reference("b", name="by Muon", optim="muon")
    assert yardstick_of(dataset, "--optim", optim).judge(1000, 4.0)["name"] == name


def test_another_optimizer_is_compared_as_well(dataset, add_reference):
    """Also where the reference with the run's own optimizer has no run of this length."""
    add_reference("a", name="by AdamW"), add_reference("b", name="by Muon", optim="muon", runs=[[[10, 9.0]]])
    assert yardstick_of(dataset, "--optim", "muon").judge(1000, 4.0)["name"] == "by AdamW"


# --- which runs


def run_of(name: str):
    """Return (config, metadata, model config) of the run that a file is for, as the README and the recipes say."""
    applies_to = json.loads((REFERENCES / f"{name}.json").read_text())["applies_to"]
    arguments = ["--config", "gpt2_124m", "--dataset_dir", "d"]
    if name == "demo":
        arguments = []
    elif name == "tiny_shakespeare":
        command = re.search(r"recipe/train.py (--dataset_dir runs/data/shakespeare .*?)```", README, re.DOTALL)[1]
        arguments = command.replace("\\\n", "").split()
    config = load_config(arguments)[0]
    source = {key: applies_to.get(key, [None])[0] for key in ("dataset_name", "dataset_config_name")}
    metadata = {
        "source": {**source, "validation_split_percentage": config.validation_split_percentage},
        "content_sha256": applies_to.get("content_sha256", ["any"])[0],
        "vocab_size": config.tokenizer_vocab_size if name == "demo" else 50257,
        "eos_token_id": 0 if name == "demo" else 50256,
        "block_size": config.block_size,
    }
    return config, metadata, GPT2Config(**config.config_overrides)


README = (ROOT / "README.md").read_text()
OTHERS = {  # a property: how (config, metadata, model config) change
    "weights": lambda c, m, g: (dataclasses.replace(c, model_name_or_path="gpt2"), m, g),
    "tokens_per_step": lambda c, m, g: (dataclasses.replace(c, global_batch_size=2 * c.global_batch_size), m, g),
    "text": lambda c, m, g: (
        *(c, {**m, "content_sha256": "0", "source": {**m["source"], "dataset_name": "HuggingFaceFW/fineweb-2"}}),
        g,
    ),
    "block_size": lambda c, m, g: (c, {**m, "block_size": 512}, g),
    "vocab_size": lambda c, m, g: (c, {**m, "vocab_size": 2049}, g),
    "n_layer": lambda c, m, g: (c, m, GPT2Config(**{**g.to_dict(), "n_layer": 6})),
    "n_head": lambda c, m, g: (c, m, GPT2Config(**{**g.to_dict(), "n_head": 16})),
    "n_embd": lambda c, m, g: (c, m, GPT2Config(**{**g.to_dict(), "n_embd": 192})),
    "model_type": lambda c, m, g: (
        *(c, m),
        LlamaConfig(num_hidden_layers=g.n_layer, num_attention_heads=g.n_head, hidden_size=g.n_embd),
    ),
}
GPT2_124M = ("gpt2_124m_fineweb", "gpt2_124m_fineweb_edu")


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_each_file_applies_to_the_run_it_is_for(name):
    """The demo's to the demo's recipe, tiny Shakespeare's to the README's command, those of 124M to its recipe."""
    assert json.loads((REFERENCES / f"{name}.json").read_text()) in find_references(*run_of(name))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_no_file_applies_to_a_run_that_differs(name, other):
    """Neither in data, nor in the tokenizer, the model or the batch."""
    assert find_references(*OTHERS[other](*run_of(name))) == []


@pytest.mark.parametrize("name", GPT2_124M)
def test_gpt2s_vocabulary_is_recognized(name):
    """A tokenizer of the same size that was trained here has another end-of-text token."""
    config, metadata, model_config = run_of(name)
    assert find_references(config, {**metadata, "eos_token_id": 0}, model_config) == []
    part = {**metadata["source"], "dataset_config_name": "CC-MAIN-2014-10"}
    assert find_references(config, {**metadata, "source": part}, model_config) == []


# --- the files


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_is_valid(path):
    """Points are sorted, losses are losses, the source is an address or a file here, and the batch is named."""
    content = json.loads(path.read_text())
    assert content.keys() == CURVE.keys()
    ours = (ROOT / content["source"]).is_file()
    assert ours or content["source"].startswith("https://github.com/")
    assert 0 < content["band"] < 0.5 and content["optim"] in ("adamw", "muon")
    named = content["applies_to"].keys()
    assert named & {"dataset_name", "content_sha256"}
    assert named >= {"vocab_size", "model_type", "n_layer", "n_head", "n_embd", "block_size", "tokens_per_step"}
    assert all(isinstance(allowed, list) for allowed in content["applies_to"].values())
    for points in content["runs"]:
        tokens, losses = zip(*points, strict=True)
        assert list(tokens) == sorted(set(tokens)) and tokens[0] > 0
        assert all(1 < loss < 11 for loss in losses)


def test_the_files_are_installed():
    """They match one of the patterns of files that go into the wheel."""
    patterns = re.findall(
        r'"([^"]+)"', re.search(r"^recipe = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    )
    assert set(FILES) <= {path for pattern in patterns for path in (ROOT / "recipe").glob(pattern)}


@pytest.mark.parametrize(("loss", "verdict"), [(3.0663, "as expected"), (3.0843, "as expected"), (3.1681, "worse")])
def test_the_band_at_124m(dataset, loss, verdict):
    """Runs of the same model on FineWeb-Edu that others published: unshuffled, linear schedule, without warm-up."""
    config, metadata, model_config = run_of("gpt2_124m_fineweb_edu")
    yardstick = Yardstick(config, dataclasses.replace(dataset, metadata=metadata), model_config)
    assert yardstick.judge(config.max_steps, loss)["verdict"] == verdict


# --- what a run is told


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (
            4.09,
            r"^validation loss of 4.09 is as expected: the example reached 4.00 after as many tokens, and",
        ),
        (3.5, r"^validation loss of 3.50 is better than expected: .*look for validation text in the training text$"),
        (4.5, r"^validation loss of 4.50 is worse than expected: .*usual causes: a learning rate"),
        (math.nan, r"^validation loss of nan is worse than expected: "),
    ],
)
def test_the_sentence_at_the_end(dataset, add_reference, loss, expected):
    add_reference()
    assert re.search(expected, yardstick_of(dataset).describe(1000, loss))


def test_the_sentence_without_a_reference(dataset, add_reference):
    """It compares with the unigram model, and says so if the model is no better than that."""
    yardstick = yardstick_of(dataset)
    yardstick.unigram_loss = 5.5
    knows = "a model that knows only how often each token occurs reaches 5.50"
    assert yardstick.describe(1000, 4.2) == f"validation loss is 4.20; {knows}"
    unlearned = (
        f"validation loss is 5.60; {knows}: this run has learned no more than token frequencies; usual causes: "
    )
    assert yardstick.describe(1000, 5.6).startswith(unlearned)


def test_warnings(dataset, add_reference):
    """Leaving the band is reported once per direction: neither in the first tenth, nor at the end, which has words."""
    add_reference(runs=[[[1, 5.0], [LENGTH, 5.0]]])
    yardstick = yardstick_of(dataset)
    losses = {50: 9.0, 99: 9.0, 100: 5.05, 200: 5.3, 300: 5.4, 400: 5.0, 500: 5.5, 600: 4.8, 700: 4.8, 1000: 5.5}
    found = [(step, kind) for step, loss in losses.items() for kind in yardstick.check(step, loss)]
    assert found == [(200, "worse_than_expected"), (600, "better_than_expected")]
    late = yardstick_of(dataset, "--warmup_steps", 400)
    assert [step for step, loss in losses.items() if late.check(step, loss)] == [500, 600]


def test_a_run_that_learns_nothing_is_reported(dataset, add_reference):
    """Once, from a tenth of the run on. A loss that is not a number counts."""
    yardstick = yardstick_of(dataset)
    for loss in (yardstick.unigram_loss + 0.01, math.nan):
        yardstick.reported.clear()
        found = [(step, kind) for step in (50, 100, 200, 1000) for kind in yardstick.check(step, loss)]
        assert found == [(100, "unigram")]
    assert yardstick_of(dataset).check(500, yardstick.unigram_loss - 0.01) == {}


def test_a_run_prints_and_records_it(train, dataset, add_reference, capsys):
    """The warning on the way is printed and an event; the sentence at the end is printed, its parts in summary.json.

    max_minutes shortens the run, which is then compared with a run of that length.
    """
    schedules = [{"lr_scheduler_type": "linear"}]  # as of `train`
    add_reference(runs=[[[BLOCK_SIZE * 4, 1.0], [BLOCK_SIZE * 4 * 12, 0.5]]], schedules=schedules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.run.plan, "fit_max_steps", lambda *arguments: 12)
        output_dir = train("--max_steps", 40, "--max_minutes", 10, "--eval_steps", 11, "--warmup_steps", 2)
    (event,) = read_events(output_dir, "warning")
    printed = " ".join(capsys.readouterr().out.split())
    assert (event["step"], event["kind"]) == (11, "worse_than_expected")
    assert f"warning: {event['text']}" in printed
    summary = json.loads((output_dir / "summary.json").read_text())
    expected = {"name": "the example", "band": 0.1, "expected_loss": pytest.approx(0.5), "verdict": "worse"}
    assert summary["reference"] == expected and summary["unigram_loss"] == compute_unigram_loss(dataset)
    assert (
        f"The validation loss of {summary['eval_loss']:.2f} is worse than expected: the example reached 0.50"
        in printed
    )


def test_a_reference_is_written_from_runs(train, add_reference, tmp_path, capsys):
    """The losses of two seeds are averaged, step 0 is dropped; runs of another model are refused."""
    path = add_reference(applies_to={"vocab_size": [500], "n_layer": [2], "tokens_per_step": [4 * BLOCK_SIZE]})
    runs = [train("--seed", seed, "--eval_steps", 2, output_dir=tmp_path / str(seed)) for seed in (1, 2)]
    losses = [[e["loss"] for e in read_events(run, "eval") if e["step"]] for run in runs]
    program = "scripts/benchmarks/reference_curve.py"
    assert run_script(program, "--reference_file", path, *runs) == ""
    content = json.loads(path.read_text())
    expected = [[tokens, round(sum(pair) / 2, 4)] for tokens, *pair in zip((256, 512), *losses, strict=True)]
    assert content["runs"] == [[pytest.approx(point, abs=1e-4) for point in expected]]
    assert {**content, "runs": CURVE["runs"], "applies_to": CURVE["applies_to"]} == CURVE
    assert "512 tokens: 2 runs end at" in capsys.readouterr().out
    add_reference(applies_to={"n_layer": [3]})
    assert "has n_layer 2" in run_script(program, "--reference_file", path, runs[0])
    assert "does not exist" in run_script(program, "--reference_file", path, tmp_path)
