"""Train GPT-2: the whole run, in order.

    accelerate launch recipe/train.py                                          a demo that needs nothing
    accelerate launch recipe/train.py --config gpt2_124m --dataset_dir DIR     GPT-2 124M on a packed dataset

config -> look, decide, claim the folder -> data -> decide the run -> model -> checkpoint -> loop -> export, publish
"""

import math

from recipe.checkpoint import CheckpointContents, CheckpointSaver
from recipe.command_line import load_config
from recipe.errors import run_main
from recipe.evaluation.validation import Validation
from recipe.hardware.accelerator import build_accelerator
from recipe.hardware.host_memory import HostMemory
from recipe.model.build import build_model
from recipe.model.loss import LanguageModelingLoss
from recipe.model.weights import full_tensor
from recipe.optim.guard import UpdateGuard
from recipe.optim.optimizers import build_optimizer
from recipe.optim.schedule import learning_rate_scale
from recipe.progress import unfailing_output
from recipe.publish.uploads import HubUploads
from recipe.run.decide import decide_turn
from recipe.run.end import finish_run, stop_run
from recipe.run.log import RunLog
from recipe.run.profile import build_profiler
from recipe.run.record import describe_run
from recipe.run.start import (
    load_state,
    open_batches,
    open_dataset,
    open_run,
    register_optimizer,
    resolve_run,
    restored_process,
    try_step,
    wrap_module,
)
from recipe.run.start_table import show_start
from recipe.run.stop import StopSignals, resumable


@unfailing_output()
@restored_process()
def main() -> int:
    """Train. Returns the exit status: 0, or 75 if a signal stopped the run and the same command resumes it."""
    # ------------------------------------------------------------------ set-up
    requested, recipe, notes = load_config()  # defaults < recipe < command line
    start = open_run(requested, recipe, notes)  # decides on the folder, and on the checkpoint to begin with
    dataset = open_dataset(start)  # the main process prepares text first
    run = resolve_run(start, dataset)  # measures; decides on length, schedule, what every `auto` means on this machine
    accelerator = build_accelerator(run.config, start.output_dir, run.choices)

    model = build_model(run.config, run.model.config, start.base_model)  # a stock GPT2LMHeadModel
    smoothing = run.config.label_smoothing_factor
    loss = LanguageModelingLoss(model, run.model.config.vocab_size, smoothing, run.plan.loss_chunks)
    module = wrap_module(run, accelerator, loss)  # compiled; on several devices DDP, or FSDP (new parameters)
    optimizer = register_optimizer(accelerator, build_optimizer(run.config, model))
    run = try_step(run, accelerator, module, optimizer)  # on a GPU: does the micro-batch fit?
    config = run.config
    schedule = run.schedule
    guard = UpdateGuard(accelerator)
    contents = CheckpointContents(accelerator, model, run.model.config, run.model.files, optimizer, guard)
    state = load_state(run, contents)  # the checkpoint's, or a new one
    batches = open_batches(run, accelerator, dataset, state)
    validation = Validation(config, accelerator, module, dataset)

    record = describe_run(run, accelerator.device, model, state)
    log = RunLog(run, accelerator, state, record, batches, optimizer, guard)
    uploads = HubUploads(config, state.run_id, start.output_dir, log.say)
    callbacks = log.failed, uploads.add, log.saved
    saver = CheckpointSaver(start.output_dir, config, schedule, run.identity, contents, *callbacks, run.continues)

    # ------------------------------------------------------------------ loop
    grad_accum = accelerator.gradient_accumulation_steps = run.grad_accum
    host_memory = HostMemory()
    with StopSignals() as signals, resumable(run), build_profiler(run, log) as profiler:
        show_start(log, record, state, validation.num_rows)
        while True:  # a turn saves, or evaluates, or makes a step; the last one only ends
            stop, state.seconds = signals.agree(log.seconds())  # all processes at the same step
            turn = decide_turn(run, state, stop)
            state.progress = turn.progress
            state.decay_start = turn.decay_start

            if turn.save:
                with log.paused():
                    saver.save(state)  # in the background
            if turn.evaluate:
                with log.paused():
                    evaluation = validation.run(signals.must_stop)
                    if evaluation is not None:
                        state.add_evaluation(evaluation)
                        saver.export(state)  # in the background, if it is the best so far
                if evaluation is not None:
                    log.record_evaluation(state, evaluation)
                continue  # a signal may have interrupted it, or its loss ends the run: the next turn saves and stops
            if turn.end:
                break
            uploads.advance()  # in the background, after the evaluation that the card shows

            means = {}  # over the micro-batches: the loss, and any other scalar that the module returns
            for _ in range(grad_accum):
                with accelerator.accumulate(module):  # DDP averages on the last micro-batch, FSDP between machines
                    outputs = module(*next(batches))  # input_ids, targets: int64 [micro_batch, block_size]
                    accelerator.backward(outputs["loss"])  # divides by grad_accum
                for name, value in outputs.items():
                    means[name] = means.get(name, 0.0) + value.detach() / grad_accum
            grad_norm = full_tensor(accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm or math.inf))
            scale = learning_rate_scale(schedule, state.examples, state.progress)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
            if guard.allows(optimizer, means["loss"], grad_norm):  # not if it is NaN; a fused kernel checks by itself
                optimizer.step()
            optimizer.zero_grad()
            state.setup_seconds = state.setup_seconds or state.seconds  # max_minutes counts what follows
            state.step += 1
            state.examples += config.global_batch_size
            state.position = batches.position
            log.add(means, grad_norm)
            host_memory.after_step()
            if log.is_due(state):
                log.record_steps(state)  # the one routine wait for the device
            if profiler:
                profiler.step()

        # -------------------------------------------------------------- end
        log.close(state)
        batches.close()
        is_saved = saver.finish(state)  # no process leaves before the checkpoint is on disk
        if stop:
            return stop_run(log, uploads, state, signals, is_saved)
        return finish_run(log, uploads, state, signals, record, saver)


if __name__ == "__main__":
    run_main(main)
