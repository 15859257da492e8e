"""What a run does, and when, as tables: the command and what is found -> the decision, or the words of a refusal."""

import dataclasses
import math
import re
from functools import partial
from pathlib import Path

import pytest
from transformers import GPT2Config

from recipe.checkpoint import RunState, SavedState, Stage, list_pruned
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware.choices import Facts
from recipe.hardware.memory import Memory
from recipe.hardware.probe import Measured
from recipe.hardware.sharding import Sharding
from recipe.optim.schedule import Schedule, describe_jump, plan_schedule
from recipe.publish.hub import MainBranch
from recipe.run.decide import (
    Checkpoint,
    DataFacts,
    Folder,
    ModelFacts,
    NamedCheckpoint,
    Run,
    Start,
    Surroundings,
    decide_run,
    decide_start,
    decide_turn,
)

OPTIONS = ["--config", "gpt2_124m", "--dataset_dir", "d", "--output_dir", "run", "--learning_rate", "0.001"]
OPTIONS += ["--block_size", "32", "--global_batch_size", "8", "--warmup_steps", "4"]
OPTIONS += ["--max_eval_samples", "auto", "--attn_implementation", "auto"]
PUSH = "--push_to_hub --hub_model_id me/tiny --hub_strategy checkpoint"
AUTO, LATEST, BASE = (f"--resume_from_checkpoint {where}" for where in ("auto", "latest", "base/checkpoint-2"))
HUB = "--resume_from_checkpoint hf://me/tiny"
CPU = Facts("cpu", thread_counts=(2,))
MB = 10**6


def config_of(command=""):
    length = [] if "--num_train_epochs" in command or "--max_" in command else ["--max_steps", "80"]
    return load_config([*OPTIONS, *length, *command.split()])[0]


def saved(run_id="own", step=4, schedule=None, identity=None, num_processes=1, **state):
    """Return what a checkpoint says."""
    schedule = schedule or plan_schedule(config_of(), 100)
    examples = state.pop("examples", step * schedule.global_batch_size)
    return SavedState(RunState(run_id, step, examples, **state), schedule, identity or {}, "no", num_processes, None)


def whole(path, run_id="own", **hub):
    return Checkpoint(Path(path), None, saved(run_id), **hub)


def folder(*steps, **facts):
    """Return the folder of the run. `checkpoint` holds its newest."""
    return Folder(Path("run"), "/w/run", steps, run_id="own" if steps else None, **facts)


def named(text="base/checkpoint-2", steps=(2,), run_id="base", **facts):
    """Return a checkpoint of another run, or, by its place, of this one."""
    place = text if text.startswith("hf://") else f"/w/{text}"
    return NamedCheckpoint(text, place, facts.pop("folder", "/w/base"), steps, run_id, **facts)


def hub(main_branch, *steps):
    """Return what is found before a run that is published, in a folder with checkpoints of these steps."""
    return {"folder": folder(*steps), "main_branch": main_branch}


def no(words):
    """Return the pattern of a refusal that contains the words."""
    return f"refused: .*{words}"


OWN, DAMAGED = whole("run/checkpoint-4"), Checkpoint(Path("run/checkpoint-4"), "rng.pt is missing")
OLDER, THERE = whole("run/checkpoint-2"), whole("base/checkpoint-2", "base")
ON_HUB = whole("run/.hub/resumed/checkpoint-4", repo_id="me/tiny", branch="step-000004-1.0k-own")
FINISHED = {"results": ("model.safetensors",), "logs": ("metrics.jsonl",)}
DIED = {"logs": ("metrics.jsonl",)}
MINE, ANOTHER = MainBranch("own", 4, ("README.md",), True), MainBranch("other", 9, ("README.md",), True)
PUBLIC = MainBranch(None, 0, (), is_private=False)
ADDRESS = named("hf://me/tiny")
HERE = named("run/checkpoint-4", (4,), "own", folder="/w/run")
BRANCHED = folder(4, origin="/w/base/checkpoint-2")

