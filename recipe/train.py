"""Train GPT-2: the whole run, in order.

    accelerate launch recipe/train.py                                          a demo that needs nothing
    accelerate launch recipe/train.py --config gpt2_124m --dataset_dir DIR     GPT-2 124M on a packed dataset

config -> accelerator -> data -> model -> optimizer -> prepare -> resume? -> loop -> evaluate, export, sample, publish
"""

import math
import shlex
import sys
import time

import torch
from accelerate.utils import set_seed

from recipe.checkpoint import (
    RunState,
    checkpoint_dir,
    find_checkpoint,
    load_checkpoint,
    read_state,
    run_identity,
)
from recipe.config import load_config, run_main
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import open_dataset_for
from recipe.data.streaming import build_batches
from recipe.environment import describe_device, describe_environment
from recipe.evaluation import evaluate_model
from recipe.generation import generate_texts
from recipe.hub import check_login, push_to_hub, write_model_card
from recipe.loss import LanguageModelingLoss
from recipe.metrics import (
    Throughput,
    count_flops_per_token,
    count_parameters,
    peak_flops_per_second,
    peak_memory_bytes,
)
from recipe.micro_batch import estimate_row_bytes, find_micro_batch, micro_batch_candidates, smaller_micro_batch
from recipe.model import build_model, build_model_config, count_exported_parameters, use_sigmoid_gelu
from recipe.optim import GuardedUpdate, build_optimizer, compute_learning_rates, count_warmup_steps
from recipe.output_dir import SUMMARY_NAME, choose_output_dir, open_output_dir
from recipe.preemption import EXIT_STOPPED, StopRequest
from recipe.report import RunReport, closing_words, resume_command
from recipe.runtime import (
    build_accelerator,
    choose_attention,
    choose_dynamo_backend,
    choose_index_mask,
    choose_residual,
    choose_sigmoid_gelu,
    compile_module,
    on_main_process,
    start_processes,
)
from recipe.saving import CheckpointSaver, export_model
from recipe.step_profile import StepProfiler


