"""Train GPT-2: the whole run, in order.

    accelerate launch recipe/train.py                                          a demo that needs nothing
    accelerate launch recipe/train.py --config gpt2_124m --dataset_dir DIR     GPT-2 124M on a packed dataset

config -> processes, folder -> data -> plan -> model -> optimizer -> checkpoint -> loop -> export, summary, publish
"""

import math

from recipe.checkpoint import CheckpointSaver, Trained
from recipe.command_line import load_config
from recipe.errors import run_main
from recipe.evaluation.validation import Validation
from recipe.model.build import build_model
from recipe.model.loss import LanguageModelingLoss
from recipe.model.weights import whole
from recipe.optim.guard import UpdateGuard
from recipe.optim.optimizers import build_optimizer
from recipe.optim.schedule import learning_rate_scale
from recipe.publish.uploads import HubUploads
from recipe.run.log import RunLog
from recipe.run.report import build_profiler, collect_facts, finish_run, show_start, stop_run
from recipe.run.start import (
    confirm_plan,
    load_state,
    measure_progress,
    open_batches,
    open_dataset,
    open_run,
    plan_run,
    prepare,
    restored_process,
)
from recipe.run.stop import StopSignals, resumable


@restored_process()
def main() -> int:
    """Train. Returns the exit status: 0, or 75 if a signal stopped the run and the same command resumes it."""
    # ------------------------------------------------------------------ set-up
    typed, recipe = load_config()  # defaults < recipe < command line
    start = open_run(typed, recipe)  # processes, output folder, the checkpoint to resume from
    dataset = open_dataset(typed, start)  # the main process prepares text first
    run = plan_run(start, typed, recipe, dataset)  # length and memory: what every `auto` means on this machine
    config, accelerator = run.config, run.accelerator

    model = build_model(config, run.model_config, run.source)  # a stock GPT2LMHeadModel
    loss = LanguageModelingLoss(model, run.vocab_size, config.label_smoothing_factor, config.loss_chunks)
    module = prepare(run, loss)  # compiled; on several devices DDP, or FSDP, which replaces the parameters
    optimizer = build_optimizer(config, model)
    run = confirm_plan(run, module, optimizer)  # on a GPU, a trial step
    guard = UpdateGuard(accelerator)
    trained = Trained(accelerator, model, run.model_config, run.files, optimizer, guard)
    state = load_state(run, trained)  # the checkpoint's, or a new one
    batches = open_batches(run, dataset, state)
    validation = Validation(config, accelerator, module, dataset, run.plan.micro_batch_size)

    facts = collect_facts(run, model)
    log = RunLog(run, state, facts, batches, optimizer, guard)
    uploads = HubUploads(config, state.run_id, run.output_dir, log.say)
    saver = CheckpointSaver(run.output_dir, config, run.identity, trained, run.resume_dir, log.say, uploads.add)
    show_start(log, facts, state, validation.num_rows)

    # ------------------------------------------------------------------ loop: one turn is one optimizer step
    grad_accum = accelerator.gradient_accumulation_steps = run.grad_accum
    with StopSignals() as signals, resumable(run), build_profiler(run, log) as profiler:
        while True:  # saving and evaluation are at the top, so the last turn makes no step
            stop, state.seconds = signals.agree(log.seconds())  # all processes at the same step
            state.progress = progress = measure_progress(config, state)
            last = progress >= 1

            if saver.is_due(state, stop):
                with log.paused():
                    saver.save(state)  # in the background
            if log.owes_evaluation(state) and not stop:
                with log.paused():
                    evaluation = validation.run(signals.must_stop)
                if evaluation is not None:
                    log.evaluation(state, evaluation)
                continue  # a signal may have interrupted it, or its loss ends the run: the next turn saves and stops
            if last or stop:
                break
            uploads.advance()  # in the background, after the evaluation that the card shows

            means = {}  # over the micro-batches: the loss, and any other scalar that the module returns
            for _ in range(grad_accum):
                with accelerator.accumulate(module):  # gradients are synchronized on the last micro-batch
                    outputs = module(*next(batches))  # input_ids, targets: int64 [micro_batch, block_size]
                    accelerator.backward(outputs["loss"])  # divides by grad_accum
                for name, value in outputs.items():
                    means[name] = means.get(name, 0.0) + value.detach() / grad_accum
            grad_norm = whole(accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm or math.inf))
            scale = learning_rate_scale(config, state.step, progress)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
            if guard.allows(optimizer, means["loss"], grad_norm):  # not if it is NaN; a fused kernel checks by itself
                optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.examples += config.global_batch_size
            state.position = batches.position
            log.add(means, grad_norm)
            if log.is_due(state):
                log.train(state)  # the one routine wait for the device
            if profiler:
                profiler.step()

        # -------------------------------------------------------------- end
        log.close(state)
        batches.close()
        saved = saver.wait_on_all()  # no process leaves before the checkpoint is on disk
        if stop:
            return stop_run(log, uploads, state, signals, saved)
        return finish_run(log, uploads, state, signals, facts, model, dataset)


if __name__ == "__main__":
    run_main(main)
