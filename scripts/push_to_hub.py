"""Upload a run to the Hub, or repeat the uploads that failed: its checkpoints as branches, its model as main.

python scripts/push_to_hub.py runs/demo --hub_model_id user/name
"""

import argparse
import json
import sys
from pathlib import Path

from recipe.arguments import CommandLine, shell_command
from recipe.checkpoint import checkpoint_step, clean_checkpoints, list_checkpoints, read_summary, why_damaged
from recipe.command_line import load_config
from recipe.config import CONFIG_NAME, OPTIONS
from recipe.errors import UserError, check_local_path, run_main
from recipe.metrics import METRICS_NAME, read_events
from recipe.model.weights import CONFIG_JSON
from recipe.progress import unfailing_output
from recipe.publish.hub import create_repository, look_at_hub, refuse_another, refuse_own_code
from recipe.publish.uploads import HubUploads
from recipe.run.folder import lock_output_dir
from recipe.run.stop import StopSignals


@unfailing_output()
def main() -> int:
    parser = CommandLine(description="Upload a run to the Hub. Large files that are there already are not sent again.")
    parser.add_argument("run_dir", type=Path, help="output folder of a run; the options replace its own")
    parser.add_run_options((name for name in OPTIONS if name.startswith("hub_")), default=argparse.SUPPRESS)
    args = vars(parser.parse_args())
    run_dir = args.pop("run_dir")
    check_local_path(str(run_dir))
    run_ids = [event["run_id"] for event in read_events(run_dir) if event["event"] == "start"]
    if not run_ids or not (run_dir / CONFIG_NAME).is_file():
        what = f"the folder of a run, with {CONFIG_NAME} and {METRICS_NAME}"
        raise UserError(f"{run_dir} is not {what}; `hf upload` uploads any folder")
    listed = {name: value if isinstance(value, list) else [str(value)] for name, value in args.items()}
    options = [text for name, values in listed.items() for text in (f"--{name}", *values)]
    config = load_config(["--config", str(run_dir / CONFIG_NAME), "--push_to_hub", *options]).config
    for model in (run_dir, *list_checkpoints(run_dir)):
        if (model / CONFIG_JSON).is_file():
            refuse_own_code(json.loads((model / CONFIG_JSON).read_text(encoding="utf-8"))["model_type"])
    if not lock_output_dir(run_dir):
        raise UserError(f"{run_dir} is in use: a run that is still training uploads by itself")
    if (main_branch := look_at_hub(config)) is not None:
        refuse_another(config, main_branch, run_ids[-1])
    create_repository(config)
    uploads = HubUploads(
        config, run_ids[-1], run_dir, print, repeat=shell_command("python", *sys.argv), keeps_all=True
    )
    clean_checkpoints(run_dir)
    checkpoints = list_checkpoints(run_dir)
    for checkpoint in checkpoints:
        reason = why_damaged(checkpoint)
        if reason is None:
            uploads.add(checkpoint, checkpoint_step(checkpoint))
        else:
            print(f"skipping {checkpoint}: {reason}")
    summary = read_summary(run_dir, run_ids[-1])
    # A checkpoint beyond the results means that the run was extended and has not exported its new model yet.
    has_ended = summary and summary["step"] >= max(map(checkpoint_step, checkpoints), default=0)
    final_step = summary["exported_step"] if has_ended else None
    with StopSignals("ending the upload") as signals:
        is_complete = uploads.finish(final_step, interrupted=lambda: signals.count > 0)
    return uploads.leave(0 if is_complete else 1)


if __name__ == "__main__":
    run_main(main, is_alone=True)
