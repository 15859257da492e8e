"""The module that a run trains: model and loss in one, which returns no logits.

Returning the logits costs tens of GB at 64 x 1024 x 50304: Accelerate's autocast wrapper copies every output to fp32
(accelerate#2638, #3477) and autograd creates a gradient for each copy.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from recipe.model.weights import output_layer

IGNORE_INDEX = -100  # torch's default ignore_index: a target that does not count
# The loss of more is computed in pieces. Indices beyond have 64 bits, and the kernel of the gradient takes 40
# instructions for each logit instead of 23 (sm_90, torch 2.14). Several pieces take no more memory than one.
MOST_LOGITS = 2**31


class LanguageModelingLoss(nn.Module):
    """Mean cross-entropy in nats per target token, over the real vocabulary.

    The logits are the base model's output times the output matrix, as in GPT-2 and llama. A model that scales, caps or
    transforms them (granite, cohere, gemma2) needs a loss of its own; the trial of a small copy refuses it.

    The padding of the vocabulary gets logits of minus infinity. It has no part in the softmax or the label smoothing
    and gets no gradient, so the loss equals the saved model's exactly, whatever the padding's rows contain.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        label_smoothing: float = 0.0,
        num_chunks: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = vocab_size
        self.label_smoothing = label_smoothing
        self.num_chunks = num_chunks
        self.num_logits = output_layer(model).weight.shape[0]
        logit_bias = torch.zeros(self.num_logits)
        logit_bias[vocab_size:] = -torch.inf
        self.register_buffer("logit_bias", logit_bias, persistent=False)

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """input_ids, targets: int64 [batch, block_size]; targets are already shifted, and -100 does not count.

        Returns `loss`, an fp32 scalar. In train mode, add other scalars if you like: they are averaged and logged. Add
        other terms to the loss only if `self.training`, as smoothing does, so that evaluation is a likelihood. Eval
        mode adds `losses`, fp32 [batch, block_size]: nats of each target, 0 where it does not count.
        """
        shape = targets.shape
        targets = targets.flatten()
        hidden = self._hidden(input_ids)
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)
        num_pieces = max(self.num_chunks, math.ceil(len(targets) * self.num_logits / MOST_LOGITS))
        pieces = zip(hidden.chunk(num_pieces), targets.chunk(num_pieces), strict=True)
        if not self.training:
            losses = torch.cat([self._losses(*piece) for piece in pieces])
            return {"loss": losses.sum() / num_targets, "losses": losses.view(shape)}
        loss_sum_of = self._loss_sum
        if self.num_chunks > 1:  # one chunk of logits at a time; backward computes them again
            loss_sum_of = partial(checkpoint, self._loss_sum, use_reentrant=False, preserve_rng_state=False)
        loss = sum(loss_sum_of(*piece) for piece in pieces) / num_targets
        # An infinite loss can have finite gradients. This factor, 1 for a finite loss, makes them NaN; reducing them
        # makes them NaN on all processes, and all skip the update. Inductor would simplify 1 + 0 * loss to 1.
        return {"loss": loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)}

    def compile(self, blocks: Sequence[nn.Module] = (), **options: Any) -> None:
        """Compile `forward` as one graph; with chunks, the model as one and the loss of a chunk as another.

        In one graph, inductor fuses the chunks for CUDA: all logits are in memory at once (torch 2.15). blocks: if
        given, each is compiled by itself, not the model: blocks that are alike share one graph, and the hooks that
        gather a block's shards would break a graph of several.
        """
        if self.num_chunks == 1 and not blocks:
            super().compile(**options)
            return
        for block in blocks:  # the limit is torch's default, 8, of each: blocks may differ, in a factor per layer
            block.compile(recompile_limit=8 * len(blocks), **options)
        names = ("_losses", "_loss_sum") if blocks else ("_hidden", "_losses", "_loss_sum")
        for name in names:
            setattr(self, name, torch.compile(getattr(self, name), **options))

    def _hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states, [tokens, hidden_size]."""
        return self.model.base_model(input_ids=input_ids, use_cache=False)[0].flatten(0, 1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [tokens, hidden_size]. Returns fp32 [tokens, padded vocabulary]."""
        logits = output_layer(self.model)(hidden)
        # The fp32 bias makes bf16 logits fp32.
        return logits.float() if self.num_logits == self.vocab_size else logits + self.logit_bias

    def _losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """hidden: [tokens, hidden_size]; targets: int64 [tokens]. Returns fp32 [tokens]."""
        return cross_entropy(self._logits(hidden), targets)

    def _loss_sum(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """hidden: [tokens, hidden_size]; targets: int64 [tokens]. Returns the sum over counted targets, fp32."""
        logits = self._logits(hidden)
        loss_sum = cross_entropy(logits, targets, "sum")
        if self.label_smoothing:
            # torch's label_smoothing includes the padding, whose log-probability is -inf
            uniform = -logits[:, : self.vocab_size].log_softmax(dim=-1).mean(dim=-1)
            uniform_sum = (uniform * (targets != IGNORE_INDEX)).sum()
            loss_sum = (1 - self.label_smoothing) * loss_sum + self.label_smoothing * uniform_sum
        return loss_sum


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    """`F.cross_entropy`, or in a compiled graph the same in elementary operations.

    In these operations, a logit's gradient depends on no other logit, so inductor writes it over the logits, for CUDA,
    too. This saves 2 bytes per logit, 6.6 GB at 64 x 1024 (torch 2.15).
    """
    if not torch.compiler.is_compiling():
        return F.cross_entropy(logits, targets, reduction=reduction)
    is_target = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) == targets.int()[:, None]
    losses = logits.logsumexp(dim=-1) - torch.where(is_target, logits, 0.0).sum(dim=-1)
    losses = torch.where(targets != IGNORE_INDEX, losses, 0.0)
    return losses if reduction == "none" else losses.sum()


def own_losses(model: PreTrainedModel, input_ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the `losses` of a saved model by its own logits, as `LanguageModelingLoss` does in eval mode."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return {"losses": cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).view(targets.shape)}
