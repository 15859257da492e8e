"""Extend a run with a stable phase, or branch from it: the checkpoint before the decay is the place to resume from."""

from pathlib import Path

from recipe.checkpoint.load import newest_checkpoint, read_state, with_schedule_of
from recipe.config import SCHEDULE_OPTIONS, TrainConfig
from recipe.optim.schedule import compute_learning_rates, find_branch_step
from recipe.run.output_dir import resume_command


def find_branch_point(config: TrainConfig, directory: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder from which the run can be extended or branch."""
    branch_step = find_branch_step(config)
    return None if branch_step is None else newest_checkpoint(directory, branch_step)


def extend_command(config: TrainConfig, output_dir: Path) -> str | None:
    """Return the command that makes a finished run twice as long; None if only the end of a decay is left."""
    num_steps = 2 * config.max_steps
    command = resume_command(output_dir)
    if find_branch_step(config) is not None:
        branch_point = find_branch_point(config, output_dir)
        if branch_point is None:
            return None
        directory = output_dir.absolute() if output_dir.name == "" else output_dir  # "." has no name
        command = resume_command(output_dir, branch_point, directory.with_name(f"{directory.name}-{num_steps}"))
    return f"{command} --max_steps {num_steps}"


def describe_jump(config: TrainConfig, resume_dir: Path, step: int) -> str | None:
    """Return a warning if a changed schedule resumes inside its decay, before the change or after it."""
    earlier = with_schedule_of(config, read_state(resume_dir)["identity"])
    is_changed = any(getattr(config, name) != getattr(earlier, name) for name in SCHEDULE_OPTIONS)
    if not is_changed or find_branch_step(earlier) is None:
        return None
    decaying = [schedule for schedule in (earlier, config) if (find_branch_step(schedule) or step) < step]
    if not decaying:
        return None
    schedule = min(decaying, key=find_branch_step)
    name, start = "old" if schedule is earlier else "new", find_branch_step(schedule)
    before, now = compute_learning_rates(earlier)[step - 1], compute_learning_rates(config)[step]
    found = find_branch_point(schedule, resume_dir.parent)
    remedy = f"resume from {found}, into another --output_dir" if found else "no checkpoint from before it is left"
    return (
        f"warning: the decay of the {name} schedule starts at step {start:,}, so the learning rate jumps from "
        f"{before:.3g} to {now:.3g} at step {step:,}; {remedy}"
    )
