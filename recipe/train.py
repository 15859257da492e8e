"""Train GPT-2: the whole run, in order.

    accelerate launch recipe/train.py                                          a demo that needs nothing
    accelerate launch recipe/train.py --config gpt2_124m --dataset_dir DIR     GPT-2 124M on a packed dataset

config -> accelerator -> data -> model -> optimizer -> prepare -> resume? -> loop -> evaluate, export, publish, sample
"""

import sys
import time

STARTED_AT = time.perf_counter()

from recipe.command_line import load_config
from recipe.errors import UserError, run_main
from recipe.hardware.host_memory import FreedMemory, use_huge_pages

if __name__ == "__main__":  # before torch is imported, which takes seconds
    config, _ = run_main(load_config)  # a mistyped option is reported at once
    use_huge_pages(config.huge_pages)

import math
import shlex

import torch
from accelerate.utils import set_seed

from recipe.checkpoint.load import (
    RunState,
    check_identity,
    checkpoint_dir,
    find_checkpoint,
    load_checkpoint,
    precision_of,
    run_identity,
)
from recipe.checkpoint.save import CheckpointSaver
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import open_dataset_for
from recipe.data.streaming import build_batches
from recipe.environment import describe_environment
from recipe.evaluation.generation import sample_from
from recipe.evaluation.validation import choose_eval_batch_size, evaluate_model
from recipe.hardware.accelerator import build_accelerator, compile_module
from recipe.hardware.choices import (
    Choice,
    choose_attention,
    choose_dynamo_backend,
    choose_index_mask,
    choose_residual,
    choose_sigmoid_gelu,
)
from recipe.hardware.devices import peak_flops_per_second, peak_memory_bytes
from recipe.hardware.memory import estimate_row_bytes, find_micro_batch, micro_batch_candidates, smaller_micro_batch
from recipe.hardware.processes import host_group, on_main_process, start_processes
from recipe.model.build import build_model, build_model_config, use_sigmoid_gelu
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import count_exported_parameters, count_flops_per_token, count_parameters
from recipe.optim.guard import GuardedUpdate
from recipe.optim.optimizers import build_optimizer, compute_learning_rates
from recipe.publish.card import write_model_card
from recipe.publish.export import export_model
from recipe.publish.hub import check_login, push_to_hub
from recipe.run.log import RunReport
from recipe.run.meter import Throughput
from recipe.run.output_dir import SUMMARY_NAME, choose_output_dir, open_output_dir, record_config, resume_command
from recipe.run.plan import StepBudget, count_eval_rows, keep_chosen_steps, resolve_max_steps, shorten
from recipe.run.profile import StepProfiler
from recipe.run.stop import EXIT_STOPPED, StopRequest
from recipe.run.summary import closing_words, describe_evaluation, describe_run


