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

import dataclasses
import math

from accelerate.utils import set_seed

from recipe.checkpoint import CheckpointSaver, load_checkpoint
from recipe.data.streaming import build_batches
from recipe.evaluation.validation import Validation
from recipe.hardware.accelerator import build_accelerator, compile_module
from recipe.hardware.memory import smaller_micro_batches, try_micro_batch
from recipe.hardware.processes import gather, largest_of_processes, on_main_process, start_processes, wait_on_host
from recipe.model.build import build_model, build_model_config
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.guard import UpdateGuard
from recipe.optim.optimizers import build_optimizer
from recipe.optim.schedule import is_decaying, learning_rate_scale
from recipe.publish.hub import check_hub
from recipe.publish.uploads import HubUploads
from recipe.run.folder import choose_output_dir, open_output_dir
from recipe.run.log import RunLog
from recipe.run.profile import build_profiler
from recipe.run.report import collect_facts, finish_run, show_start, stop_run
from recipe.run.start import check_run, find_start, measure_progress, new_state, open_dataset, resolve_run
from recipe.run.stop import StopSignals, resumable


def main(started_at: float | None = None) -> None:
    """started_at: of the program, from `time.perf_counter`. Default: now, since a notebook may train several times."""
    started_at = started_at or time.perf_counter()
    # ------------------------------------------------------------------ set-up
    config, recipe = load_config()
    start_processes()
    output_dir = on_main_process(lambda: choose_output_dir(config, recipe))
    on_main_process(lambda: check_hub(config))
    accelerator = build_accelerator(config, output_dir)
    device, num_processes = accelerator.device, accelerator.num_processes
    resume_dir, source = find_start(config, accelerator, output_dir)

    dataset = open_dataset(config, source)
    tokenizer, vocab_size = dataset.tokenizer, len(dataset.tokenizer)
    model_config = build_model_config(config, vocab_size, tokenizer.eos_token_id, source)
    # hardware: the config with every `auto` resolved for this machine
    config, hardware, choices, plan = resolve_run(config, dataset, model_config, accelerator, output_dir, resume_dir)
    identity, changes = check_run(config, dataset, model_config, output_dir, resume_dir)

    model = build_model(hardware, model_config, hardware.attn_implementation, source)  # a stock GPT2LMHeadModel
    module = LanguageModelingLoss(model, vocab_size, hardware.label_smoothing_factor, hardware.loss_chunks)
    module = compile_module(module, hardware.dynamo_backend)
    optimizer = build_optimizer(hardware, model)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    wait_on_host()  # a machine may need long to download a model
    module, optimizer = accelerator.prepare(module, optimizer)
    micro_batch = try_micro_batch(accelerator, module, optimizer.optimizer, plan.micro_batch_size, hardware)
    plan = dataclasses.replace(plan, micro_batch_size=micro_batch)
    grad_accum = config.global_batch_size // (micro_batch * num_processes)
    accelerator.gradient_accumulation_steps = grad_accum
    smaller = smaller_micro_batches(hardware, micro_batch, num_processes, device.type)  # if it runs out of memory

    guard = UpdateGuard(accelerator)
    set_seed(config.seed, device_specific=True)  # from here on, dropout differs between processes
    parts = model, vocab_size, optimizer.optimizer, guard
    state = load_checkpoint(accelerator, resume_dir, *parts) if resume_dir else new_state()
    state.memory = plan.choices
    validation = Validation(config, accelerator, module, dataset, micro_batch)
    batches = build_batches(config, dataset, accelerator, micro_batch, state.step, state.position, gather)

    on_main_process(lambda: open_output_dir(output_dir, config))
    facts = collect_facts(hardware, recipe, dataset, accelerator, model, plan)
    log = RunLog(config, accelerator, output_dir, state, facts, started_at)
    uploads = HubUploads(config, output_dir, log.say)
    parts = model, model_config, tokenizer, optimizer.optimizer, guard
    saver = CheckpointSaver(accelerator, output_dir, config, identity, *parts, log.say, uploads.add, state.step)
    show_start(log, hardware, facts, choices, plan, resume_dir, validation.num_rows, state, changes)
    if changes:  # save, so that the config on disk always matches the newest checkpoint
        saver.save(state)

    # ------------------------------------------------------------------ loop: one turn is one optimizer step
    grad_norm = scale = last = None

    def due(period: int) -> bool:
        return bool(period) and (last or state.step % period == 0)

    profiling = build_profiler(config.profile, accelerator, output_dir, log.say)
    module.train()
    with StopSignals() as signals, resumable(output_dir, saver, smaller), profiling as profiler:
        while True:  # evaluation and saving are at the top, so the last turn makes no step
            stop, state.seconds = largest_of_processes(signals.received, log.seconds())
            state.progress = progress = measure_progress(config, state)
            last = progress >= 1

            if log.lap_steps and (due(config.logging_steps) or state.step == 1):
                log.train(state, batches, guard, grad_norm, scale)  # the one routine wait for the device
                saver.report()

            if not is_decaying(config, progress):
                state.decay_start = None
            elif state.decay_start is None:  # the run can be extended from here
                state.decay_start = state.step
            saving = config.save_steps and (due(config.save_steps) or state.decay_start == state.step)
            if (saving or stop) and state.step != saver.saved_step:
                with log.paused(state):
                    saver.save(state)  # in the background

            if not stop and (due(config.eval_steps) or last or state.step == 0) and state.step not in log.evaluated:
                with log.paused(state):
                    evaluation = validation.run(signals.on_any_process)
                if evaluation is None:
                    continue  # with the signal that interrupted it
                log.evaluation(state, evaluation)

            uploads.advance()  # in the background, after the evaluation that the card shows
            if last or stop:
                break

            means = {}  # of the loss, and of any other scalar that the module returns
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
        saved = on_main_process(saver.wait)  # no process leaves before the checkpoint is on disk

    # ------------------------------------------------------------------ end
    log.close()
    batches.close()
    if stop:
        stop_run(log, uploads, state, stop, saved)
    else:
        finish_run(log, uploads, state, facts, model, model_config, tokenizer)


if __name__ == "__main__":
    interrupted = "interrupted; --resume_from_checkpoint auto resumes from the newest checkpoint, or starts fresh"
    run_main(lambda: main(STARTED_AT), interrupted)