def main() -> None:
    started_at = time.perf_counter()
    # ------------------------------------------------------------------ config, accelerator, data
    config, recipe = load_config()
    start_processes()
    output_dir = on_main_process(lambda: choose_output_dir(config, recipe))
    accelerator, precision = build_accelerator(config, output_dir)
    device, num_processes = accelerator.device, accelerator.num_processes
    residual = choose_residual(config, device, precision)
    micro_batches = micro_batch_candidates(config, num_processes, device)
    compute_learning_rates(config)  # a schedule that cannot be, before there is a model
    build_model_config(config, vocab_size=1, eos_token_id=0)  # before text is prepared for a model that cannot be
    resume_dir = on_main_process(lambda: find_checkpoint(output_dir, config.resume_from_checkpoint))
    dataset = open_packed_dataset(on_main_process(lambda: open_dataset_for(config).directory), config.block_size)
    tokenizer = dataset.load_tokenizer()
    model_config = build_model_config(config, dataset.vocab_size, tokenizer.eos_token_id)
    identity = run_identity(config, dataset.metadata, model_config)
    if resume_dir is not None:
        read_state(resume_dir, identity)  # refuse another run's checkpoint before building anything
    tokens_per_step = config.global_batch_size * config.block_size

    # ------------------------------------------------------------------ model, optimizer, prepare
    attention = choose_attention(config, device)
    model = build_model(config, model_config, attention.value, residual.on)
    flops_per_token = count_flops_per_token(model.config, count_parameters(model))
    dynamo = choose_dynamo_backend(config, device, flops_per_token * tokens_per_step * config.max_steps)
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
    eval_batch_size = config.per_device_eval_batch_size or micro_batch_size
    set_seed(config.seed, device_specific=True)  # from here on, dropout differs between processes

    # ------------------------------------------------------------------ resume?
    state = RunState()
    if resume_dir is not None:
        state = load_checkpoint(accelerator, resume_dir, identity, model, dataset.vocab_size, update)
    batches = build_batches(config, dataset, accelerator, micro_batch_size, state.step, state.position)

    # ------------------------------------------------------------------ say what will happen
    on_main_process(lambda: open_output_dir(output_dir, config, resume_dir is not None))
    report = RunReport(accelerator, config, output_dir, state.step)
    saver = CheckpointSaver(accelerator, output_dir, identity, model, model_config, tokenizer, update,
                            config.save_total_limit, on_failure=report.checkpoint_failure)  # fmt: skip
    train_rows = len(dataset.splits["train"])
    report.table({
        "recipe": f"{recipe}, results in {output_dir}" + (f", resumed from {resume_dir}" if resume_dir else ""),
        "device": f"{num_processes} x {describe_device(device)}"
        + (f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""),
        "precision": f"{precision.value}: {precision.reason}"
        + ("; TF32 for what stays fp32" if device.type == "cuda" and config.tf32 else "")
        + ("; deterministic algorithms" if config.deterministic else ""),
        "residual": f"{'bf16' if residual.on else 'fp32'}: {residual.reason}",
        "dynamo": f"{dynamo.value}: {dynamo.reason}",
        "attention": f"{attention.value}: {attention.reason}",
        "gelu": f"{'by a sigmoid' if gelu.on else 'stock'}: {gelu.reason}",
        "padding": f"masked by {'index' if mask.on else 'a bias'}: {mask.reason}",
        "model": f"{type(model).__name__}, {count_parameters(model):,} parameters, vocabulary {dataset.vocab_size:,}"
        + (f" padded to {model.config.vocab_size:,}" if model.config.vocab_size > dataset.vocab_size else "")
        + f", {config.block_size} positions",
        "data": (f"streamed, shuffled over {config.shuffle_buffer_size:,} rows; " if config.streaming
                 else f"{dataset.directory}: {train_rows:,} training rows of {config.block_size} tokens, ")
        + f"{len(dataset.splits['validation']):,} for validation",
        "batch": f"{config.global_batch_size} sequences = {tokens_per_step:,} tokens a step = {num_processes} process"
        f"{'es' if num_processes > 1 else ''} x {accumulation_steps} micro-batch"
        f"{'es' if accumulation_steps > 1 else ''} x {micro_batch_size}",
        "run": f"{config.max_steps:,} steps = {config.max_steps * tokens_per_step:,} tokens, "
        + ("" if config.streaming else f"{config.max_steps * config.global_batch_size / train_rows:.2f} epochs, ")
        + f"{count_warmup_steps(config):,} steps of warm-up",
    })  # fmt: skip
    if state.step == config.max_steps:
        report.say(
            f"all {state.step:,} steps are done: nothing is left to train, the model is evaluated and saved again"
        )
    if config.push_to_hub and (warning := check_login()):
        report.say(warning)

    # ------------------------------------------------------------------ the loop: one turn is one optimizer step
    profile_after = state.step + config.profile if config.profile and accelerator.is_main_process else None
    profiler = StepProfiler(profile_after, config.max_steps, device, output_dir)
    evaluation, seconds_to_first_step = None, None
    if state.step == 0 and config.eval_on_start:
        state.untrained = evaluation = evaluate_model(accelerator, module, dataset, eval_batch_size)
        report.evaluation(0, evaluation)
    throughput = Throughput()
    peak_flops = peak_flops_per_second(device)
    loss_sum, num_losses, lap_began_at = torch.tensor(state.loss_sum, device=device), state.num_losses, state.step
    stop_request = StopRequest(num_processes)
    stop = None
    module.train()
    while state.step < config.max_steps and stop is None:
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
            report.say(f"out of memory in step {state.step + 1}: going on with micro-batches of {micro_batch_size}")
            accumulation_steps = config.global_batch_size // (micro_batch_size * num_processes)
            eval_batch_size = config.per_device_eval_batch_size or micro_batch_size
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
            seconds_to_first_step = seconds_to_first_step or time.perf_counter() - started_at
            report.train(state.step, tokens_seen=state.step * tokens_per_step, loss=train_loss,
                         learning_rate=update.learning_rates[max(0, int(applied) - 1)], grad_norm=train_grad_norm,
                         tokens_per_second=tokens_per_second, mfu=mfu, steps_left_out=int(left_out),
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
            evaluation = evaluate_model(accelerator, module, dataset, eval_batch_size)
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
        report.say(f"stopped by {stop_request.why()} after step {state.step:,}, {what}; go on, with the launcher's "
                   f"options, by\n{resume_command(output_dir)}")  # fmt: skip
        stop_request.close()
        report.end()
        sys.exit(EXIT_STOPPED if saved else 1)
    stop_request.close()

    # ------------------------------------------------------------------ evaluate, export, sample, publish
    if evaluation is None:  # resumed where there was nothing left to train
        evaluation = evaluate_model(accelerator, module, dataset, eval_batch_size)
    if accelerator.is_main_process:
        export_model(model, model_config, tokenizer, output_dir)
        summary = {
            "step": state.step,
            "tokens_seen": state.step * tokens_per_step,
            "eval_loss": evaluation["loss"],
            "perplexity": evaluation["perplexity"],
            "bits_per_byte": evaluation["bits_per_byte"],
            "untrained": state.untrained,
            "tokens_per_second": throughput.tokens_per_second,
            "seconds_to_first_step": seconds_to_first_step,
            "peak_memory_bytes": peak_memory_bytes(device),
            "train_seconds": state.train_seconds,
            "wall_seconds": time.perf_counter() - started_at,
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
        sample = generate_texts(output_dir, config.sample_prompt, seed=config.seed, device=device)[0]
        print(closing_words(config, output_dir, state.untrained, evaluation, sample))
        if config.push_to_hub:
            print(push_to_hub(output_dir, config))
    report.end()


if __name__ == "__main__":
    run_main(main, "interrupted; a run goes on from its last checkpoint with --resume_from_checkpoint auto")
