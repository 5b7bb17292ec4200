"""An output layer that scores sampled tokens in chunks, so that the logits of many tokens never exist at once.

The backward pass recomputes a chunk's logits, unless all logits of a row are small enough to keep. Sums over chunks are
in float32 (float64 for float64 models), so that a gradient does not depend on the number of chunks.
Derivatives of a token a with p = softmax(z): ∂ log p_a / ∂z = 1_a − p and ∂H / ∂z = −p (log p + H). Shapes: K sampled
tokens, C of them in a chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer_service.logprobs import GREEDY_BELOW, SamplingTensors, Scores, processed_logprobs

CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}  # size of a chunk's logits in float32
KEPT_BYTES = 768 * 2**20  # up to this size, all logits are kept from the forward pass for the backward pass
MIN_CHUNK = 32  # tokens; smaller chunks read the weights too often


@dataclass(frozen=True, slots=True)
class LogitShape:
    """What a model applies to the result of its output layer: z · scale, then cap · tanh(z / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitShape:
        """Read the names that Transformers' configurations use: Cohere's, Granite's, Falcon's and Gemma's."""

        def factor(name: str) -> float:
            return float(getattr(config, name, None) or 1.0)

        scale = factor("logit_scale") * factor("lm_head_multiplier") / factor("logits_scaling")
        return cls(scale, getattr(config, "final_logit_softcapping", None))


@dataclass(frozen=True, slots=True)
class Question:
    """The scores that are requested of sampled tokens."""

    actions_K: Tensor
    sampling: SamplingTensors
    processed: bool = False
    entropies: bool = False
    entropy_gradient: bool = False
    others: Tensor | None = None  # [K, N] further tokens to score
    top: int = 0  # number of most likely tokens to return


class ScoringHead(nn.Linear):
    """A linear output layer that returns scores instead of logits if it is called with a question.

    It has the parameters of the layer that it replaces, so that state dict, tying and ZeRO's gathering do not change.
    """

    shape: LogitShape

    @classmethod
    def replacing(cls, layer: nn.Linear, shape: LogitShape) -> ScoringHead:
        head = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        head.weight, head.bias, head.shape = layer.weight, layer.bias, shape
        return head

    def forward(self, hidden: Tensor, question: Question | None = None) -> Any:
        """Return the logits of `hidden`, or for a question (logprobs, entropies, processed logprobs, those of further
        tokens, most likely tokens, their logprobs) of hidden_KD: [K] and [K, N], empty if not requested. Processed
        logprobs and those of the most likely tokens have no gradient."""
        if question is None:
            return super().forward(hidden)
        wide = torch.promote_types(hidden.dtype, torch.float32).itemsize
        few = wide * len(hidden) * len(self.weight) <= KEPT_BYTES
        keeps = few and torch.is_grad_enabled() and self.shape.cap is None
        return _Scores.apply(hidden, self.weight, self.bias, question, self.shape, keeps)  # type: ignore[no-untyped-call]

    def score(self, hidden_KD: Tensor, question: Question) -> Scores:
        """Return scores of the sampled tokens that hidden_KD predicts."""
        logprobs, entropy, processed, others, top, top_logprobs = self(hidden_KD, question)
        scores: Scores = {"logprobs": logprobs}
        if question.processed:
            scores["processed"] = processed
        if question.entropies:
            scores["entropy"] = entropy if question.entropy_gradient else entropy.detach()
        if question.others is not None:
            scores["others"] = others
        if question.top:
            scores["top"] = top, top_logprobs
        return scores


def install(model: Any) -> bool:
    """Install a scoring head in a causal LM. Returns whether its output layer can be replaced."""
    layer = model.get_output_embeddings()
    if type(layer) is nn.Linear:
        model.set_output_embeddings(ScoringHead.replacing(layer, LogitShape.of(model.config.get_text_config())))
    return isinstance(model.get_output_embeddings(), ScoringHead)


def remove(model: Any) -> None:
    """Restore the model's plain linear output layer; a trunk without one does not change."""
    layer = model.get_output_embeddings()
    if isinstance(layer, ScoringHead):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = layer.weight, layer.bias
        model.set_output_embeddings(plain)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        question: Question,
        shape: LogitShape,
        keeps: bool,
    ) -> tuple[Tensor, ...]:
        count, kind = len(hidden_KD), torch.promote_types(hidden_KD.dtype, torch.float32)
        logprobs_K = hidden_KD.new_empty(count, dtype=kind)
        entropy_K = hidden_KD.new_empty(count if question.entropies else 0, dtype=kind)
        processed_K = hidden_KD.new_empty(count if question.processed else 0, dtype=kind)
        others_KN = hidden_KD.new_empty(count, 0 if question.others is None else question.others.shape[1], dtype=kind)
        top_KN = hidden_KD.new_empty(count, min(question.top, len(weight_VD)), dtype=torch.int64)
        top_logprobs_KN = top_KN.to(kind)
        ctx.kept = {}
        for chunk, logits_CV, work_CV in _chunks(hidden_KD, weight_VD, kind):
            sampling, actions_C = question.sampling.rows(chunk), question.actions_K[chunk]
            _logits(hidden_KD[chunk], weight_VD, bias_V, shape, logits_CV).div_(_temperature(sampling, kind))
            if keeps:
                ctx.kept[chunk.start] = logprobs_CV = torch.log_softmax(logits_CV, -1)
            else:
                logprobs_CV = torch.log_softmax(logits_CV, -1, out=work_CV)
            logprobs_K[chunk] = logprobs_CV.gather(-1, actions_C.unsqueeze(-1)).squeeze(-1)
            if question.others is not None:
                others_KN[chunk] = logprobs_CV.gather(-1, question.others[chunk])
            if question.top:
                top_logprobs_KN[chunk], top_KN[chunk] = logprobs_CV.topk(top_KN.shape[1], dim=-1)
            if question.processed:
                # from the logits: a repetition penalty depends on their sign
                processed_K[chunk] = processed_logprobs(logits_CV, actions_C, sampling)
            if question.entropies:
                entropy_K[chunk] = -torch.exp(logprobs_CV, out=logits_CV).mul_(logprobs_CV).sum(-1)
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, entropy_K)
        ctx.question, ctx.shape = question, shape
        ctx.mark_non_differentiable(processed_K, top_KN, top_logprobs_KN)
        return logprobs_K, entropy_K, processed_K, others_KN, top_KN, top_logprobs_KN

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_grad_K: Tensor, entropy_grad_K: Tensor, _: Tensor, others_grad_KN: Tensor, *__: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_KD, weight_VD, bias_V, entropy_K = ctx.saved_tensors
        question: Question = ctx.question
        kind, shape = logprob_grad_K.dtype, ctx.shape
        hidden_grad = torch.empty_like(hidden_KD) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight_VD, dtype=kind) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias_V, dtype=kind) if ctx.needs_input_grad[2] else None
        for chunk, logits_CV, work_CV in _chunks(hidden_KD, weight_VD, kind):
            temperature_C1 = _temperature(question.sampling.rows(chunk), kind)
            logprobs_CV = ctx.kept.pop(chunk.start, None)
            if logprobs_CV is None:
                _logits(hidden_KD[chunk], weight_VD, bias_V, shape, logits_CV)
                scaled_CV = logits_CV.div_(temperature_C1) if shape.cap is None else logits_CV / temperature_C1
                logprobs_CV = torch.log_softmax(scaled_CV, -1, out=work_CV)
            # gradient by z, up to a factor of each row that is multiplied in where rows are short
            factor_C1 = -shape.scale / temperature_C1
            if question.entropy_gradient or question.others is not None:
                whole_C = logprob_grad_K[chunk] + others_grad_KN[chunk].sum(-1)
                if question.entropy_gradient:
                    grad_CV = _with_entropy(logprobs_CV, entropy_K[chunk], entropy_grad_K[chunk], whole_C)
                else:
                    grad_CV = logprobs_CV.exp_().mul_(whole_C.unsqueeze(-1))
                if question.others is not None:
                    grad_CV.scatter_add_(-1, question.others[chunk], -others_grad_KN[chunk])
                own_C1 = logprob_grad_K[chunk, None]
            else:
                grad_CV = logprobs_CV.exp_()
                own_C1 = torch.ones_like(factor_C1)
                factor_C1 = factor_C1 * logprob_grad_K[chunk, None]
            grad_CV.scatter_add_(-1, question.actions_K[chunk, None], -own_C1)
            if shape.cap is not None:
                grad_CV.mul_(logits_CV.div_(shape.cap).square_().neg_().add_(1))
            if hidden_grad is not None:
                hidden_grad[chunk] = (grad_CV.to(weight_VD.dtype) @ weight_VD).mul_(factor_C1)
            if weight_grad is not None:
                _add_product(weight_grad, grad_CV, hidden_KD[chunk] * factor_C1, weight_VD.dtype)
            if bias_grad is not None:
                bias_grad += (grad_CV * factor_C1).sum(0)
        grads = (hidden_grad, weight_grad, bias_grad)
        return (*(None if grad is None else grad.to(weight_VD.dtype) for grad in grads), None, None, None)


