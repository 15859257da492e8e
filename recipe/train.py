"""Train GPT-2: the whole run, in order.

    accelerate launch recipe/train.py                                          a demo that needs nothing
    accelerate launch recipe/train.py --config gpt2_124m --dataset_dir DIR     GPT-2 124M on a packed dataset

config -> accelerator -> data -> model -> optimizer -> resume -> loop -> evaluate, export, publish
"""

import sys
import time

STARTED_AT = time.perf_counter()

from recipe.command_line import load_config
from recipe.errors import run_main
from recipe.hardware.host_memory import FreedMemory, use_huge_pages

if __name__ == "__main__":  # before torch is imported, which takes seconds
    run_main(load_config)  # a mistyped option is reported at once
    use_huge_pages()

import math

import torch
from accelerate.utils import set_seed

from recipe.checkpoint.load import RunState, find_checkpoint, load_checkpoint
from recipe.checkpoint.save import CheckpointSaver
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import open_dataset_for
from recipe.evaluation.validation import Validation
from recipe.hardware.accelerator import build_accelerator, build_module
from recipe.hardware.nodes import check_same_run, check_shared
from recipe.hardware.processes import on_all_processes, on_main_process, start_processes, wait_on_host
from recipe.model.build import build_model_config
from recipe.optim.guard import MOST_BAD_STEPS, GuardedUpdate
from recipe.optim.optimizers import build_optimizer
from recipe.optim.schedule import find_branch_step
from recipe.publish.download import fetch_checkpoint
from recipe.publish.export import export_model
from recipe.publish.hub import check_hub
from recipe.publish.uploads import HubUploads
from recipe.run.accumulation import Accumulation
from recipe.run.log import RunReport
from recipe.run.meter import StepMeter
from recipe.run.output_dir import choose_output_dir, open_output_dir
from recipe.run.plan import StepBudget, check_before_preparing, plan_run, shorten
from recipe.run.profile import StepProfiler
from recipe.run.stop import EXIT_STOPPED, StopRequest
from recipe.run.summary import build_summary, closing_words, describe_evaluation, describe_run, find_warnings


