"""What a run does, and when, as tables: the command and what is found -> the decision, or what a refusal names."""

import dataclasses
import os
import re
from functools import partial
from pathlib import Path

import pytest
from transformers import GPT2Config

from recipe.checkpoint import RunState, SavedState, Stage, list_pruned
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware.choices import Machine
from recipe.hardware.probe import Measured
from recipe.hardware.sharding import Sharding
from recipe.optim.schedule import Schedule, plan_schedule
from recipe.publish.hub import MainBranch
from recipe.run.decide import (
    Checkpoint,
    DataFacts,
    Folder,
    ModelFacts,
    Named,
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
CPU = Machine("cpu", thread_counts=(2,))
REFUSED = "refused: "  # and the words that the refusal contains


def config_of(command=""):
    length = [] if re.search("--num_train_epochs|--max_steps|--max_minutes", command) else ["--max_steps", "80"]
    return load_config([*OPTIONS, *length, *command.split()])[0]


def saved(run_id="own", step=4, schedule=None, identity=None, num_processes=1, **state):
    """Return what a checkpoint says."""
    schedule = schedule or plan_schedule(config_of(), 100)
    examples = state.pop("examples", step * schedule.global_batch_size)
    return SavedState(RunState(run_id, step, examples, **state), schedule, identity or {}, "no", num_processes, None)


def check_decision(decide, expected):
    """Assert that a decision matches a pattern, or that its refusal contains all words. decide: returns a text."""
    try:
        found = decide()
    except UserError as error:
        assert expected.startswith(REFUSED), error
        assert [word for word in expected.removeprefix(REFUSED).split() if word not in str(error)] == [], error
        return
    assert re.match(expected, found), found


# ------------------------------------------------------------------ start


def whole(path, run_id="own", **hub):
    return Checkpoint(Path(path), None, saved(run_id), **hub)


def at(*steps, machine=CPU, named=None, has=(), main_branch=None, **folder):
    """Return what a run meets in a folder with checkpoints of these steps.

    has: the checkpoints to begin with. named: what the command names. folder: values of `Folder`.
    """
    found = Folder(Path("run"), "/w/run", steps, **folder)
    return Surroundings(machine, found, named, has, main_branch)


def there(text="base/checkpoint-2", **values):
    """Return what the command names: a path, or an address of the Hub."""
    return Named(text, text if text.startswith("hf://") else f"/w/{text}", **values)


PUSH = "--push_to_hub --hub_model_id me/tiny --hub_strategy checkpoint"
RESUME = "--resume_from_checkpoint"
AUTO, FROM_BASE, FROM_HUB = (f"{RESUME} {word}" for word in ("auto", "base/checkpoint-2", "hf://me/tiny"))
OWN = whole("run/checkpoint-4")
DAMAGED = Checkpoint(Path("run/checkpoint-4"), "rng.pt is missing")
HARDWARE = {"device_type": "cuda", "mixed_precision": "fp16"}
FP16 = Checkpoint(Path("run/checkpoint-4"), None, saved(hardware=HARDWARE))
OLDER = whole("run/checkpoint-2")
THERE = whole("base/checkpoint-2", "base")
ON_HUB = whole("run/.hub/resumed/checkpoint-4", repo_id="me/tiny", branch="step-000004-1.0k-own")
FORK = dataclasses.replace(ON_HUB, repo_id="u/fork")
BASE = there()
ADDRESS = there("hf://me/tiny")
CONTINUES = "continues run/checkpoint-4"
UP_TO = "refused: checkpoint-4; auto --output_dir"
TAKEN = "refused: run contains delete --output_dir"
HELD = "refused: me/tiny holds --hub_model_id, --hub_overwrite"
BEGAN = "/w/base/checkpoint-2"  # where a branch says that it began
FINISHED = {"left": ("summary.json", "model.safetensors", "metrics.jsonl"), "has_ended": True}
DIED = {"left": ("model.safetensors", "metrics.jsonl")}  # after an evaluation with a lowest loss
ENDED = "refused: run ended delete --output_dir"
CARD = ("README.md",)
MINE = MainBranch("own", 4, CARD, is_private=True)
ANOTHER = MainBranch("other", 9, CARD, is_private=True)
PUBLIC = MainBranch(None, 0, (), is_private=False)
SHARDED = Machine("cuda", 2, Sharding(2))
GRAPHS = Machine("cuda", launcher_mode="max-autotune")

# command, what is found -> where the run starts, or what a refusal names
STARTS = [
    # --- a new run
    ("", at(), "new"),
    (AUTO, at(), "new: .*the run starts at step 0"),
    ("", at(2, 4), f"{TAKEN} checkpoint-4 auto"),
    ("", at(**FINISHED), TAKEN),
    ("", at(replaced=CARD), "refused: README.md --output_dir"),
    # --- its own checkpoints
    (AUTO, at(2, 4, has=(OWN,)), CONTINUES),
    (AUTO, at(2, 4, has=(DAMAGED, OLDER)), "continues run/checkpoint-2: skipping .*rng.pt"),
    (AUTO, at(4, has=(DAMAGED,)), "refused: run/checkpoint-4 rng.pt --output_dir"),
    (AUTO, at(**DIED), "new: .*the run starts at step 0"),  # it died before its first checkpoint
    (AUTO, at(**FINISHED), ENDED),  # without a checkpoint
    (f"{RESUME} run", at(2, 4, named=there("run"), has=(OWN,)), CONTINUES),
    (f"{RESUME} run/checkpoint-4", at(2, 4, named=there("run/checkpoint-4"), has=(OWN,)), CONTINUES),
    (f"{RESUME} run/checkpoint-2", at(2, 4, named=there("run/checkpoint-2"), has=(OWN,)), f"{UP_TO} run/checkpoint-2"),
    # --- branches: a checkpoint of another folder
    (FROM_BASE, at(named=BASE, has=(THERE,)), "branches from base/checkpoint-2"),
    (FROM_BASE, at(2, 4, named=BASE, has=(OWN,)), f"{UP_TO} base/checkpoint-2"),
    (FROM_BASE, at(named=BASE, has=(THERE,), origin=BEGAN, **FINISHED), ENDED),  # whose checkpoints are gone
    # The same command again.
    (FROM_BASE, at(4, named=BASE, has=(OWN,), origin=BEGAN), f"{CONTINUES}: run continues base/checkpoint-2 already"),
    (f"{RESUME} base", at(4, named=there("base"), has=(OWN,), origin=BEGAN), CONTINUES),
    (FROM_HUB, at(4, named=ADDRESS, has=(OWN,), origin="hf://me/tiny@step-2"), CONTINUES),
    # Before the first checkpoint of the branch.
    (FROM_BASE, at(named=BASE, has=(THERE,), origin=BEGAN, **DIED), "branches from base/checkpoint-2"),
    (AUTO, at(named=BASE, has=(THERE,), origin=BEGAN, **DIED), "branches from base/checkpoint-2"),
    (AUTO, at(named=there(is_gone=True), origin=BEGAN), "refused: base/checkpoint-2, run/.resumed_from"),
    (f"{RESUME} base", at(named=there("base/c", beside=(2, 4))), "refused: base/c; checkpoint-2, checkpoint-4"),
    (f"{RESUME} base", at(named=there("base")), "refused: base; --model_name_or_path"),
    # --- the Hub
    (PUSH, at(main_branch=ANOTHER), f"{HELD} 9"),
    (f"{PUSH} --hub_overwrite", at(main_branch=ANOTHER), "new"),
    (f"{PUSH} --hub_private_repo", at(main_branch=PUBLIC), "refused: me/tiny public --hub_private_repo"),
    (f"{PUSH} {AUTO}", at(main_branch=MINE, has=(ON_HUB,)), "continues .*: resuming from me"),
    (f"{PUSH} {AUTO}", at(4, main_branch=MINE, has=(OWN,)), CONTINUES),
    (f"{PUSH} {AUTO}", at(4, main_branch=ANOTHER, has=(OWN,)), HELD),
    (f"{PUSH} {FROM_BASE}", at(main_branch=MINE, named=BASE, has=(THERE,)), HELD),
    # A run continues only from the repository it publishes to, whatever id a checkpoint has.
    (FROM_HUB, at(named=ADDRESS, has=(ON_HUB,)), "branches from run/.hub/resumed"),
    (f"{PUSH} {FROM_HUB}", at(named=ADDRESS, main_branch=MINE, has=(ON_HUB,)), "continues run/.hub/resumed"),
    (f"{PUSH} {RESUME} hf://u/fork", at(named=there("hf://u/fork"), main_branch=MINE, has=(FORK,)), HELD),
    (f"{PUSH} {RESUME} hf://u/fork", at(named=there("hf://u/fork"), has=(FORK,)), "branches from run/.hub/resumed"),
    # --- what does not work on the device
    ("--mixed_precision fp16", at(), "refused: fp16 CUDA cpu"),
    ("", at(machine=Machine("cuda", launcher_precision="fp8")), "refused: mixed_precision fp8 bf16"),
    ("", at(machine=Machine("cpu", launcher_backend="tensorrt")), "refused: dynamo_backend tensorrt"),
    ("--dynamo_backend inductor", at(machine=Machine("cpu", why_no_inductor="it requires X")), "refused: inductor X"),
    ("", at(machine=Machine("cpu", launcher_mode="fastest")), "refused: dynamo_mode 'fastest' default, lite,"),
    # --- FSDP
    (AUTO, at(4, machine=SHARDED, has=(FP16,)), "refused: FSDP --mixed_precision bf16"),  # kept from the checkpoint
    ("--optim adamw_bnb_8bit", at(machine=SHARDED), "refused: FSDP --optim adamw_bnb_8bit"),
    ("", at(machine=dataclasses.replace(SHARDED, launcher_mode="max-autotune")), "refused: FSDP --dynamo_mode"),
    # --- the batch, of 8, over processes
    ("", at(machine=Machine("cpu", 3)), "refused: 8 3 --global_batch_size 6 9"),
    ("--global_batch_size 2", at(machine=Machine("cpu", 4)), "refused: 2 4 --global_batch_size 4"),
    ("--per_device_train_batch_size 3", at(machine=Machine("cpu", 2)), "refused: 3 1, 2, 4, --global_batch_size 6"),
    # With CUDA graphs, a step is one micro-batch, whether it is typed or the fastest that fits.
    ("--per_device_train_batch_size 4", at(machine=GRAPHS), "refused: max-autotune 8 4; --dynamo_mode"),
    ("--block_size 1024 --global_batch_size 128", at(machine=GRAPHS), "refused: max-autotune 128 64; --dynamo_mode"),
]


@pytest.mark.parametrize(("command", "found", "expected"), STARTS)
def test_where_a_run_starts(command, found, expected):
    def decide():
        start = decide_start(config_of(command), "demo", found)
        how = "continues" if start.continues else "branches from"
        where = f"{how} {start.resume.path}" if start.resume else "new"
        return f"{where}: {'; '.join(start.says)}"

    check_decision(decide, expected)


@pytest.mark.parametrize(
    ("command", "found", "expected"),
    [
        ("", at(origin="/w/old"), None),  # a new run forgets what an earlier one has left
        (FROM_BASE, at(named=BASE, has=(THERE,)), os.path.realpath("base/checkpoint-2")),
        (AUTO, at(4, has=(OWN,), origin=BEGAN), BEGAN),
        (FROM_HUB, at(named=ADDRESS, has=(ON_HUB,)), "hf://me/tiny@step-000004-1.0k-own"),  # which may have newer ones
    ],
)
def test_a_run_records_where_it_began(command, found, expected):
    """`auto` finds the recorded origin before the run has a checkpoint of its own."""
    assert decide_start(config_of(command), "demo", found).origin == expected


# ------------------------------------------------------------------ run

SHAPE = {"vocab_size": 500, "n_positions": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
MODEL = GPT2Config(**SHAPE, n_embd=64)
WIDE = GPT2Config(**SHAPE, n_embd=128)
DROPPING = GPT2Config(**SHAPE, n_embd=64, attn_pdrop=0.3)
LONGER = GPT2Config(**SHAPE | {"n_positions": 64}, n_embd=64)
METADATA = {"content_sha256": "a" * 64, "tokenizer_sha256": "b" * 64, "fingerprint": "f", "source": {}}
METADATA |= {"splits": {"train": {"rows": 100}}}
DATA = DataFacts(100, metadata=METADATA)
ROOM = 8 * 10**9
OTHER_TEXT = DataFacts(100, metadata=METADATA | {"content_sha256": "c" * 64})
OTHER_TOKENIZER = DataFacts(100, metadata=METADATA | {"tokenizer_sha256": "c" * 64})
SLOW_BF16 = Measured({"no": 1e11, "bf16": 3e10}, {"sdpa": 1.0, "eager": 1.2}, 2)
FAST_BF16 = Measured({"no": 1e11, "bf16": 4e11}, {"sdpa": 2.0, "eager": 1.0}, 2)


def mixture_of(*shares):
    """Return a mixture of datasets of 100 rows each."""
    parts = {f"part {number}": METADATA | {"share": share} for number, share in enumerate(shares)}
    return DataFacts(100 * len(shares), metadata=METADATA | {"mixture": parts})


def start_of(command="", before=None, machine=CPU, branches=False, typed=None, **checkpoint):
    """Return the start of a run, or of one that continues a checkpoint, or branches from it.

    before: from `saved`. typed: the names of the typed options; by default, those of the command.
    """
    resume = None if before is None else Checkpoint(Path("run/checkpoint-20"), None, before, **checkpoint)
    if typed is None:
        typed = {word[2:] for word in command.split() if word.startswith("--")}
    around = dataclasses.replace(at(machine=machine), typed_options=frozenset(typed))
    machine = dataclasses.replace(machine, kept=before.state.hardware if before else {})
    continues = resume is not None and not branches
    return Start(config_of(command), "demo", around, machine, resume, continues=continues)


def run_of(command="", before=None, data=DATA, usable=ROOM, rates=FAST_BF16, model=MODEL, **start) -> Run:
    shape = ModelFacts(model, model, MODEL if before else None)
    return decide_run(start_of(command, before, **start), data, shape, usable, rates)


def after(step, command="", machine=CPU, data=DATA, lacks=(), **state):
    """Return what the checkpoint of a run says after some steps. lacks: options that its recipe did not have yet."""
    run = run_of(command, machine=machine, data=data)
    hardware = {"device_type": run.start.machine.device_type, "mixed_precision": run.config.mixed_precision}
    hardware |= {"dynamo_backend": "no", "attn_implementation": run.config.attn_implementation, "num_threads": 2}
    state = {
        "memory": run.plan.options,
        "hardware": hardware,
        "initial": {"num_rows": 7},
        "progress": step / 80,
        "stages": [Stage(run.config.block_size, METADATA["content_sha256"])],
    } | state
    identity = {name: value for name, value in run.identity.items() if name not in lacks}
    return saved("own", step, run.schedule, identity, machine.num_processes, **state)


def show(run):
    """Return what a table shows of a run."""
    plan, config = run.plan, run.config
    return (
        f"{config.mixed_precision} {config.dynamo_backend} {config.attn_implementation}, "
        f"{run.start.machine.num_processes} x {run.grad_accum} x {plan.micro_batch_size}, "
        f"{run.schedule.max_steps} steps, {run.schedule.num_examples} examples, {len(run.changes)} changes"
        + ", a new stage" * run.begins_stage
        + ", keeps the best" * (config.load_best_model_at_end == "true")
    )


EPOCHS = "--num_train_epochs 6.4"  # of 100 rows: 80 steps of 8
BATCH = "--global_batch_size 24"
SIX, EIGHT = (Machine("cpu", count, thread_counts=(1,)) for count in (6, 8))
TWO_ROWS = {"micro_batch_size": 2, "activation_checkpointing": 0, "loss_chunks": 1}
FACTORS = ("per_device_train_batch_size", "gradient_accumulation_steps")  # of the batch
AT_20 = partial(after, 20)
BRANCH = {"before": AT_20, "branches": True}
TEXT = METADATA["content_sha256"]
IN_STAGE = partial(after, 20, stages=[Stage(32, "other text"), Stage(32, TEXT, step=10, examples=80)])
OLDER = {"before": partial(after, 20, lacks=("label_smoothing_factor", "scale_attn_by_inverse_layer_idx"))}
MIXED = {"before": partial(after, 20, data=mixture_of(0.3, 0.7))}

# command, what is found -> the run, or what a refusal names
RUNS = [
    # --- what `auto` becomes
    ("", {}, "bf16 no eager, 1 x 1 x 8, 80 steps, 640 examples, 0 changes"),
    ("", {"machine": Machine("cuda", 2), "rates": None}, "bf16 inductor sdpa, 2 x 1 x 4"),
    ("", {"usable": 10}, "bf16 no eager, 1 x 8 x 1"),  # nothing fits, so the least is tried
    ("--bf16_residual", {"rates": SLOW_BF16}, "refused: --bf16_residual fp32"),
    # --- its length
    (EPOCHS, {}, "bf16 no eager, 1 x 1 x 8, 80 steps, 640 examples, 0 changes, keeps the best"),
    (f"{EPOCHS} --global_batch_size 6", {}, ".*, 107 steps, 642 examples"),
    ("--num_train_epochs 0.01 --lr_scheduler_type constant", {}, ".*, 1 steps, 8 examples"),
    ("--max_minutes 5", {}, ".*, None steps, None examples, 0 changes, keeps the best"),  # of unknown epochs
    # --- a typed warm-up that would not end before the run
    ("--num_train_epochs 0.1 --warmup_steps 3", {}, "refused: 3 2 --warmup_steps"),
    # --- which model it exports
    ("--max_steps 25", {}, ".* 200 examples, 0 changes$"),
    ("--max_steps 26", {}, ".* 208 examples, 0 changes, keeps the best"),
    (f"{EPOCHS} --load_best_model_at_end false", {}, ".* 640 examples, 0 changes$"),
    ("--num_train_epochs 2 --load_best_model_at_end true", {}, ".*, keeps the best"),
    ("--max_steps 40", {"data": mixture_of(0.75, 0.25)}, ".* 320 examples, 0 changes, keeps the best"),  # 2.4 epochs
    # --- a run that resumes keeps its memory options
    ("", {"before": partial(after, 20, memory=TWO_ROWS)}, ".*, 1 x 4 x 2"),
    # --- other processes: 8 -> 6 -> 8
    (BATCH, {"before": partial(after, 20, BATCH, EIGHT), "machine": SIX}, "bf16 no eager, 6 x 1 x 4, .* 0 changes"),
    # --- what may change, and what may not
    ("--max_steps 160", {"before": AT_20}, ".*, 160 steps, 1280 examples, 1 changes"),
    ("--max_steps 10", {"before": AT_20}, "refused: 20 --max_steps"),
    ("--learning_rate 0.002 --lr_scheduler_type cosine", {"before": AT_20}, ".*, 3 changes"),
    ("--warmup_steps 8", {"before": AT_20}, ".*, 0 changes"),  # it is over
    ("--global_batch_size 4", {"before": AT_20}, ".*, 80 steps, 400 examples, 1 changes"),
    ("--global_batch_size 4", {"before": AT_20, "typed": ()}, "refused: 8 4; --global_batch_size"),  # without consent
    ("--global_batch_size 4", {"before": AT_20, "typed": FACTORS}, ".*, 400 examples, 1 changes"),
    (f"{EPOCHS} --global_batch_size 4", {"before": partial(after, 20, EPOCHS)}, ".*, 140 steps, 640 examples, 2 ch"),
    # An option that is newer than the checkpoint had its default; so had one of the model.
    ("", OLDER, ".* 640 examples, 0 changes"),
    ("--label_smoothing_factor 0.1", OLDER, "refused: label_smoothing_factor 0.0 0.1"),
    # --- other data: in the same folder they are refused, in a branch they are a stage
    ("", {"before": AT_20, "data": OTHER_TEXT}, "refused: dataset aaaaaaaaaaaa cccccccccccc; --output_dir"),
    ("", MIXED | {"data": mixture_of(0.3, 0.7)}, ".* 640 examples, 0 changes"),
    ("", MIXED | {"data": mixture_of(0.5, 0.5)}, "refused: dataset_weights 0.3, 0.7 0.5, order"),
    ("", BRANCH | {"data": OTHER_TEXT}, ".* 640 examples, 0 changes, a new stage, keeps the best"),
    ("--max_steps 40", BRANCH | {"data": OTHER_TEXT}, ".* 320 examples, 1 changes, a new stage$"),  # 1.6 epochs of it
    ("--max_steps 20", BRANCH | {"data": OTHER_TEXT}, "refused: new data --max_steps"),
    ("--num_train_epochs 1", BRANCH | {"data": OTHER_TEXT}, ".* 33 steps, 264 examples, .*, a new stage"),
    ("--num_train_epochs 1", {"before": IN_STAGE}, ".* 23 steps, 184 examples"),  # 80 before it, and one epoch of it
    ("--block_size 16", BRANCH, ".*, 1 changes, a new stage"),  # the model keeps its positions
    ("", BRANCH | {"model": LONGER}, "refused: n_positions 32 64; --block_size"),
    ("", BRANCH | {"data": OTHER_TOKENIZER}, "refused: --tokenizer_name run/checkpoint-20"),
    # --- a branch may change its optimizer's options, its seed and dropout, but no shape and no kind of optimizer
    ("--weight_decay 0.2 --max_grad_norm 0.3", BRANCH, ".* 640 examples, 2 changes, keeps the best"),
    ("--adam_beta1 0.8 --adam_beta2 0.9 --adam_epsilon 0.001", BRANCH, ".*, 3 changes, keeps the best"),
    ("--label_smoothing_factor 0.1", BRANCH, ".*, 1 changes, keeps the best"),
    ("--seed 1", BRANCH, ".*, 1 changes, a new stage, keeps the best"),  # the order of the examples is another
    ("", BRANCH | {"model": DROPPING}, ".*, 1 changes, keeps the best"),
    ("", {"before": AT_20, "model": DROPPING}, "refused: attn_pdrop --output_dir"),
    ("--max_grad_norm 0.3", {"before": AT_20}, "refused: max_grad_norm 1.0 0.3; --output_dir"),
    ("--optim muon", BRANCH, "refused: optim 'adamw_torch_fused' 'muon'"),
    ("--pad_vocab_to_multiple_of 64", BRANCH, "refused: pad_vocab_to_multiple_of 128 64"),
    ("", BRANCH | {"model": WIDE}, "refused: n_embd 64 128"),
    # --- the Hub: with another schedule, a download begins a new run
    (f"{PUSH} {AUTO} --max_steps 160", {"before": AT_20, "repo_id": "me/tiny"}, ".*, 160 steps"),
]


@pytest.mark.parametrize(("command", "found", "expected"), RUNS)
def test_what_a_run_is(command, found, expected):
    if "before" in found:
        found = found | {"before": found["before"]()}

    def decide():
        run = run_of(command, **found)
        assert run.config.per_device_train_batch_size == run.plan.micro_batch_size
        assert "auto" not in (run.config.mixed_precision, run.config.dynamo_backend, run.config.loss_chunks)
        if "before" in found:  # the rows of the run, however long it is now; those of a stage are its own
            assert run.config.max_eval_samples == ("auto" if run.begins_stage else 7)
        return show(run)

    check_decision(decide, expected)


@pytest.mark.parametrize(
    ("command", "option", "expected"),
    [
        # The warm-up of a recipe, 4 steps, ends before a shorter run, or the learning rate would only rise.
        ("--max_steps 4", "warmup_steps", 0.2),
        ("--max_steps 5", "warmup_steps", 4),
        ("--max_steps 4 --lr_scheduler_type constant", "warmup_steps", 4),
        ("--max_steps 4 --max_minutes 5", "warmup_steps", 4),
        # The best model is looked for in every epoch of a run that may read its 100 rows more than twice.
        ("--eval_steps 30", "eval_steps", 30),  # a number is obeyed
        ("--eval_steps auto", "eval_steps", 8),  # ten times in 80 steps of 8
        ("--eval_steps auto --max_steps 200", "eval_steps", 12),  # once per epoch
        ("--eval_steps auto --max_steps 4000", "eval_steps", 100),  # 40 times at most
        ("--eval_steps auto --max_steps 20", "eval_steps", 200),  # 1.6 epochs: the best model is not kept
        ("--eval_steps auto --max_minutes 5", "eval_steps", 200),
    ],
)
def test_what_follows_from_the_length(command, option, expected):
    assert getattr(run_of(command).config, option) == expected


def test_an_option_that_somebody_added_is_announced_when_it_changes():
    """Compared by the recorded options of the checkpoint's run, in which an option of its author has its default."""
    recorded = vars(config_of()) | {"logging_steps": 5, "output_dir": "elsewhere", "max_steps": 7}
    del recorded["matmul_precision"]  # it is newer
    run = run_of("--matmul_precision highest", after(20), options=recorded)
    assert not run.changes
    assert run.other_changes == {"matmul_precision": ("high", "highest"), "logging_steps": (5, 10)}


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
    (EVERY, {"step": 25, "stages": [Stage(32), Stage(32, step=25)]}, False, "evaluate"),  # other data begin
    # --- a signal: the checkpoint is asked for whatever is known of it, because its write may have failed
    (EVERY, {"step": 0}, True, "end"),
    (EVERY, {"step": 20, "saved_step": 20}, True, "save end"),
    ("--save_steps 0", {"step": 5}, True, "save end"),
    (EVERY, {"step": 80}, True, "save end"),
    # --- time
    ("--max_minutes 10", {"step": 5, "seconds": 300.0}, False, "step"),
    ("--max_minutes 10", {"step": 5, "seconds": 600.0}, False, "save evaluate"),
    ("--max_minutes 10", {"step": 0, "seconds": 601.0, "evaluations": {0: {}}}, False, "step"),  # one at least
    ("--max_minutes 10 --max_steps 80", {"step": 80, "seconds": 9.0}, False, "save evaluate"),
    # --- the checkpoint before the decay
    (f"{EVERY} {WSD} --save_steps 1000", {"step": 60}, False, "save evaluate"),
    (f"{EVERY} {WSD} --save_steps 1000", {"step": 61, "decay_start": 60}, False, "step"),
    (f"{EVERY} {WSD} --save_steps 0 --eval_steps 0", {"step": 60}, False, "step"),
    # --- patience
    (f"{EVERY} --early_stopping_patience 2", {"step": 60, "evaluations": {60: {}}, **STALLED}, False, "save end"),
    (f"{EVERY} --early_stopping_patience 3", {"step": 60, "evaluations": {60: {}}, **STALLED}, False, "save step"),
    (f"{EVERY} --early_stopping_patience 2", {"step": 60, "patience_start": 60, **STALLED}, False, "save evaluate"),
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
        ([2, 4, 6], 6, None, 2, [2]),
        ([2, 4, 6], 6, 2, 1, [4]),  # from before the decay, the run can be extended
        ([2, 4, 9], 4, None, 1, [2]),  # a later one is from before a resume, and may be damaged
        ([2, 3, 4, 9], 4, None, 2, [2]),
    ],
)
def test_which_checkpoints_go(steps, saved_step, decay_start, limit, expected):
    assert list_pruned(steps, saved_step, decay_start, limit) == expected