def _with_entropy(logprobs_CV: Tensor, entropy_C: Tensor, entropy_grad_C: Tensor, logprob_grad_C: Tensor) -> Tensor:
    """Return p (g + h (log p + H)): g and h are the loss's derivatives by the logprob and the entropy H."""
    slope_CV = (logprobs_CV + entropy_C.unsqueeze(-1)).mul_(entropy_grad_C.unsqueeze(-1))
    return logprobs_CV.exp_().mul_(slope_CV.add_(logprob_grad_C.unsqueeze(-1)))


def _chunks(hidden_KD: Tensor, weight_VD: Tensor, kind: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the chunks, each with two work arrays [C, V], which the next chunk reuses."""
    count, vocabulary = len(hidden_KD), len(weight_VD)
    size = min(count, max(MIN_CHUNK, CHUNK_BYTES["cuda" if hidden_KD.is_cuda else "cpu"] // (4 * vocabulary)))
    logits_CV, work_CV = (hidden_KD.new_empty(size, vocabulary, dtype=kind) for _ in range(2))
    for start in range(0, count, size):
        chunk = slice(start, min(start + size, count))
        yield chunk, logits_CV[: chunk.stop - start], work_CV[: chunk.stop - start]


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, shape: LogitShape, out_CV: Tensor) -> Tensor:
    if bias_V is None and hidden_CD.dtype == out_CV.dtype:
        torch.mm(hidden_CD, weight_VD.mT, out=out_CV)
    else:
        out_CV.copy_(F.linear(hidden_CD, weight_VD, bias_V))
    if shape.scale != 1:
        out_CV.mul_(shape.scale)
    if shape.cap is not None:
        out_CV.div_(shape.cap).tanh_().mul_(shape.cap)
    return out_CV


def _temperature(sampling: SamplingTensors, kind: torch.dtype) -> Tensor:
    temperature_C = sampling.temperature_K
    return torch.where(temperature_C < GREEDY_BELOW, 1.0, temperature_C).to(kind).unsqueeze(-1)


def _add_product(sum_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor, kind: torch.dtype) -> None:
    """sum += gradᵀ · hidden. kind: dtype of the model; if it is narrower, products of chunks are not rounded to it."""
    if kind != sum_VD.dtype and hidden_CD.is_cuda:
        sum_VD += torch.mm(grad_CV.mT.to(kind), hidden_CD.to(kind), out_dtype=sum_VD.dtype)
    else:
        sum_VD.addmm_(grad_CV.mT, hidden_CD.to(sum_VD.dtype))
