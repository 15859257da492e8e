"""The module that a run trains: model and loss, compiled as one graph that returns only the loss.

Returning the logits costs tens of GB at 64 x 1024 x 50304: Accelerate's autocast wrapper copies every output to fp32
(accelerate#2638, #3477) and autograd creates a gradient for each copy. With `in_graph=False` the logits leave the
graph and become fp32 outside, as in the usual training loop, to measure this cost.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

IGNORE_INDEX = -100  # torch's default ignore_index: a target that does not count


class LanguageModelingLoss(nn.Module):
    """Mean cross-entropy in nats per target token, over the real vocabulary.

    The padding of the vocabulary gets logits of minus infinity. It has no part in the softmax or the label smoothing
    and gets no gradient, so the loss is exactly that of the saved model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        label_smoothing: float = 0.0,
        num_chunks: int = 1,
        in_graph: bool = True,
        index_mask: bool = False,
    ) -> None:
        """in_graph: False compiles the model without the loss, so that it returns logits.

        index_mask: mask the padding by comparing indices instead of adding a bias.
        """
        super().__init__()
        self.model, self.vocab_size, self.label_smoothing = model, vocab_size, label_smoothing
        self.num_chunks, self.in_graph, self.index_mask = num_chunks, in_graph, index_mask
        self.num_logits = model.get_output_embeddings().weight.shape[0]
        logit_bias = torch.zeros(self.num_logits)
        logit_bias[vocab_size:] = -torch.inf
        self.register_buffer("logit_bias", logit_bias, persistent=False)

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """input_ids, targets: int64 [batch, block_size]; targets are already shifted, and -100 does not count.

        Returns an fp32 scalar. Smoothing applies only in training, so that evaluation is a likelihood.
        """
        targets = targets.flatten()
        model = self.model.base_model if self.in_graph else self.model
        output = model(input_ids=input_ids, use_cache=False)[0].flatten(0, 1)  # hidden states, or logits
        if not self.in_graph:
            loss_sum = self._cross_entropy(output, targets)
        elif self.num_chunks == 1:
            loss_sum = self._loss_sum(output, targets)
        else:  # one chunk of logits at a time; backward computes them again
            chunks = zip(output.chunk(self.num_chunks), targets.chunk(self.num_chunks), strict=True)
            loss_sum = output.new_zeros((), dtype=torch.float32)
            for hidden, chunk_targets in chunks:
                loss_sum = loss_sum + checkpoint(self._loss_sum, hidden, chunk_targets, use_reentrant=False)
        loss = loss_sum / (targets != IGNORE_INDEX).sum().clamp(min=1)
        # An infinite loss can have finite gradients. This factor, 1 for a finite loss, makes them NaN; reducing them
        # makes them NaN on all processes, and all skip the update. Inductor would simplify 1 + 0 * loss to 1.
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)

    def _loss_sum(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """hidden: [tokens, hidden_size]; targets: int64 [tokens]. Returns the sum over counted targets, fp32."""
        return self._cross_entropy(self.model.get_output_embeddings()(hidden), targets)

    def _cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """logits: [tokens, padded vocabulary]; targets: int64 [tokens]. Returns the sum over counted targets, fp32."""
        if self.num_logits == self.vocab_size:
            logits = logits.float()
        elif self.index_mask:
            is_real = torch.arange(self.num_logits, device=logits.device) < self.vocab_size
            logits = torch.where(is_real, logits.float(), -torch.inf)
        else:
            logits = logits + self.logit_bias  # the fp32 bias makes bf16 logits fp32
        loss_sum = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        if self.label_smoothing and self.training:
            # torch's label_smoothing includes the padding, whose log-probability is -inf
            uniform = -logits[:, : self.vocab_size].log_softmax(dim=-1).mean(dim=-1)
            uniform_sum = (uniform * (targets != IGNORE_INDEX)).sum()
            loss_sum = (1 - self.label_smoothing) * loss_sum + self.label_smoothing * uniform_sum
        return loss_sum