STEPS = Schedule(8, 20, None, 0.1, "constant_with_warmup", None, 0.1, num_examples=160, warmup_examples=16)
TYPED = dataclasses.replace(STEPS, warmup_steps=10, warmup_examples=80)
TIMED = plan_schedule(config_of("--max_minutes 10 --warmup_steps 0.1"), 1)
LONGER_STEPS = "--max_steps 100 --warmup_steps 0.1 --lr_scheduler_type constant_with_warmup"
OTHER_BATCH = "--warmup_steps 10 --global_batch_size 4 --max_steps 20"


@pytest.mark.parametrize(
    ("command", "before", "step", "progress", "expected"),
    [
        (LONGER_STEPS, STEPS, 4, 0.2, 16),
        (LONGER_STEPS, STEPS, 1, 0.05, 80),  # it is not over
        ("--max_minutes 1000 --warmup_steps 0.1", TIMED, 500, 0.9, 0),
        ("--max_minutes 1000 --warmup_steps 0.1", TIMED, 5, 0.05, None),  # it is not over
        (OTHER_BATCH, TYPED, 5, 0.25, 80),
        (OTHER_BATCH, None, 0, 0.0, 40),
    ],
)
def test_a_finished_warm_up_is_not_repeated(command, before, step, progress, expected):
    """As a share of a new length, it would be longer. One of typed steps keeps its examples with another batch."""
    schedule = plan_schedule(config_of(command), 1, step, 8 * step, before, progress)
    assert schedule.warmup_examples == pytest.approx(expected)


def test_the_same_minutes_are_the_same_schedule():
    assert plan_schedule(config_of("--max_minutes 10 --warmup_steps 0.1"), 1, 500, 4000, TIMED, 0.9) == TIMED
