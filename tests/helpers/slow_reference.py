"""kNN-MoE written out slowly, in float64, one token at a time: what the library is tested against.

This file knows the paper (§3, §4) and the arithmetic of three transformers models: OLMoE,
Qwen3-MoE and GPT-OSS, with every layer a mixture of experts. It shares nothing with ``src``: it
imports torch and nothing of ours, and takes only weights and settings from the given model.

What a token computes is a function of that token and those before it, as vectors rather than rows
of a batch. So there is no mask to get wrong, nothing passes through float32 (transformers' norms,
rotary angles, softmaxes and gates do), and sequences that share a prefix share its keys bit for
bit. Rotary frequencies are the model's own float32 numbers; rope types that change with the length
of the sequence are not covered.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# (layer, token, router input [d], router logits [N]) -> the logits to route by [N]
Route = Callable[[int, int, Tensor, Tensor], Tensor]

ZERO_DISTANCE = 1e-12  # squared distances up to this part of the squared norm count as zero
GPT_OSS_ALPHA = 1.702  # gain of the sigmoid in GPT-OSS's SwiGLU
GPT_OSS_LIMIT = 7.0  # clamp on its gate (above) and up projection (both sides)


@dataclass
class ReferenceLayer:
    """One layer's memory (§4.1); row t of keys and row t of values belong to the same token."""

    keys: Tensor  # [M, d] router inputs of the frozen model
    values: Tensor  # [M, N] optimised logits r^(S)
    sequence: list[int]  # which sequence each key came from
    gamma: float


@dataclass
class ReferenceStep:
    """What one layer did with one sequence (§4.2)."""

    logits: Tensor  # r [T, N]
    proposal: Tensor  # r_mem [T, N]
    confidence: Tensor  # λ [T]
    mixed: Tensor  # r_final [T, N]


def build_reference(
    model: nn.Module, sequences: list[list[int]], steps: int, learning_rate: float
) -> dict[int, ReferenceLayer]:
    """Collect keys and optimise values, each sequence on its own (§4.1)."""
    model = _float64_copy(model)
    collected = [_optimise(model, sequence, steps, learning_rate) for sequence in sequences]
    origin = [index for index, sequence in enumerate(sequences) for _ in sequence]
    memory = {}
    for layer in range(len(model.model.layers)):
        keys = torch.cat([inputs[layer] for inputs, _ in collected])
        values = torch.cat([optimised[layer] for _, optimised in collected])
        gamma = nearest_neighbour_gamma(keys, origin)
        memory[layer] = ReferenceLayer(keys, values, list(origin), gamma)
    return memory


def nearest_neighbour_gamma(keys: Tensor, sequence: list[int]) -> float:
    """γ = 1 / mean over keys of ‖k − k'‖², k' the nearest key of another sequence, not at zero.

    Keys [M, d] without such a neighbour are left out of the mean; nan if that leaves none.
    """
    keys = keys.double()
    nearest = []
    for i in range(len(keys)):
        zero = ZERO_DISTANCE * float(keys[i].square().sum())
        distances = []
        for j, distance in enumerate(_squared_distances(keys[i], keys)):
            if sequence[j] != sequence[i] and distance > zero:
                distances.append(distance)
        if distances:
            nearest.append(min(distances))
    return len(nearest) / math.fsum(nearest) if nearest else math.nan


def run_reference(
    model: nn.Module, sequence: list[int], memory: dict[int, ReferenceLayer], k: int
) -> tuple[Tensor, dict[int, ReferenceStep]]:
    """Next-token logits [T, V] with every layer's routing mixed with its memory's (§4.2).

    Layers without a memory route as they always do and have no step.
    """
    rows: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in memory}

    def route(layer: int, token: int, router_input: Tensor, logits: Tensor) -> Tensor:
        if layer not in memory:
            return logits
        proposal, confidence = _propose(router_input, memory[layer], k)
        mixed = (1.0 - confidence) * logits + confidence * proposal
        rows[layer].append((logits, proposal, confidence, mixed))
        return mixed

    output = _forward(_float64_copy(model), sequence, route)
    return output, {
        layer: ReferenceStep(*(torch.stack(column) for column in zip(*tokens, strict=True)))
        for layer, tokens in rows.items()
    }