# command, what is found -> where the run starts, or no(words of the refusal)
STARTS = [
    # --- a new run
    ("", {"folder": folder()}, "new"),
    (AUTO, {"folder": folder()}, "new: .*the run starts at step 0"),
    ("", {"folder": folder(in_use=True)}, no("in use by another process; .*another --output_dir")),
    ("", {"folder": folder(2, 4, in_use=True)}, no("in use by another process")),
    ("", {"folder": folder(2, 4)}, no("another run .checkpoint-2, .*resume it .*auto.*another --output_dir")),
    ("", {"folder": folder(**FINISHED)}, no("contains another run .*delete the folder")),
    ("", {"folder": folder(**DIED)}, no("contains another run")),
    ("", {"folder": folder(replaced=("README.md",))}, no("would replace .README.md.; choose another --output_dir")),
    ("", {"folder": folder(origin="/w/base/checkpoint-2")}, "new"),  # what another run has left
    # --- its own checkpoints
    (AUTO, {"folder": folder(2, 4), "checkpoints": (OWN,)}, "continues run/checkpoint-4"),
    (LATEST, {"folder": folder(2, 4), "checkpoints": (OWN,)}, "continues run/checkpoint-4"),
    (AUTO, {"folder": folder(4, **FINISHED), "checkpoints": (OWN,)}, "continues run/checkpoint-4"),
    (AUTO, {"folder": folder(2, 4), "checkpoints": (DAMAGED, OLDER)}, "continues run/checkpoint-2: skipping .*rng.pt"),
    (AUTO, {"folder": folder(4), "checkpoints": (DAMAGED,)}, no("no valid checkpoint .*rng.pt is missing")),
    (LATEST, {"folder": folder(4), "checkpoints": (DAMAGED,)}, no("no valid checkpoint")),
    (LATEST, {"folder": folder()}, no("there is no checkpoint in run; pass auto")),
    (LATEST, {"folder": folder(**DIED)}, no("there is no checkpoint in run")),
    (AUTO, {"folder": folder(**DIED)}, "new: .*the run starts at step 0"),  # it died before its first checkpoint
    (AUTO, {"folder": folder(**FINISHED)}, no("contains another run")),  # its model could be anyone's
    (
        "--resume_from_checkpoint run/checkpoint-4",
        {"folder": folder(2, 4), "named": HERE, "checkpoints": (OWN,)},
        "continues run/checkpoint-4",
    ),
    (
        "--resume_from_checkpoint ../w/run/checkpoint-4",  # by another spelling
        {"folder": folder(2, 4), "named": dataclasses.replace(HERE, text="../w/run"), "checkpoints": (OWN,)},
        "continues run/checkpoint-4",
    ),
    (
        "--resume_from_checkpoint run",
        {"folder": folder(2, 4), "named": named("run", (2, 4), "own", folder="/w/run"), "checkpoints": (OWN,)},
        "continues run/checkpoint-4",
    ),
    (
        "--resume_from_checkpoint run/checkpoint-2",
        {"folder": folder(2, 4), "named": named("run/checkpoint-2", (2,), "own", folder="/w/run")},
        no("newer checkpoints, up to checkpoint-4; pass auto .* another --output_dir to start from checkpoint-2"),
    ),
    (
        "--resume_from_checkpoint run/checkpoint-2",  # which has been pruned
        {"folder": folder(4), "named": named("run/checkpoint-2", (), None, folder="/w/run")},
        no("newer checkpoints, up to checkpoint-4; pass auto"),
    ),
    (
        "--resume_from_checkpoint original/checkpoint-4",  # the folder is a copy of that run's
        {"folder": folder(2, 4), "named": named("original/checkpoint-4", (4,), "own"), "checkpoints": (OWN,)},
        "continues run/checkpoint-4",
    ),
    (
        "--resume_from_checkpoint original/checkpoint-2",
        {"folder": folder(2, 4), "named": named("original/checkpoint-2", (2,), "own")},
        no("newer checkpoints, up to checkpoint-4; pass auto"),
    ),
    (
        "--resume_from_checkpoint original/checkpoint-6",  # the copy has not got so far
        {"folder": folder(2, 4), "named": named("original/checkpoint-6", (6,), "own")},
        no("of the same run as checkpoint-4 in run, but newer; move it to run and pass auto"),
    ),
    # --- branches: a checkpoint of another folder
    (BASE, {"folder": folder(), "named": named(), "checkpoints": (THERE,)}, "branches from base/checkpoint-2"),
    (BASE, {"folder": folder(2, 4), "named": named()}, no("contains another run")),
    (BASE, {"folder": folder(**DIED), "named": named()}, no("contains another run")),
    (
        BASE,  # the same command again
        {"folder": BRANCHED, "named": named(), "checkpoints": (OWN,)},
        "continues run/checkpoint-4: run continues base/checkpoint-2 already",
    ),
    (
        BASE,  # before its first checkpoint
        {"folder": folder(origin="/w/base/checkpoint-2", **DIED), "named": named(), "checkpoints": (THERE,)},
        "branches from base/checkpoint-2",
    ),
    (
        AUTO,
        {"folder": folder(origin="/w/base/checkpoint-2", **DIED), "named": named(), "checkpoints": (THERE,)},
        "branches from base/checkpoint-2",
    ),
    (AUTO, {"folder": BRANCHED, "checkpoints": (OWN,)}, "continues run/checkpoint-4"),
    (
        AUTO,
        {"folder": folder(origin="/w/base/checkpoint-2"), "named": named(steps=(), is_gone=True)},
        no("began with base/checkpoint-2, which is gone; restore it, or delete run/.resumed_from"),
    ),
    (
        AUTO,  # it is there, but its checkpoint is not
        {"folder": folder(origin="/w/base"), "named": named("base", ())},
        no("there is no checkpoint in base"),
    ),
    (
        "--resume_from_checkpoint base/checkpoint-9",
        {"folder": folder(), "named": named("base/checkpoint-9", (), None, beside=(2, 4))},
        no("no checkpoint in base/checkpoint-9; base has checkpoint-2, checkpoint-4"),
    ),
    (BASE, {"folder": folder(**FINISHED), "named": named()}, no("contains another run")),
    (
        BASE,  # a finished branch, whose checkpoints are gone
        {"folder": folder(origin="/w/base/checkpoint-2", **FINISHED), "named": named()},
        no("contains another run"),
    ),
    # --- the Hub
    (PUSH, {"folder": folder()}, "new"),
    (PUSH, hub(ANOTHER), no("holds another run, at step 9; pass another --hub_model_id")),
    (PUSH, hub(MainBranch(None, 0, ("model.bin",), True)), no("files that no run .*model.bin")),
    (f"{PUSH} --hub_overwrite", hub(ANOTHER), "new"),
    (f"{PUSH} --hub_private_repo", hub(PUBLIC), no("is public; .*--hub_private_repo")),
    (f"{PUSH} {AUTO}", {**hub(MINE), "checkpoints": (ON_HUB,)}, "continues .*: resuming from me"),
    (f"{PUSH} {AUTO}", {"folder": folder()}, "new: .*the run starts at step 0"),  # a repository without a checkpoint
    (f"{PUSH} {AUTO} --hub_overwrite", hub(MINE), "new"),
    (f"{PUSH} {AUTO}", {**hub(MINE, 4), "checkpoints": (OWN,)}, "continues run/checkpoint-4"),
    (f"{PUSH} {AUTO}", {**hub(ANOTHER, 4), "checkpoints": (OWN,)}, no("holds another run")),
    (f"{PUSH} {BASE}", {**hub(MINE), "named": named(), "checkpoints": (THERE,)}, no("another")),
    (HUB, {"folder": folder(), "named": ADDRESS, "checkpoints": (ON_HUB,)}, "continues run/.hub/resumed"),
    (HUB, {"folder": folder(4), "named": ADDRESS}, no("contains another run")),
    (
        HUB,
        {"folder": folder(4, origin="hf://me/tiny"), "named": ADDRESS, "checkpoints": (OWN,)},
        "continues run/checkpoint-4: run continues hf://me/tiny already",
    ),
    (
        AUTO,
        {"folder": folder(origin="hf://me/tiny", **DIED), "named": ADDRESS, "checkpoints": (ON_HUB,)},
        "continues run/.hub/resumed",
    ),
    # --- processes, devices, trackers
    ("", {"facts": Facts("cpu", 3)}, no("not divisible by 3 processes; pass --global_batch_size 6 or 9")),
    ("--global_batch_size 24", {"facts": Facts("cpu", 3)}, "new"),
    ("--mixed_precision fp16", {"facts": CPU}, no("fp16 requires a CUDA device")),
    ("", {"facts": Facts("cuda", 2, Sharding(2), launcher_mode="max-autotune")}, no("--dynamo_mode default")),
    ("--optim adamw_bnb_8bit", {"facts": Facts("cuda", 2, Sharding(2))}, no("FSDP does not work with --optim")),
    ("--mixed_precision fp16", {"facts": Facts("cuda", 2, Sharding(2))}, no("--mixed_precision bf16 or no")),
    ("", {"facts": Facts("cuda", launcher_precision="fp8")}, no("mixed_precision fp8 is not supported")),
    ("--report_to wandb", {"trackers": ("tensorboard",)}, no("wandb is not installed; .*--report_to")),
    ("--report_to tensorboard", {"trackers": ("tensorboard",)}, "new"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "found", "expected"), STARTS)
