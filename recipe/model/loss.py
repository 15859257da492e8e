"""The module that is prepared and called: model and loss, compiled as one graph that returns nothing but the loss.

Returning logits would cost tens of GB at 64 x 1024 x 50304: Accelerate's autocast wrapper copies every output to
fp32 (accelerate#2638, #3477) and autograd makes a gradient for each. With `in_graph=False` they leave the graph and
are made fp32 outside, as in the usual loop, to measure what that costs.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

IGNORE_INDEX = -100  # torch's default ignore_index: a target that does not count


class LanguageModelingLoss(nn.Module):
    """Mean cross-entropy in nats per target token, over the real vocabulary.

    The padding of the vocabulary gets a logit of minus infinity: it takes part neither in the softmax nor in label
    smoothing, gets no gradient, and the loss is exactly that of the model as it is saved.
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
        """in_graph: False for a model that returns logits, compiled without the loss, as the usual loop has it.

        index_mask: mask the padding by comparing indices instead of adding a bias.
        """
        super().__init__()
        self.index_mask = index_mask
        self.in_graph = in_graph
        self.model = model
        self.vocab_size = vocab_size
        self.label_smoothing = label_smoothing
        self.num_chunks = num_chunks
        padded_vocab_size = model.get_output_embeddings().weight.shape[0]
        self.num_logits = padded_vocab_size
        logit_bias = torch.zeros(padded_vocab_size)
        logit_bias[vocab_size:] = -torch.inf
        self.register_buffer("logit_bias", logit_bias, persistent=False)

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """input_ids, targets: int64 [batch, block_size]; targets are already shifted, -100 does not count.

        Returns an fp32 scalar. Smoothing applies in training only, so that evaluation is a likelihood.
        """
        targets = targets.flatten()
        model = self.model.base_model if self.in_graph else self.model
        output = model(input_ids=input_ids, use_cache=False)[0].flatten(0, 1)  # hidden states, or logits
        if not self.in_graph:
            loss_sum = self._cross_entropy(output, targets)
        elif self.num_chunks == 1:
            loss_sum = self._loss_sum(output, targets)
        else:  # logits of one chunk at a time, made again in backward
            loss_sum = output.new_zeros((), dtype=torch.float32)
            for piece, piece_targets in zip(
                output.chunk(self.num_chunks), targets.chunk(self.num_chunks), strict=True
            ):
                loss_sum = loss_sum + checkpoint(self._loss_sum, piece, piece_targets, use_reentrant=False)
        loss = loss_sum / (targets != IGNORE_INDEX).sum().clamp(min=1)
        # Times one; but a loss that is not finite makes every gradient NaN, on all processes once they are reduced,
        # so that all leave the update out (an infinite loss alone may have finite gradients). Not 1 + 0 * loss, which
        # inductor takes for 1.
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)

    def _loss_sum(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """hidden: [tokens, n_embd]; targets: int64 [tokens]. Returns the sum over counted targets."""
        return self._cross_entropy(self.model.get_output_embeddings()(hidden), targets)

    def _cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """logits: [tokens, padded vocabulary]; targets: int64 [tokens]. Returns the sum over counted targets."""
        if self.num_logits == self.vocab_size:
            logits = logits.float()
        elif self.index_mask:
            is_real = torch.arange(self.num_logits, device=logits.device) < self.vocab_size
            logits = torch.where(is_real, logits.float(), -torch.inf)
        else:
            logits = logits + self.logit_bias  # fp32 too
        loss_sum = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        if self.label_smoothing and self.training:
            # torch's own label_smoothing would spread mass over the padding, where log-probability is -inf
            uniform = -logits[:, : self.vocab_size].log_softmax(dim=-1).mean(dim=-1)
            uniform_sum = (uniform * (targets != IGNORE_INDEX)).sum()
            loss_sum = (1 - self.label_smoothing) * loss_sum + self.label_smoothing * uniform_sum
        return loss_sum