def _propose(router_input: Tensor, memory: ReferenceLayer, k: int) -> tuple[Tensor, Tensor]:
    """r_mem [N] and λ from the k nearest keys; of keys at one distance, the earlier comes first.

    Weights are relative to the nearest key's: the same ratios, and a sum that cannot underflow.
    """
    if not 1 <= k <= len(memory.keys):
        raise ValueError(f"k must be from 1 to the memory's {len(memory.keys)} keys, got {k}.")
    distances = _squared_distances(router_input, memory.keys)
    neighbours = sorted(range(len(distances)), key=lambda j: (distances[j], j))[:k]
    nearest = distances[neighbours[0]]
    similarity, total = 0.0, 0.0
    weighted = torch.zeros_like(memory.values[0])
    for j in neighbours:
        similarity += math.exp(-memory.gamma * distances[j])
        weight = math.exp(-memory.gamma * (distances[j] - nearest))
        total += weight
        weighted = weighted + weight * memory.values[j]
    return weighted / total, torch.tensor(similarity / k, dtype=torch.float64)


def _squared_distances(vector: Tensor, keys: Tensor) -> list[float]:
    return (keys - vector).square().sum(dim=-1).tolist()


def _optimise(
    model: nn.Module, sequence: list[int], steps: int, learning_rate: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Router inputs [T, d] of the frozen model and r^(S) [T, N], one of each per layer (§4.1)."""
    inputs: list[list[Tensor]] = [[] for _ in model.model.layers]
    logits: list[list[Tensor]] = [[] for _ in model.model.layers]

    def record(layer: int, token: int, router_input: Tensor, router_logits: Tensor) -> Tensor:
        inputs[layer].append(router_input)
        logits[layer].append(router_logits)
        return router_logits

    _forward(model, sequence, record)
    current = [torch.stack(tokens) for tokens in logits]
    for _ in range(steps if len(sequence) > 1 else 0):  # a lone token has no target
        current = [routing.detach().requires_grad_() for routing in current]
        gradients = torch.autograd.grad(_loss(model, sequence, current), current)
        for layer, gradient in enumerate(gradients):
            current[layer] = current[layer].detach() - learning_rate * gradient
    return [torch.stack(tokens) for tokens in inputs], current


def _loss(model: nn.Module, sequence: list[int], routing: list[Tensor]) -> Tensor:
    """Σ_t −log p(y_{t+1} | y_≤t) when the layers route by the given logits, [T, N] each."""
    output = _forward(model, sequence, lambda layer, token, x, logits: routing[layer][token])
    loss = torch.zeros((), dtype=torch.float64)
    for token in range(len(sequence) - 1):
        loss = loss - F.log_softmax(output[token], dim=-1)[sequence[token + 1]]
    return loss


def _float64_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(device="cpu", dtype=torch.float64).eval().requires_grad_(False)


def _forward(model: nn.Module, sequence: list[int], route: Route) -> Tensor:
    """Next-token logits [T, V]; ``route`` has the last word on each layer's and token's routing."""
    rotary = model.model.rotary_emb
    angles = [position * rotary.inv_freq for position in range(len(sequence))]
    scale = rotary.attention_scaling
    rotations = [(angle.cos() * scale, angle.sin() * scale) for angle in angles]
    hidden = [model.model.embed_tokens.weight[token] for token in sequence]
    for index, layer in enumerate(model.model.layers):
        normed = [_rms_norm(layer.input_layernorm, state) for state in hidden]
        attended = _attention(layer.self_attn, normed, rotations)
        router = layer.mlp.router if model.config.model_type == "gpt_oss" else layer.mlp.gate
        for token in range(len(sequence)):
            state = hidden[token] + attended[token]
            router_input = _rms_norm(layer.post_attention_layernorm, state)
            logits = F.linear(router_input, router.weight, getattr(router, "bias", None))
            logits = route(index, token, router_input, logits)
            output = torch.zeros_like(state)
            for expert, weight in _gate(model.config, logits):  # h = Σ_i π(r)_i E_i(x)
                output = output + weight * expert_output(layer.mlp.experts, expert, router_input)
            hidden[token] = state + output
    return torch.stack([model.lm_head(_rms_norm(model.model.norm, state)) for state in hidden])


def _rms_norm(norm: nn.Module, vector: Tensor) -> Tensor:
    mean_square = vector.square().mean(dim=-1, keepdim=True)
    return norm.weight * vector / torch.sqrt(mean_square + norm.variance_epsilon)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn dimension i of each head against i + D / 2. Shapes: heads [H, D]; rotation [D / 2]."""
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _attention(
    attn: nn.Module, inputs: list[Tensor], rotations: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """Each token attends to itself and those before it, no further back than the layer's window."""
    family = attn.config.model_type
    clip = getattr(attn.config, "clip_qkv", None) or math.inf
    window = getattr(attn, "sliding_window", None) or len(inputs)
    queries, keys, values = [], [], []
    for vector, rotation in zip(inputs, rotations, strict=True):
        query, key, value = attn.q_proj(vector), attn.k_proj(vector), attn.v_proj(vector)
        if family == "olmoe":  # normed whole
            query, key = _rms_norm(attn.q_norm, query), _rms_norm(attn.k_norm, key)
        heads = [part.clamp(-clip, clip).view(-1, attn.head_dim) for part in (query, key, value)]
        if family == "qwen3_moe":  # normed head by head
            heads[:2] = _rms_norm(attn.q_norm, heads[0]), _rms_norm(attn.k_norm, heads[1])
        queries.append(_rotate(heads[0], rotation))
        keys.append(_rotate(heads[1], rotation))
        values.append(heads[2])

    outputs = []
    for token, query in enumerate(queries):
        seen = range(max(0, token - window + 1), token + 1)
        heads = []
        for head in range(len(query)):
            group = head // attn.num_key_value_groups  # queries share the heads of keys and values
            scores = [query[head] @ keys[s][group] / math.sqrt(attn.head_dim) for s in seen]
            if family == "gpt_oss":
                scores.append(attn.sinks[head])  # takes probability and gives no value
            probabilities = torch.stack(scores).softmax(dim=0)
            heads.append(sum(probabilities[i] * values[s][group] for i, s in enumerate(seen)))
        outputs.append(attn.o_proj(torch.cat(heads)))
    return outputs


def _gate(config: Any, logits: Tensor) -> list[tuple[int, Tensor]]:
    """π(r): the chosen experts with their weights, as the model's family has it (§3)."""
    scores = logits.tolist()
    ranked = sorted(range(len(scores)), key=lambda expert: -scores[expert])
    chosen = ranked[: config.num_experts_per_tok]
    if config.model_type == "gpt_oss":
        weights = logits[chosen].softmax(dim=0)
    else:
        weights = logits.softmax(dim=0)[chosen]
        if config.norm_topk_prob:
            weights = weights / weights.sum()
    return list(zip(chosen, weights, strict=True))


def expert_output(experts: nn.Module, expert: int, vector: Tensor) -> Tensor:
    """E_i(x). GPT-OSS has biases, transposed matrices, and its gate and up rows interleaved."""
    if hasattr(experts, "gate_up_proj_bias"):
        both = vector @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
        gate = both[0::2].clamp(max=GPT_OSS_LIMIT)
        up = both[1::2].clamp(min=-GPT_OSS_LIMIT, max=GPT_OSS_LIMIT)
        inner = (up + 1.0) * gate * torch.sigmoid(GPT_OSS_ALPHA * gate)
        return inner @ experts.down_proj[expert] + experts.down_proj_bias[expert]
    gate, up = (experts.gate_up_proj[expert] @ vector).chunk(2)
    return experts.down_proj[expert] @ (gate * torch.sigmoid(gate) * up)
