"""Train GPT-2: the whole run, in order.

    accelerate launch recipe/train.py                                          a demo that needs nothing
    accelerate launch recipe/train.py --config gpt2_124m --dataset_dir DIR     GPT-2 124M on a packed dataset

config -> accelerator -> data -> model -> optimizer -> resume -> loop -> export, summary, publish
"""

import time

STARTED_AT = time.perf_counter()

from recipe.command_line import load_config
from recipe.errors import run_main
from recipe.hardware.host_memory import use_huge_pages

if __name__ == "__main__":  # before torch is imported, which takes seconds
    run_main(load_config)  # a mistyped option is reported at once
    use_huge_pages()

import math

from recipe.checkpoint import CheckpointSaver
from recipe.evaluation.validation import Validation
from recipe.hardware.accelerator import compile_module
from recipe.model.build import build_model
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.guard import UpdateGuard
from recipe.optim.optimizers import build_optimizer
from recipe.optim.schedule import is_decaying, learning_rate_scale
from recipe.publish.uploads import HubUploads
from recipe.run.log import RunLog
from recipe.run.profile import build_profiler
from recipe.run.report import collect_facts, finish_run, show_start, stop_run
from recipe.run.start import load_state, measure_progress, open_batches, open_dataset, open_run, plan_run, prepare
from recipe.run.stop import StopSignals, resumable


def main(started_at: float | None = None) -> None:
    """started_at: of the program, from `time.perf_counter`. Default: now, since a notebook may train several times."""
    # ------------------------------------------------------------------ set-up
    config, recipe = load_config()  # defaults < recipe < command line
    run = open_run(config, recipe, started_at or time.perf_counter())  # processes, folder, hardware, checkpoint
    dataset = open_dataset(config, run.source)  # the main process prepares text first
    plan_run(run, dataset)  # the length of the run, and what every `auto` means on this machine
    config, hardware, accelerator = run.config, run.hardware, run.accelerator

    model = build_model(hardware, run.model_config, hardware.attn_implementation, run.source)  # a stock model
    loss = LanguageModelingLoss(model, run.vocab_size, hardware.label_smoothing_factor, hardware.loss_chunks)
    module, optimizer = compile_module(loss, hardware.dynamo_backend), build_optimizer(hardware, model)
    module, optimizer = prepare(run, module, optimizer)  # DDP; on a GPU, a trial step confirms the micro-batch
    guard = UpdateGuard(accelerator)
    state = load_state(run, model, optimizer, guard)  # the checkpoint's, or a new one
    validation = Validation(config, accelerator, module, dataset, run.plan.micro_batch_size)
    batches = open_batches(run, dataset, state)

    facts = collect_facts(run, model)
    log = RunLog(run, state, facts["flops_per_token"])
    uploads = HubUploads(config, state.run_id, run.output_dir, log.say)
    parts = run.identity, model, run.model_config, dataset.tokenizer, optimizer, guard
    saver = CheckpointSaver(accelerator, run.output_dir, config, *parts, log.say, uploads.add, state.step)
    show_start(log, facts, state, validation.num_rows)
    if run.changes:  # save, so that the config on disk always matches the newest checkpoint
        saver.save(state)

    # ------------------------------------------------------------------ loop: one turn is one optimizer step
    grad_norm, grad_accum = None, run.grad_accum
    profiling = build_profiler(config.profile, accelerator, run.output_dir, log.say)
    with StopSignals() as signals, resumable(run, saver), profiling as profiler:
        while True:  # evaluation and saving are at the top, so the last turn makes no step
            stop, state.seconds = signals.agree(log.seconds())  # all processes at the same step
            state.progress = progress = measure_progress(config, state)
            last = progress >= 1

            if log.lap_steps and (state.is_due(config.logging_steps) or state.step == 1):
                log.train(state, batches, guard, grad_norm, optimizer)  # the one routine wait for the device
                saver.report()

            if not is_decaying(config, progress):
                state.decay_start = None
            elif state.decay_start is None:
                state.decay_start = state.step  # the run can be extended from here
            saving = config.save_steps and (state.is_due(config.save_steps) or state.decay_start == state.step)
            if (saving or stop) and state.step != saver.saved_step:
                with log.paused(state):
                    saver.save(state)  # in the background

            evaluating = state.is_due(config.eval_steps) or last or state.step == 0
            if evaluating and not stop and state.step not in log.evaluated:  # an earlier start may have made it
                with log.paused(state):
                    evaluation = validation.run(lambda: signals.agree()[0] > 0)
                if evaluation is None:
                    continue  # a signal has interrupted it: the next turn saves and stops
                log.evaluation(state, evaluation)

            uploads.advance()  # in the background, after the evaluation that the card shows
            if last or stop:
                break

            means = {}  # over the micro-batches: the loss, and any other scalar that the module returns
            for _ in range(grad_accum):
                with accelerator.accumulate(module):  # gradients are synchronized on the last micro-batch
                    outputs = module(*next(batches))  # input_ids, targets: int64 [micro_batch, block_size]
                    accelerator.backward(outputs["loss"])  # divides by grad_accum
                for name, value in outputs.items():
                    means[name] = means.get(name, 0.0) + value.detach() / grad_accum
            grad_norm = accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm or math.inf)
            scale = learning_rate_scale(config, state.step, progress)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
            guard.step(optimizer, means["loss"], grad_norm)  # skips the update, on the device, if it is not finite
            optimizer.zero_grad()
            state.step += 1
            state.position = batches.position
            log.add(means)
            if profiler:
                profiler.step()
        saved = saver.wait_on_all()  # no process leaves before the checkpoint is on disk

    # ------------------------------------------------------------------ end
    log.close()
    batches.close()
    if stop:
        stop_run(log, uploads, state, stop, saved)
    else:
        finish_run(log, uploads, state, facts, model, dataset)


if __name__ == "__main__":
    interrupted = "interrupted; --resume_from_checkpoint auto resumes from the newest checkpoint, or starts fresh"
    run_main(lambda: main(STARTED_AT), interrupted)