def test_where_a_run_starts(command, found, expected):
    try:
        start = decide_start(config_of(command), "demo", Surroundings(**{"facts": CPU, "folder": folder(), **found}))
    except UserError as error:
        assert re.match(expected, f"refused: {error}")
        return
    how = (
        "new" if start.resume is None else f"{'continues' if start.continues else 'branches from'} {start.resume.path}"
    )
    assert re.match(expected, f"{how}: {'; '.join(start.says)}"), (how, start.says)


def test_what_a_run_records_of_where_it_began():
    """So that `auto` finds it before the first checkpoint. A new run forgets what an earlier one has left."""
    found = {"facts": CPU, "folder": folder(origin="/w/old")}
    assert decide_start(config_of(), "demo", Surroundings(**found)).origin is None
    branch = Surroundings(CPU, folder(), named(), (THERE,))
    assert decide_start(config_of(BASE), "demo", branch).origin == "/w/base/checkpoint-2"
    again = Surroundings(CPU, BRANCHED, None, (OWN,))
    assert decide_start(config_of(AUTO), "demo", again).origin == "/w/base/checkpoint-2"


# ------------------------------------------------------------------ run


SHAPE = {"vocab_size": 500, "n_positions": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
MODEL = GPT2Config(**SHAPE, n_embd=64)
METADATA = {"content_sha256": "a" * 64, "tokenizer_sha256": "b" * 64, "fingerprint": "f", "source": {}}
METADATA |= {"splits": {"train": {"rows": 100}}}
DATA, ROOM = DataFacts(100, 100 * MB, metadata=METADATA), Memory(8000 * MB, 16000 * MB)
SLOW_BF16 = Measured({"no": 1e11, "bf16": 3e10}, {"sdpa": 1.0, "eager": 1.2}, 2)
FAST_BF16 = Measured({"no": 1e11, "bf16": 4e11}, {"sdpa": 2.0, "eager": 1.0}, 2)


def start_of(command="", before=None, facts=CPU, branches=False, **checkpoint):
    """Return the start of a run, or of one that continues a checkpoint, or branches from it. before: from `saved`."""
    resume = None if before is None else Checkpoint(Path("run/checkpoint-20"), None, before, **checkpoint)
    words = {word[2:] for word in command.split() if word.startswith("--")}
    around = Surroundings(facts, folder(), typed_options=frozenset(words))
    return Start(config_of(command), "demo", around, resume, continues=resume is not None and not branches)


def run_of(command="", before=None, data=DATA, memory=ROOM, rates=FAST_BF16, model=MODEL, **start) -> Run:
    shape = ModelFacts(model, model, MODEL if before else None)
    return decide_run(start_of(command, before, **start), data, shape, memory, rates)


def after(step, command="", facts=CPU, rates=FAST_BF16, **state):
    """Return what the checkpoint of a run says after some steps."""
    run = run_of(command, facts=facts, rates=rates)
    hardware = {"device_type": run.facts.device_type, "mixed_precision": run.config.mixed_precision}
    hardware |= {"dynamo_backend": "no", "attn_implementation": run.config.attn_implementation, "num_threads": 2}
    state = {
        "memory": run.plan.choices,
        "hardware": hardware,
        "initial": {"num_rows": 7},
        "progress": step / 80,
        "stages": [Stage(run.config.block_size, METADATA["content_sha256"])],
    } | state
    return saved("own", step, run.schedule, run.identity, facts.num_processes, **state)


def show(run):
    """Return what a table shows of a run."""
    plan, config = run.plan, run.config
    return (
        f"{config.mixed_precision} {config.dynamo_backend} {config.attn_implementation}, "
        f"{run.facts.num_processes} x {run.grad_accum} x {plan.micro_batch_size}, "
        f"{run.schedule.max_steps} steps, {run.schedule.num_examples} examples, {len(run.changes)} changes"
        + ", a new stage" * run.begins_stage
        + ", keeps the best" * (config.load_best_model_at_end == "true")
    )


EPOCHS = "--num_train_epochs 6.4"  # of 100 rows: 80 steps of 8
SIX, EIGHT = (Facts("cpu", count, thread_counts=(1,)) for count in (6, 8))
WIDE = GPT2Config(**SHAPE, n_embd=128)
AT_20 = partial(after, 20)
OWN_DATA = DataFacts(100, is_packed=False, metadata=METADATA)
OTHER_TEXT = DataFacts(100, metadata=METADATA | {"content_sha256": "c" * 64})
OTHER_TOKENIZER = DataFacts(100, metadata=METADATA | {"tokenizer_sha256": "c" * 64})
BRANCH = {"before": AT_20, "branches": True}
LONGER = GPT2Config(**SHAPE | {"n_positions": 64}, n_embd=64)
PART = METADATA | {"share": 0.75}
MIXTURE = DataFacts(200, metadata=METADATA | {"mixture": {"a": PART, "b": METADATA | {"share": 0.25}}})
TWO_ROWS = {"micro_batch_size": 2, "activation_checkpointing": 0, "loss_chunks": 1}
BATCH = "--global_batch_size 24"

# command, what is found -> the run, or no(words of the refusal)
RUNS = [
    # --- what `auto` becomes
    ("", {}, "bf16 no eager, 1 x 1 x 8, 80 steps, 640 examples, 0 changes"),
    ("", {"rates": SLOW_BF16}, "no no sdpa, 1 x 1 x 8"),
    ("--mixed_precision no --dynamo_backend inductor", {}, "no inductor eager"),
    ("", {"facts": Facts("cuda"), "rates": None}, "bf16 inductor sdpa, 1 x 1 x 8"),
    ("", {"facts": Facts("cuda", has_bf16=False), "rates": None}, "fp16 inductor sdpa"),
    ("", {"facts": Facts("cuda", why_no_inductor="no Triton"), "rates": None}, "bf16 no sdpa"),
    ("", {"facts": dataclasses.replace(CPU, launcher_precision="no", launcher_backend="inductor")}, "bf16 inductor"),
    ("", {"facts": Facts("cuda", 2), "rates": None}, "bf16 inductor sdpa, 2 x 1 x 4"),
    ("--per_device_train_batch_size 2", {}, "bf16 no eager, 1 x 4 x 2"),
    ("", {"memory": Memory(10, 16000 * MB)}, "bf16 no eager, 1 x 8 x 1"),  # nothing fits, so the least is tried
    ("--data_placement device", {"memory": Memory(50 * MB, 50 * MB)}, no("rows take 0.1 GB.* use ram or mmap")),
    ("--data_placement ram", {"data": OWN_DATA}, no("--data_placement require a packed dataset")),
    ("--bf16_residual --mixed_precision no", {}, no("--bf16_residual requires bf16")),
    # --- its length
    (EPOCHS, {}, "bf16 no eager, 1 x 1 x 8, 80 steps, 640 examples"),
    (f"{EPOCHS} --global_batch_size 6", {}, ".*, 107 steps, 642 examples"),
    ("--max_minutes 5", {}, ".*, None steps, None examples"),
    # --- which model it exports
    (EPOCHS, {}, ".*, keeps the best"),
    ("--num_train_epochs 2", {}, ".* 200 examples, 0 changes$"),
    ("--max_steps 25", {}, ".* 200 examples, 0 changes$"),
    ("--max_steps 26", {}, ".* 208 examples, 0 changes, keeps the best"),
    ("--max_minutes 5", {}, ".*, keeps the best"),  # how many epochs is not known
    (f"{EPOCHS} --load_best_model_at_end false", {}, ".* 640 examples, 0 changes$"),
    ("--num_train_epochs 2 --load_best_model_at_end true", {}, ".*, keeps the best"),
    ("--max_steps 40", {"data": MIXTURE}, ".* 320 examples, 0 changes, keeps the best"),  # 2.4 epochs of the first
    ("--max_steps 20", {"data": MIXTURE}, ".* 160 examples, 0 changes$"),
    # --- a run that resumes keeps what it measured, its rows and its memory options
    ("", {"before": AT_20, "rates": SLOW_BF16}, "bf16 no eager, .*, 640 examples, 0 changes"),
    ("", {"before": partial(after, 20, memory=TWO_ROWS)}, ".*, 1 x 4 x 2"),
    ("", {"before": AT_20, "facts": Facts("cuda"), "rates": None}, "bf16 inductor sdpa"),  # another device
    # --- other processes: 8 -> 6 -> 8
    (BATCH, {"before": partial(after, 20, BATCH, EIGHT), "facts": SIX}, "bf16 no eager, 6 x 1 x 4, .* 0 changes"),
    (BATCH, {"before": partial(after, 40, BATCH, SIX), "facts": EIGHT}, "bf16 no eager, 8 x 1 x 3, .* 0 changes"),
    # --- what may change, and what may not
    ("--max_steps 160", {"before": AT_20}, ".*, 160 steps, 1280 examples, 1 changes"),
    ("--max_steps 10", {"before": AT_20}, no("is at step 20 already; pass a larger --max_steps")),
    ("--num_train_epochs 1", {"before": AT_20}, no("is at step 20 already; pass a larger --num_train_epochs")),
    ("--learning_rate 0.002 --lr_scheduler_type cosine", {"before": AT_20}, ".*, 3 changes"),
    ("--warmup_steps 8", {"before": AT_20}, ".*, 0 changes"),  # it is over
    ("--global_batch_size 4", {"before": AT_20}, ".*, 80 steps, 400 examples, 1 changes"),
    (f"{EPOCHS} --global_batch_size 4", {"before": partial(after, 20, EPOCHS)}, ".*, 140 steps, 640 examples, 2 ch"),
    ("--seed 1", {"before": AT_20}, no("seed 1337 -> 1; .*start a new run")),
    ("--optim muon", {"before": AT_20}, no("optim .*start a new run")),
    ("", {"before": AT_20, "model": WIDE}, no("n_embd 64 -> 128")),
    # --- other data: in the same folder they are refused, in a branch they are a stage
    ("", {"before": AT_20, "data": OTHER_TEXT}, no("dataset aaaaaaaaaaaa -> c{12}; pass its data .* in another")),
    ("", BRANCH, ".* 640 examples, 0 changes, keeps the best"),
    ("", BRANCH | {"data": OTHER_TEXT}, ".* 640 examples, 0 changes, a new stage, keeps the best"),
    ("--max_steps 40", BRANCH | {"data": OTHER_TEXT}, ".* 320 examples, 1 changes, a new stage$"),  # 1.6 epochs of it
    ("--max_steps 20", BRANCH | {"data": OTHER_TEXT}, no("no step of the run is left for the new data")),
    ("--num_train_epochs 1", BRANCH | {"data": OTHER_TEXT}, ".* 33 steps, 264 examples, .*, a new stage"),
    ("--block_size 16", BRANCH, ".*, a new stage"),  # the model keeps its positions
    ("", BRANCH | {"model": LONGER}, no("n_positions 32 -> 64; pass --block_size 32")),
    ("", BRANCH | {"data": OTHER_TOKENIZER}, no("prepare the text with .* --tokenizer_name run/checkpoint-20")),
    ("--seed 1", BRANCH | {"data": OTHER_TEXT}, no("seed 1337 -> 1")),
    # --- the Hub: with another schedule, a download begins a new run
    (f"{PUSH} {AUTO} --max_steps 160", {"before": AT_20, "repo_id": "me/tiny"}, ".*, 160 steps"),
    # --- an earlier start ran out of memory
    ("", {"memory": Memory(8000 * MB, 16000 * MB, (2, (1, 16000 * MB)))}, ".*, 1 x 1 x 8"),  # with other options
]  # fmt: skip


@pytest.mark.parametrize(("command", "found", "expected"), RUNS)
def test_what_a_run_is(command, found, expected):
    if "before" in found:
        found = found | {"before": found["before"]()}
    try:
        run = run_of(command, **found)
    except UserError as error:
        assert re.match(expected, f"refused: {error}")
        return
    assert re.match(expected, show(run)), show(run)
    assert run.config.per_device_train_batch_size == run.requested.per_device_train_batch_size
    assert "auto" not in (run.config.mixed_precision, run.config.dynamo_backend, run.config.loss_chunks)
    if found.get("before"):
        assert run.config.max_eval_samples == 7  # the rows of the run, however long it is now


def with_typed(start, *names):
    return dataclasses.replace(
        start, surroundings=dataclasses.replace(start.surroundings, typed_options=frozenset(names))
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        *[("--eval_steps 30", 12), ("--eval_steps 5", 5), ("--eval_steps 0", 0)],
        *[("--eval_steps 30 --max_steps 20", 30), ("--max_steps 4000", 100)],
    ],
)
def test_the_best_model_is_looked_for_in_every_epoch(command, expected):
    """Of 100 rows in steps of 8, if the run keeps the best model; but not more than 40 times."""
    assert run_of(command).config.eval_steps == expected


