"""The module that is prepared, compiled and called: model and loss in one graph, returning the loss and nothing else.

Returning logits would cost tens of GB at 64 x 1024 x 50304: Accelerate's autocast wrapper copies every output to
fp32 (accelerate#2638, #3477) and autograd makes a gradient for each.
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
        self, model: PreTrainedModel, vocab_size: int, label_smoothing: float = 0.0, num_chunks: int = 1
    ) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = vocab_size
        self.label_smoothing = label_smoothing
        self.num_chunks = num_chunks
        padded_vocab_size = model.get_output_embeddings().weight.shape[0]
        self.has_padding = padded_vocab_size > vocab_size
        logit_bias = torch.zeros(padded_vocab_size)
        logit_bias[vocab_size:] = -torch.inf
        self.register_buffer("logit_bias", logit_bias, persistent=False)

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """input_ids, targets: int64 [batch, block_size]; targets are already shifted, -100 does not count.

        Returns an fp32 scalar. Smoothing applies in training only, so that evaluation is a likelihood.
        """
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        targets = targets.flatten()
        if self.num_chunks == 1:
            loss_sum = self._loss_sum(hidden, targets)
        else:  # logits of one chunk at a time, made again in backward
            loss_sum = hidden.new_zeros((), dtype=torch.float32)
            for piece, piece_targets in zip(
                hidden.chunk(self.num_chunks), targets.chunk(self.num_chunks), strict=True
            ):
                loss_sum = loss_sum + checkpoint(self._loss_sum, piece, piece_targets, use_reentrant=False)
        loss = loss_sum / (targets != IGNORE_INDEX).sum().clamp(min=1)
        # Times one; but a loss that is not finite makes every gradient NaN, on all processes once they are reduced,
        # so that all leave the update out (an infinite loss alone may have finite gradients). Not 1 + 0 * loss, which
        # inductor takes for 1.
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)

    def _loss_sum(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """hidden: [tokens, n_embd]; targets: int64 [tokens]. Returns the sum over counted targets."""
        logits = self.model.get_output_embeddings()(hidden)
        logits = logits + self.logit_bias if self.has_padding else logits.float()  # fp32 either way
        loss_sum = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        if self.label_smoothing and self.training:
            # torch's own label_smoothing would spread mass over the padding, where log-probability is -inf
            uniform = -logits[:, : self.vocab_size].log_softmax(dim=-1).mean(dim=-1)
            uniform_sum = (uniform * (targets != IGNORE_INDEX)).sum()
            loss_sum = (1 - self.label_smoothing) * loss_sum + self.label_smoothing * uniform_sum
        return loss_sum