def main() -> None:
    # ------------------------------------------------------------------ config, accelerator, data
    config, recipe = load_config()
    start_processes()
    output_dir = on_main_process(lambda: choose_output_dir(config, recipe))
    accelerator, precision = build_accelerator(config, output_dir)
    device, num_processes = accelerator.device, accelerator.num_processes
    residual = choose_residual(config, device, precision)
    micro_batches = micro_batch_candidates(config, num_processes, device)
    compute_learning_rates(config)  # a schedule that cannot be, before there is a model
    resume_dir = on_main_process(lambda: find_checkpoint(output_dir, config.resume_from_checkpoint))
    source = resume_dir if resume_dir and config.model_name_or_path else config.model_name_or_path
    build_model_config(config, 1, 0, source)  # a model that cannot be, before text is prepared for it
    dataset = open_packed_dataset(
        on_main_process(lambda: open_dataset_for(config, source).directory), config.block_size
    )
    tokenizer = dataset.load_tokenizer()
    model_config = build_model_config(config, dataset.vocab_size, tokenizer.eos_token_id, source)
    config = resolve_max_steps(config, len(dataset.splits["train"]))
    changes = {}
    if resume_dir is not None:
        config = keep_chosen_steps(config, resume_dir)
    identity = run_identity(config, dataset.metadata, model_config)
    if resume_dir is not None:  # refuse another run's checkpoint before building anything
        changes = check_identity(resume_dir, identity, config.change_schedule or config.eval_only, output_dir)
    elif config.eval_only and source is None:
        raise UserError(f"--eval_only: there is no checkpoint in {output_dir}; pass --model_name_or_path")
    tokens_per_step = config.global_batch_size * config.block_size

    # ------------------------------------------------------------------ model, optimizer, prepare
    attention = choose_attention(config, device)
    model = build_model(config, model_config, attention.value, residual.on, source)
    flops_per_token = count_flops_per_token(model.config, count_parameters(model), config.block_size)
    num_steps = 0 if config.eval_only else config.max_steps
    dynamo = choose_dynamo_backend(config, device, flops_per_token * tokens_per_step * num_steps)
    gelu = choose_sigmoid_gelu(config, model_config, device, precision, dynamo)
    mask = choose_index_mask(config, device, dynamo)
    if gelu.on:
        use_sigmoid_gelu(model)
    module = LanguageModelingLoss(model, dataset.vocab_size, config.label_smoothing_factor, config.loss_chunks,
                                  config.loss_in_graph, mask.on)  # fmt: skip
    compile_module(module if config.loss_in_graph else model, dynamo.value, config.dynamo_mode)
    optimizer = build_optimizer(config, module)
    module, optimizer = accelerator.prepare(module, optimizer)
    update = GuardedUpdate(config, accelerator, optimizer)
    row_bytes = estimate_row_bytes(config, model.config, precision.value, residual.on)
    micro_batch_size = find_micro_batch(accelerator, module, micro_batches, config, row_bytes)
    accumulation_steps = config.global_batch_size // (micro_batch_size * num_processes)
    accelerator.gradient_accumulation_steps = accumulation_steps
    eval_batch_size = config.per_device_eval_batch_size or choose_eval_batch_size(
        config.block_size, micro_batch_size, device
    )
    num_validation_rows = len(dataset.splits["validation"])
    eval_rows = count_eval_rows(config, num_validation_rows, eval_batch_size * num_processes)
    set_seed(config.seed, device_specific=True)  # from here on, dropout differs between processes

    # ------------------------------------------------------------------ resume?
    state = RunState()
    if resume_dir is not None:
        state = load_checkpoint(accelerator, resume_dir, model, dataset.vocab_size, update)
    if config.max_eval_samples == "auto":
        eval_rows = state.eval_rows = state.eval_rows or eval_rows  # a resumed run evaluates on the same rows
    if config.eval_only:
        num_rows = num_validation_rows if config.max_eval_samples == "auto" else eval_rows
        evaluation = evaluate_model(accelerator, module, dataset, eval_batch_size, num_rows)
        if accelerator.is_main_process:
            print(describe_evaluation(f"{source or resume_dir}, {num_rows:,} rows", evaluation))
        accelerator.end_training()
        return
    batches = build_batches(config, dataset, accelerator, micro_batch_size, state.step, state.position)

    # ------------------------------------------------------------------ say what will happen
    on_main_process(lambda: open_output_dir(output_dir, config, resume_dir is not None))
    report = RunReport(accelerator, config, output_dir, state.step)
    saver = CheckpointSaver(accelerator, output_dir, identity, model, model_config, tokenizer, update,
                            config.save_total_limit, on_failure=report.checkpoint_failure)  # fmt: skip
    choices = {"precision": precision, "dynamo": dynamo, "attention": attention}
    switches = ("residual", "bf16", residual), ("gelu", "by a sigmoid", gelu), ("mask", "by index", mask)
    choices |= {label: Choice(value, choice.reason) for label, value, choice in switches if choice.on}
    batch = num_processes, accumulation_steps, micro_batch_size
    report.table(
        describe_run(config, recipe, output_dir, resume_dir, device, choices, model, dataset, batch, eval_rows)
    )
    if changes:
        report.schedule(state.step, changes)
        saver.save(state)  # so that the folder's config and its newest checkpoint agree from now on
    if resume_dir is not None and (before := precision_of(resume_dir)) not in (None, precision.value):
        report.say(f"warning: the precision changes from {before} to {precision.value} at step {state.step:,}")
    if state.step == config.max_steps:
        report.say(
            f"all {state.step:,} steps are done: the model is evaluated and exported again; to train longer, add "
            f"--max_steps {2 * state.step} --change_schedule"
        )
    if (
        not config.streaming
        and (epochs := config.max_steps * config.global_batch_size / len(dataset.splits["train"])) > 100
    ):
        report.say(f"warning: {epochs:,.0f} passes over so little text: the model will memorize it")
    if config.push_to_hub and (warning := check_login()):
        report.say(warning)

    # ------------------------------------------------------------------ the loop: one turn is one optimizer step
    profile_after = state.step + config.profile if config.profile and accelerator.is_main_process else None
    profiler = StepProfiler(profile_after, config.max_steps, device, output_dir)
    evaluation, seconds_to_first_step = None, None
    throughput = Throughput()
    if state.step == 0 and config.eval_on_start:
        state.untrained = evaluation = evaluate_model(accelerator, module, dataset, eval_batch_size, eval_rows)
        report.evaluation(0, evaluation)
    throughput.resume()
    freed_memory = FreedMemory()
    final_eval_rows = num_validation_rows if config.exact_final_eval else eval_rows
    budget = StepBudget(config, STARTED_AT, state.step, eval_rows, final_eval_rows)
    peak_flops = peak_flops_per_second(device)
    loss_sum, num_losses, lap_began_at = torch.tensor(state.loss_sum, device=device), state.num_losses, state.step
    stop_request = StopRequest(host_group())
    stop = None
    module.train()
    while state.step < config.max_steps and stop is None:
        if (max_steps := budget.choose(state.step)) is not None:
            report.shorten(state.step, max_steps, config)
            config = shorten(config, max_steps)
            update.set_schedule(config)
            state.steps_chosen = True
            identity |= {"max_steps": config.max_steps, "warmup_steps": config.warmup_steps}
            eval_rows = state.eval_rows = count_eval_rows(config, num_validation_rows, eval_batch_size * num_processes)
            if config.save_steps:  # before the folder's config says so: a run that is killed now must resume
                state.loss_sum, state.num_losses = accelerator.reduce(loss_sum, reduction="mean").item(), num_losses
                saver.save(state)
                on_main_process(saver.wait)
            on_main_process(lambda chosen=config: record_config(output_dir, chosen))
            throughput.resume()

        try:
            step_loss = torch.zeros((), device=device)
            for _ in range(accumulation_steps):
                with accelerator.accumulate(module):  # gradients are synchronised on the last micro-batch
                    loss = module(*next(batches))
                    accelerator.backward(loss)  # divides by accumulation_steps
                step_loss += loss.detach() / accumulation_steps
                report.advance(1 / accumulation_steps)
        except RuntimeError as error:  # out of memory: the same step again, in smaller pieces
            loss = None  # and with it the graph of what did not fit
            micro_batch_size = smaller_micro_batch(error, config, micro_batches, micro_batch_size, num_processes)
            report.say(f"out of memory in step {state.step + 1}: continuing with micro-batches of {micro_batch_size}")
            accumulation_steps = config.global_batch_size // (micro_batch_size * num_processes)
            eval_batch_size = min(eval_batch_size, micro_batch_size)
            accelerator.gradient_accumulation_steps, accelerator.step = accumulation_steps, 0
            module.zero_grad()  # the prepared optimizer's does nothing in the middle of an accumulation
            batches.close()
            batches = build_batches(config, dataset, accelerator, micro_batch_size, state.step, state.position)
            continue
        grad_norm = accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm or math.inf)
        update.step(step_loss, grad_norm)
        optimizer.zero_grad()
        loss_sum += step_loss
        num_losses += 1
        state.step += 1
        state.position = batches.position
        freed_memory.give_back()

        stop = stop_request.agreed()
        last = state.step == config.max_steps
        evaluating = last or (config.eval_steps and state.step % config.eval_steps == 0)
        saving = config.save_steps and (last or state.step % config.save_steps == 0)

        if evaluating or saving or state.step == 1 or state.step % config.logging_steps == 0:
            # The only place where the host waits for the device.
            numbers = torch.cat([torch.stack([loss_sum / num_losses, grad_norm]), update.numbers()])
            train_loss, train_grad_norm, applied, left_out, bad = accelerator.reduce(
                numbers, reduction="mean"
            ).tolist()
            num_tokens = (state.step - lap_began_at) * tokens_per_step
            seconds = throughput.lap(num_tokens)
            tokens_per_second = num_tokens / seconds
            state.train_seconds += seconds
            mfu = tokens_per_second * flops_per_token / (peak_flops * num_processes) if peak_flops else None
            seconds_to_first_step = seconds_to_first_step or time.perf_counter() - STARTED_AT
            report.train(state.step, tokens_seen=state.step * tokens_per_step, loss=train_loss,
                         learning_rate=update.learning_rates[max(0, int(applied) - 1)], grad_norm=train_grad_norm,
                         tokens_per_second=tokens_per_second, mfu=mfu, steps_left_out=int(left_out),
                         share_outside_training=throughput.share_outside_training,
                         peak_memory_bytes=peak_memory_bytes(device))  # fmt: skip
            loss_sum, num_losses, lap_began_at = torch.zeros((), device=device), 0, state.step
            saver.report()
            if bad >= config.max_bad_steps:
                saver.wait()
                raise report.bad_numbers(state.step, int(bad), train_loss, train_grad_norm)

        if saving or stop is not None:
            state.loss_sum, state.num_losses = accelerator.reduce(loss_sum, reduction="mean").item(), num_losses
            saver.save(state)
            throughput.resume()

        if evaluating:
            num_rows = num_validation_rows if last and config.exact_final_eval else eval_rows
            evaluation = evaluate_model(accelerator, module, dataset, eval_batch_size, num_rows)
            report.evaluation(state.step, evaluation)
            throughput.resume()

        if (profile := profiler.after(state.step)) is not None:
            report.profile(state.step, profile)
            throughput.resume()
            lap_began_at = state.step
    saved = on_main_process(saver.wait)  # the others must not leave before it is on disk
    batches.close()
    report.close()
    if stop is not None and state.step < config.max_steps:
        what = f"saved in {checkpoint_dir(output_dir, state.step)}" if saved else "which could not be saved"
        report.say(f"stopped by {stop_request.why()} after step {state.step:,}, {what}; to continue:\n"
                   f"{resume_command(output_dir)}")  # fmt: skip
        stop_request.close()
        report.end()
        sys.exit(EXIT_STOPPED if saved else 1)
    stop_request.close()

    # ------------------------------------------------------------------ evaluate, export, publish, sample
    if evaluation is None:  # resumed where there was nothing left to train
        num_rows = num_validation_rows if config.exact_final_eval else eval_rows
        evaluation = evaluate_model(accelerator, module, dataset, eval_batch_size, num_rows)
    if accelerator.is_main_process:
        export_model(model, model_config, tokenizer, output_dir)
        summary = {
            "step": state.step,
            "tokens_seen": state.step * tokens_per_step,
            "eval_loss": evaluation["loss"],
            "perplexity": evaluation["perplexity"],
            "bits_per_byte": evaluation["bits_per_byte"],
            "eval_rows": evaluation["num_rows"],
            "untrained": state.untrained,
            "tokens_per_second": throughput.tokens_per_second,
            "seconds_to_first_step": seconds_to_first_step,
            "peak_memory_bytes": peak_memory_bytes(device),
            "train_seconds": state.train_seconds,
            "wall_seconds": time.perf_counter() - STARTED_AT,
            "share_outside_training": throughput.share_outside_training,
            "num_parameters": count_exported_parameters(model, dataset.vocab_size),
            "num_processes": num_processes,
            "mixed_precision": precision.value,
            "dynamo_backend": dynamo.value,
            "per_device_train_batch_size": micro_batch_size,
            "dataset_content_sha256": dataset.metadata["content_sha256"],
            "command": shlex.join(sys.argv),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "environment": describe_environment(device),
        }
        if throughput.laps or not (output_dir / SUMMARY_NAME).exists():  # else there is nothing new to say
            report.summary(summary)
            write_model_card(output_dir, config, dataset, summary)
        share = throughput.share_outside_training if throughput.laps else None
        print(closing_words(config, output_dir, state.untrained, evaluation, share))
        if config.push_to_hub:
            print(push_to_hub(output_dir, config))
        optimizer.state.clear()  # the sample comes from the exported model, which needs room of its own
        print(sample_from(output_dir, config.sample_prompt, seed=config.seed, device=device))
    on_main_process(lambda: None)  # the others wait here, on the host, and not in a device collective
    report.end()


if __name__ == "__main__":
    run_main(
        main,
        "interrupted; with --resume_from_checkpoint auto, the run continues from its last checkpoint, if it has saved "
        "one, and starts again otherwise",
    )