def main(started_at: float | None = None) -> None:
    """started_at: of the program, from `time.perf_counter`. Default: now, since a notebook may train several times."""
    started_at = started_at or time.perf_counter()
    # ------------------------------------------------------------------ set-up
    config, recipe = load_config()
    start_processes()
    output_dir = on_main_process(lambda: choose_output_dir(config, recipe))
    on_main_process(lambda: check_hub(config))
    if not config.eval_only:  # which writes nothing
        check_shared(output_dir)
    accelerator, precision = build_accelerator(config, output_dir)
    device = accelerator.device
    resume_dir = on_main_process(lambda: find_checkpoint(output_dir, fetch_checkpoint(config, output_dir)))
    # A resumed run takes the shape from its checkpoint: the model that it started from may be gone.
    source = resume_dir if resume_dir and config.model_name_or_path else config.model_name_or_path
    check_before_preparing(config, accelerator.num_processes, device, source)

    dataset_dir = on_main_process(lambda: open_dataset_for(config, source).directory)
    dataset = on_all_processes(lambda: open_packed_dataset(dataset_dir, config.block_size))
    tokenizer = dataset.load_tokenizer()
    model_config = build_model_config(config, dataset.vocab_size, tokenizer.eos_token_id, source)
    config, identity, changes, plan = plan_run(
        config, dataset, model_config, resume_dir, output_dir, accelerator, precision
    )
    check_same_run(identity)

    module, choices = build_module(config, model_config, dataset.vocab_size, device, precision, source, plan)
    model, optimizer = module.model, build_optimizer(config, module, precision.value)
    wait_on_host()  # a machine may need long to download a model
    module, optimizer = accelerator.prepare(module, optimizer)
    update = GuardedUpdate(config, accelerator, optimizer)
    accumulation = Accumulation(config, accelerator, module, dataset, choices, plan)
    validation = Validation(config, accelerator, module, dataset, accumulation.micro_batch_size)
    set_seed(config.seed, device_specific=True)  # from here on, dropout differs between processes
    state = load_checkpoint(accelerator, resume_dir, model, dataset.vocab_size, update) if resume_dir else RunState()
    validation.keep_rows(state)
    if config.eval_only:
        what = f"{source or resume_dir}, {validation.num_rows:,} rows"
        accelerator.print(describe_evaluation(what, validation.run()))
        accelerator.end_training()
        return
    accumulation.start(state)  # opens the data, before anything is written

    on_main_process(lambda: open_output_dir(output_dir, config, resume_dir is not None))
    report = RunReport(accelerator, config, output_dir, state.step)
    wait_on_host()  # a tracker may need long to answer
    uploads = HubUploads(config, output_dir, report.say)
    parts = model, model_config, tokenizer, update
    saver = CheckpointSaver(accelerator, output_dir, config, identity, *parts, report.checkpoint_failure, uploads.add)
    report.table(
        describe_run(config, recipe, output_dir, resume_dir, choices, model, accumulation, validation.num_rows)
    )
    report.start(state.step, config, recipe, choices, model, accumulation)
    for warning in find_warnings(config, resume_dir, precision, dataset, state.step):
        report.say(warning)
    if changes:  # save, so that the config on disk always matches the newest checkpoint
        report.schedule(state.step, changes)
        saver.save(state)

    # ------------------------------------------------------------------ loop: one iteration is one optimizer step
    profiler = StepProfiler(config, accelerator, output_dir, state.step)
    meter = StepMeter(config, accelerator, model, state, started_at)
    evaluation = None
    if state.step == 0:
        state.untrained = evaluation = validation.run()
        report.evaluation(0, evaluation)
    budget = StepBudget(config, started_at, state.step, validation.num_rows)
    freed_memory = FreedMemory()
    stop_request, stop = StopRequest(), None
    module.train()
    meter.resume()
    while state.step < config.max_steps and stop is None:
        try:
            step_loss = torch.zeros((), device=device)
            for _ in range(accumulation.num_micro_batches):
                with accelerator.accumulate(module):  # gradients are synchronized on the last micro-batch
                    loss = module(*next(accumulation.batches))
                    accelerator.backward(loss)  # divides by num_micro_batches
                step_loss += loss.detach() / accumulation.num_micro_batches
                report.advance(1 / accumulation.num_micro_batches)
        except RuntimeError as error:
            loss = None  # frees the graph that did not fit
            accumulation.out_of_memory(error)  # re-raises any other error
        if accumulation.must_shrink():  # on any process: all of them repeat the step in smaller pieces
            report.say(accumulation.shrink(state))
            validation.batch_size = min(validation.batch_size, accumulation.micro_batch_size)
            continue
        grad_norm = accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm or math.inf)
        update.step(step_loss, grad_norm)  # skips the update, on the device, if a number is not finite
        optimizer.zero_grad()
        meter.add(step_loss)
        state.step += 1
        state.position = accumulation.batches.position
        freed_memory.give_back()  # keeps the memory of a CPU process flat

        stop = stop_request.agreed()
        fewer_steps = budget.choose(state.step)
        last = state.step == config.max_steps
        evaluating = last or (config.eval_steps and state.step % config.eval_steps == 0)
        branching = state.step == find_branch_step(config)  # the last step before the decay
        saving = config.save_steps and (last or fewer_steps or branching or state.step % config.save_steps == 0)

        if evaluating or saving or state.step == 1 or state.step % config.logging_steps == 0:
            numbers = meter.read(state, update, grad_norm, accumulation.batches)  # the one routine wait for the device
            report.train(state.step, numbers)
            saver.report()
            if numbers["bad_steps_in_a_row"] >= MOST_BAD_STEPS:
                on_main_process(lambda: (saver.wait(), uploads.finish()))
                raise report.bad_numbers(state.step, numbers)

        if fewer_steps is not None:  # --max_minutes: the first steps have shown the speed
            report.shorten(state.step, fewer_steps, config)
            config = shorten(config, fewer_steps)
            for part in (update, validation, saver, profiler):
                part.set_schedule(config)
            state.steps_chosen, state.eval_rows = True, validation.num_rows

        if saving or stop is not None:
            meter.store(state)
            saver.save(state)
            meter.resume()

        if evaluating:
            evaluation = validation.run()
            report.evaluation(state.step, evaluation)
            meter.resume()

        if (profile := profiler.after(state.step)) is not None:
            report.profile(state.step, profile)
            meter.resume()

        uploads.advance()  # in the background, after the evaluation that its card shows

    # ------------------------------------------------------------------ end
    saved = on_main_process(saver.wait)  # no process leaves before the checkpoint is on disk
    accumulation.close()
    report.close()
    if stop is not None and state.step < config.max_steps:
        report.stopped(state.step, stop_request.why(), saved)
        stop_request.close()
        on_main_process(uploads.finish)
        report.end()
        sys.exit(EXIT_STOPPED if saved else 1)
    stop_request.close()
    evaluation = evaluation or validation.run()  # a resumed run may have no steps left
    if accelerator.is_main_process:
        export_model(model, model_config, tokenizer, output_dir)
        report.summary(build_summary(accelerator, state, evaluation, meter, choices, accumulation, model))
        print(closing_words(config, output_dir, state.untrained, evaluation, meter, dataset.metadata))
        uploads.finish(state.step)
    wait_on_host()
    report.end()


if __name__ == "__main__":
    interrupted = "interrupted; --resume_from_checkpoint auto resumes from the newest checkpoint, or starts fresh"
    run_main(lambda: main(STARTED_AT), interrupted)