def test_a_batch_without_consent_is_refused():
    """It may come from another recipe. Typed, it is consent; so are both of its factors."""
    start = start_of("--global_batch_size 4", after(20))
    shape = ModelFacts(MODEL, MODEL, MODEL)
    with pytest.raises(UserError, match="global_batch_size 8 -> 4; pass --global_batch_size 4 to continue"):
        decide_run(with_typed(start), DATA, shape, ROOM, FAST_BF16)
    both = with_typed(start, "per_device_train_batch_size", "gradient_accumulation_steps")
    assert decide_run(both, DATA, shape, ROOM, FAST_BF16).changes


def test_a_run_that_ran_out_of_memory_continues_with_less():
    """If options and device are the same; a typed size wins."""
    made_for = run_of().plan.made_for
    less = Memory(8000 * MB, 16000 * MB, (2, made_for))
    assert run_of(memory=less).plan.micro_batch_size == 2 and run_of(memory=less).plan.ran_out
    assert run_of("--per_device_train_batch_size 4", memory=less).plan.micro_batch_size == 4
    assert run_of(memory=Memory(8000 * MB, 24000 * MB, (2, made_for))).plan.micro_batch_size == 8


@pytest.mark.parametrize("kind", ["linear", "cosine_with_min_lr", "warmup_stable_decay"])
def test_epochs_with_another_batch_follow_the_same_curve(kind):
    """At 40% of the data, the rate is that of 40%, with any batch and also afterwards."""
    command = f"--num_train_epochs 4 --lr_scheduler_type {kind} --warmup_steps 0.1"
    before = after(20, command)
    assert before.state.examples == 160 and before.schedule.num_examples == 400
    for batch in (4, 8, 16, 2):
        now = run_of(f"{command} --global_batch_size {batch}", before).schedule
        assert now.num_examples == 400 and now.warmup_examples == before.schedule.warmup_examples
        assert describe_jump(before.schedule, now, 160, 160 / 400, 160 / 400) is None
        assert describe_jump(before.schedule, now, 320, 320 / 400, 320 / 400) is None


