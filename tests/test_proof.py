"""The library against a slow float64 reference written from the paper alone."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from helpers.near_ties import choose_without_near_ties
from helpers.slow_reference import ReferenceLayer, build_reference, run_reference
from knn_moe import BuildConfig, RoutingConfig, RoutingMemory, attach, build_memory, find_routers
from knn_moe.equations.mixing import propose_logits
from knn_moe.recall.layer import LayerRecall
from knn_moe.recall.neighbours import Widths
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks

pytestmark = pytest.mark.slow

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=8)),
    "qwen3": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SHAPE, num_experts=8, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True
        )
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, num_local_experts=8, head_dim=8, sliding_window=6)
    ),
}


def sequences(count: int, seed: int, length: int = 12) -> list[list[int]]:
    """Arithmetic progressions modulo a prime: something to learn."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        start, step = torch.randint(1, 83, (2,), generator=draw).tolist()
        rows.append([3 + (start + step * place) % 83 for place in range(length)])
    return rows


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest) -> PreTrainedModel:
    """From random weights, trained until the routers and experts mean something."""
    torch.manual_seed(0)
    model = MODELS[request.param]()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        ids = torch.tensor(sequences(16, seed=step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def texts(rows: list[list[int]]) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


@pytest.fixture(scope="module", params=[1, 3], ids=["S=1", "S=3"])
def pair(
    request: pytest.FixtureRequest, trained: PreTrainedModel, zoo_tokenizer: object
) -> tuple[RoutingMemory, dict[int, ReferenceLayer]]:
    reference = sequences(5, seed=100)
    reference[1] = reference[1][:9]  # unequal lengths: the library pads, the reference does not
    steps = request.param
    config = BuildConfig(steps=steps, learning_rate=0.5)
    memory = build_memory(trained, zoo_tokenizer, texts(reference), config)
    return memory, build_reference(trained, reference, steps, 0.5)


def test_keys_values_and_gamma(
    pair: tuple[RoutingMemory, dict[int, ReferenceLayer]],
) -> None:
    memory, slow = pair
    assert set(memory.layers) == set(slow)
    for index, expected in slow.items():
        layer = memory.layers[index]
        torch.testing.assert_close(layer.keys.double(), expected.keys, **TOLERANCE)
        torch.testing.assert_close(layer.values.double(), expected.values, **TOLERANCE)
        assert layer.gamma == pytest.approx(expected.gamma, rel=1e-5)
    assert memory.provenance.example.tolist() == slow[0].sequence


def test_a_shared_template_leaves_gamma_alone(
    trained: PreTrainedModel, zoo_tokenizer: object
) -> None:
    reference = [[5, 7, 5, 9, *row] for row in sequences(4, seed=200)]
    memory = build_memory(trained, zoo_tokenizer, texts(reference), BuildConfig(steps=0))
    for index, expected in build_reference(trained, reference, 0, 1.0).items():
        assert memory.layers[index].gamma == pytest.approx(expected.gamma, rel=1e-5)


def choose_sequence(model: PreTrainedModel, memory: RoutingMemory, k: int, seed: int) -> list[int]:
    candidates = (torch.tensor([row]) for row in sequences(9, seed))
    ids = choose_without_near_ties(model, memory, candidates, RoutingConfig(k=k))
    return [int(token) for token in ids[0]]


@pytest.mark.parametrize("k", [1, 3])
def test_mixing_and_final_output(
    trained: PreTrainedModel, pair: tuple[RoutingMemory, dict[int, ReferenceLayer]], k: int
) -> None:
    memory, slow = pair
    sequence = choose_sequence(trained, memory, k, seed=7)
    expected, steps = run_reference(trained, sequence, slow, k)
    with attach(trained, memory, RoutingConfig(k=k)) as routing:
        output = trained(torch.tensor([sequence]), use_cache=False).logits[0]
        stats = routing.stats()
    torch.testing.assert_close(output.double(), expected, **TOLERANCE)
    for index, step in steps.items():
        assert stats[index].mean_confidence == pytest.approx(
            float(step.confidence.mean()), rel=1e-5
        )
        assert 0.001 < float(step.confidence.mean()) < 0.999


@pytest.mark.parametrize("k", [1, 3])
def test_every_intermediate(
    trained: PreTrainedModel, pair: tuple[RoutingMemory, dict[int, ReferenceLayer]], k: int
) -> None:
    """λ, r_mem and the mixed logits of each token, layer by layer."""
    memory, slow = pair
    sequence = choose_sequence(trained, memory, k, seed=8)
    _, steps = run_reference(trained, sequence, slow, k)
    seen: dict[int, tuple[torch.Tensor, ...]] = {}
    hooks = []
    for router in find_routers(trained):
        layer = memory.layers[router.layer]
        recall = LayerRecall(
            layer, Widths(layer.gamma, layer.gamma), RoutingConfig(k=k), torch.device("cpu")
        )

        def mix(
            x: torch.Tensor,
            logits: torch.Tensor,
            index: int = router.layer,
            recall: LayerRecall = recall,
        ) -> torch.Tensor:
            mixed, confidence = recall(x, logits)
            distance, rows = recall.index.search(x, recall.k)
            proposal = propose_logits(recall.values[rows], recall.weights(distance))
            seen[index] = logits, proposal, mixed, confidence
            return mixed

        hooks.append(RouterHook(router, mix))
    with install_hooks(hooks), torch.no_grad():
        trained(torch.tensor([sequence]), use_cache=False)
    for index, step in steps.items():
        logits, proposal, mixed, confidence = seen[index]
        torch.testing.assert_close(logits.double(), step.logits, **TOLERANCE)
        torch.testing.assert_close(confidence.double(), step.confidence, **TOLERANCE)
        torch.testing.assert_close(proposal.double(), step.proposal, **TOLERANCE)
        torch.testing.assert_close(mixed.double(), step.mixed, **TOLERANCE)