def test_rounding_does_not_change_the_length_of_a_run():
    """118,000 rows x 1.1 are 129,800.00000000001, of which 1,299 batches of 100 have to remain at any step."""
    config = config_of("--num_train_epochs 1.1 --global_batch_size 100")
    whole = plan_schedule(config, 118_000)
    assert all(plan_schedule(config, 118_000, step, 100 * step) == whole for step in range(1, whole.max_steps + 1))


# ------------------------------------------------------------------ turn

EVERY = "--save_steps 10 --eval_steps 20 --load_best_model_at_end false"
WSD = "--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs num_decay_steps=20"
STALLED = {"losses": {"20": 1.0, "40": 2.0, "60": 3.0}}

# command, the state, whether a signal has arrived -> what the loop does
TURNS = [
    (EVERY, {"step": 0}, False, "evaluate"),
    (EVERY, {"step": 0, "evaluations": {0: {}}}, False, "step"),
    (EVERY, {"step": 5}, False, "step"),
    (EVERY, {"step": 10}, False, "save step"),
    (EVERY, {"step": 10, "saved_step": 10}, False, "step"),
    (EVERY, {"step": 20}, False, "save evaluate"),
    (EVERY, {"step": 20, "saved_step": 20}, False, "evaluate"),
    (EVERY, {"step": 20, "saved_step": 20, "evaluations": {20: {}}}, False, "step"),
    (EVERY, {"step": 80}, False, "save evaluate"),
    (EVERY, {"step": 80, "saved_step": 80, "evaluations": {80: {}}}, False, "end"),
    ("--save_steps 0 --eval_steps 0", {"step": 20}, False, "step"),
    ("--save_steps 0 --eval_steps 0", {"step": 80}, False, "evaluate"),
    ("--save_steps 0 --eval_steps 0", {"step": 80, "evaluations": {80: {}}}, False, "end"),
    (EVERY, {"step": 25, "stages": [Stage(32), Stage(32, step=25)]}, False, "evaluate"),  # other data begin
    # --- a signal: the checkpoint is asked for whatever is known of it, because its write may have failed
    (EVERY, {"step": 0}, True, "end"),
    (EVERY, {"step": 5}, True, "save end"),
    (EVERY, {"step": 20, "saved_step": 20}, True, "save end"),
    ("--save_steps 0", {"step": 5}, True, "save end"),
    (EVERY, {"step": 80}, True, "save end"),
    # --- time
    ("--max_minutes 10", {"step": 5, "seconds": 300.0}, False, "step"),
    ("--max_minutes 10", {"step": 5, "seconds": 600.0}, False, "save evaluate"),
    ("--max_minutes 10 --max_steps 80", {"step": 80, "seconds": 9.0}, False, "save evaluate"),
    # --- the checkpoint before the decay
    (f"{EVERY} {WSD}", {"step": 59}, False, "step"),
    (f"{EVERY} {WSD} --save_steps 1000", {"step": 60}, False, "save evaluate"),
    (f"{EVERY} {WSD} --save_steps 1000", {"step": 61, "decay_start": 60}, False, "step"),
    (f"{EVERY} {WSD} --save_steps 0 --eval_steps 0", {"step": 60}, False, "step"),
    # --- patience
    (f"{EVERY} --early_stopping_patience 2", {"step": 60, "evaluations": {60: {}}, **STALLED}, False, "save end"),
    (f"{EVERY} --early_stopping_patience 3", {"step": 60, "evaluations": {60: {}}, **STALLED}, False, "save step"),
    (f"{EVERY} --early_stopping_patience 2", {"step": 60, "patience_start": 60, **STALLED}, False, "save evaluate"),
    (f"{EVERY} --early_stopping_patience 2", {"step": 61, "patience_start": 60, **STALLED}, False, "step"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "state", "stop", "expected"), TURNS)
def test_what_a_turn_does(command, state, stop, expected):
    run = run_of(command)
    turn = decide_turn(run, RunState(**{"examples": 8 * state["step"], "stages": [Stage(32)], **state}), stop)
    does = ["save"] * turn.save + ["evaluate"] * turn.evaluate + ["end"] * turn.end
    does += [] if turn.end or turn.evaluate else ["step"]  # after an evaluation, the loop asks again
    assert " ".join(does) == expected


# ------------------------------------------------------------------ what goes


@pytest.mark.parametrize(
    ("steps", "saved_step", "decay_start", "limit", "expected"),
    [
        ([2], 2, None, 1, []),
        ([2, 4], 4, None, 1, [2]),
        ([2, 4, 6], 6, None, 2, [2]),
        ([2, 4, 6], 6, 2, 1, [4]),  # from before the decay, the run can be extended
        ([2, 4, 9], 4, None, 1, [2]),  # a later one is from before a resume, and may be damaged
        ([2, 3, 4, 9], 4, None, 2, [2]),
    ],
)
def test_which_checkpoints_go(steps, saved_step, decay_start, limit, expected):
    assert list_pruned(steps, saved_step, decay_start, limit) == expected


def test_a_finished_warm_up_is_not_repeated():
    """As a share of a new length, it would be longer. One of typed steps keeps its examples with another batch."""
    before = Schedule(8, 20, None, 0.1, "constant_with_warmup", None, 0.1, 160, 16)
    longer = config_of("--max_steps 100 --warmup_steps 0.1 --lr_scheduler_type constant_with_warmup")
    assert plan_schedule(longer, 1, 4, 32, before).warmup_examples == 16
    assert plan_schedule(longer, 1, 1, 8, before).warmup_examples == 80  # it is not over
    timed = plan_schedule(config_of("--max_minutes 10 --warmup_steps 0.1"), 1)
    for length in ("--max_minutes 1000", "--max_steps 10000"):
        longer = config_of(f"{length} --warmup_steps 0.1")
        assert plan_schedule(longer, 1, 500, 4000, timed, 0.9).warmup_examples == 0
        assert plan_schedule(longer, 1, 5, 40, timed, 0.05).warmup_examples in (None, 8000)  # it is not over
    assert plan_schedule(config_of("--max_minutes 10 --warmup_steps 0.1"), 1, 500, 4000, timed, 0.9) == timed
    typed = dataclasses.replace(before, warmup_steps=10, warmup_examples=80)
    other_batch = config_of("--warmup_steps 10 --global_batch_size 4 --max_steps 20")
    assert plan_schedule(other_batch, 1, 5, 40, typed).warmup_examples == 80
    assert math.isclose(plan_schedule(other_batch, 1).warmup_examples, 40)
