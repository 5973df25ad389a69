"""Router bias on the fly: it lowers the loss of its own prompt and touches no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import trained
from helpers.unchanged import left_as_it_was
from helpers.zoo import family
from knn_moe.errors import ConfigError
from knn_moe.evaluation.evaluate import EvalConfig, evaluate, prepare_questions
from knn_moe.methods import Method, TaskContext, ZeroShot, prepare
from knn_moe.methods.router_bias import BiasHook, RouterBias, RouterBiasConfig, add_biases, fit_bias
from knn_moe.routers.find import find_routers
from knn_moe.support.embedded_models import EMBEDDED_MODELS
from knn_moe.tasks import Choice, Number, Task, TaskData, Text
from knn_moe.tasks.answers import by_likelihood
from knn_moe.tasks.likelihood import mean_losses, token_losses
from knn_moe.tasks.sample import Sample

TEXT = """The lighthouse keeper counted ships from the stone tower. In the evening the fog came in
from the river, and two birds slept under the lamp. Nobody in the village believed the story of
the green light, but the old woman had seen it twice. She wrote down the hour, the wind and the
colour of the water, and on the third night she carried her book to the harbour."""
PROMPTS = [TEXT[:160], TEXT[160:240], "Two birds", TEXT[:300]]
CONFIG = RouterBiasConfig(steps=3, learning_rate=1.0)


@pytest.fixture(scope="module", params=EMBEDDED_MODELS)
def each_model(request: pytest.FixtureRequest) -> Any:
    return trained(request.param)


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer: Any) -> list[list[int]]:
    return [tiny_tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


QUIZ = TaskData(
    Task(name="quiz", title="Quiz", kind=Choice(), files="quiz"),
    [
        {"question": f"What did the {who} see?", "choices": ["a ship", "the fog at night", "rain"],
         "answer": place % 3}
        for place, who in enumerate(("keeper", "old woman", "bird"))
    ],
    [],
    "made up",
)  # fmt: skip
LIKELY = EvalConfig(scoring="likelihood", batch_size=4)
WINDOWS = TaskData(
    Task(name="words", title="Words", kind=Text(), files="words"), [{"text": TEXT}], [], "made up"
)
HALVES = EvalConfig(length=40, batch_size=2)


def run(model: Any, tokenizer: Any, data: TaskData, method: Method, folder: Path) -> list[Sample]:
    config = HALVES if data is WINDOWS else LIKELY
    return evaluate(model, tokenizer, data, method, config, folder=folder / method.name).samples


def make_hooks(model: Any, fitted: list[torch.Tensor], row: int, start: int = 0) -> list[BiasHook]:
    routers = find_routers(model)
    return [
        BiasHook(router, part[row : row + 1], start)
        for router, part in zip(routers, fitted, strict=True)
    ]


def test_a_bias_lowers_its_own_prompts_loss(each_model: Any, prompts: list[list[int]]) -> None:
    before = mean_losses(each_model, prompts)
    fitted = fit_bias(each_model, prompts, CONFIG)
    for row, prompt in enumerate(prompts):
        with add_biases(make_hooks(each_model, fitted, row)):
            after = mean_losses(each_model, [prompt])
        assert float(after) < float(before[row]) - 0.01


def test_prompts_of_a_batch_do_not_influence_each_other(
    each_model: Any, prompts: list[list[int]]
) -> None:
    together = fit_bias(each_model, prompts, CONFIG)
    for row, prompt in enumerate(prompts):
        for layer, alone in enumerate(fit_bias(each_model, [prompt], CONFIG)):
            torch.testing.assert_close(together[layer][row], alone[0], rtol=0, atol=1e-5)
            assert float(alone.abs().max()) > 0.01


def test_a_step_follows_the_gradient_of_the_mean_loss(
    tiny_olmoe: Any, prompts: list[list[int]]
) -> None:
    """Compare with finite differences in the last layer, where no expert changes."""
    prompt, config = prompts[2], RouterBiasConfig(steps=1, learning_rate=1.0)
    slope = -fit_bias(tiny_olmoe, [prompt], config)[-1][0]
    last = find_routers(tiny_olmoe)[-1]
    for expert in range(last.num_experts):
        losses = []
        for step in (1e-2, -1e-2):
            rows = torch.zeros(1, last.num_experts)
            rows[0, expert] = step
            with add_biases([BiasHook(last, rows)]):
                losses.append(float(mean_losses(tiny_olmoe, [prompt])))
        assert float(slope[expert]) == pytest.approx((losses[0] - losses[1]) / 2e-2, abs=1e-3)


def test_without_steps_it_is_the_model_alone(
    tiny_olmoe: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    for data in (QUIZ, WINDOWS):
        ours, alone = (
            run(tiny_olmoe, tiny_tokenizer, data, method, tmp_path / data.task.name)
            for method in (RouterBias(RouterBiasConfig(steps=0)), ZeroShot())
        )
        assert ours == alone


def test_a_text_is_fitted_on_its_first_half_and_biased_in_its_second(
    each_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Experts compute each token by itself here, since groups of other sizes round differently."""
    question = prepare_questions(tiny_tokenizer, WINDOWS, HALVES).questions[0]
    window = torch.tensor([question.ids])
    usual = each_model.config._experts_implementation
    each_model.set_experts_implementation("batched_mm")
    try:
        alone = token_losses(each_model, window, 1)
        fitted = fit_bias(each_model, [question.ids[:20]], RouterBiasConfig())
        with add_biases(make_hooks(each_model, fitted, 0, start=20)):
            biased = token_losses(each_model, window, 1)
        context = TaskContext(each_model, tiny_tokenizer, WINDOWS, "text")
        method = prepare("router-bias", context).method
        samples = run(each_model, tiny_tokenizer, WINDOWS, method, tmp_path)
    finally:
        each_model.set_experts_implementation(usual)
    # Token 20 is the first with a bias, so token 21 is the first with another loss.
    assert torch.equal(alone.nll[:, :20], biased.nll[:, :20])
    assert (alone.nll[:, 20:] != biased.nll[:, 20:]).all()
    first = next(sample for sample in samples if sample.id == question.id)
    assert first.nll == pytest.approx(float(biased.nll.mean()), abs=1e-4)


@pytest.mark.slow
def test_questions_are_answered_under_their_own_bias(
    each_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """The bias applies to the prompt and to the options after it."""
    ours, alone = (
        run(each_model, tiny_tokenizer, QUIZ, method, tmp_path)
        for method in (RouterBias(CONFIG), ZeroShot())
    )
    found = {sample.id: sample for sample in ours}
    assert [(s.id, s.batch) for s in ours] == [(s.id, s.batch) for s in alone]
    for question in prepare_questions(tiny_tokenizer, QUIZ, LIKELY).questions:
        with add_biases(make_hooks(each_model, fit_bias(each_model, [question.ids], CONFIG), 0)):
            expected = by_likelihood(each_model)([question], 0)[0]
            context = torch.tensor(question.ids)
            for (option, skipped), said in zip(
                question.choices, expected.likelihoods or (), strict=True
            ):
                whole = torch.cat([context, torch.tensor(option)])[None]
                losses = token_losses(each_model, whole, 1).nll[0, len(context) - 1 + skipped :]
                assert -float(losses.sum()) == pytest.approx(said, abs=1e-3)
        sample = found[question.id]
        assert sample.likelihoods == pytest.approx(expected.likelihoods, abs=1e-3)
        assert sample.nll is None  # of the very tokens it was fitted on
    plain = {sample.id: sample.likelihoods for sample in alone}
    assert all(plain[sample.id] != sample.likelihoods for sample in ours)


@pytest.mark.slow
def test_generated_answers(tiny_olmoe: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"question": f"How many ships? {word}", "answer": "2"} for word in ("One?", "Or two?")]
    task = Task(name="sums", title="Sums", kind=Number(), files="sums")
    data = TaskData(task, rows, [], "made up")
    config = EvalConfig(batch_size=2, max_new_tokens=12)
    method = RouterBias(RouterBiasConfig(steps=5, learning_rate=50.0))
    samples = evaluate(
        tiny_olmoe, tiny_tokenizer, data, method, config, folder=tmp_path / "run"
    ).samples
    for sample, question in zip(
        samples, prepare_questions(tiny_tokenizer, data, config).questions, strict=True
    ):
        ids = torch.tensor([question.ids])
        fitted = fit_bias(tiny_olmoe, [question.ids], method.config)
        outputs = []
        for hooks in (make_hooks(tiny_olmoe, fitted, 0), []):
            with add_biases(hooks):
                written = tiny_olmoe.generate(
                    ids, max_new_tokens=12, do_sample=False, pad_token_id=0
                )[0, ids.shape[1] :]
            outputs.append(tiny_tokenizer.decode(written, skip_special_tokens=True))
        assert sample.output == outputs[0] != outputs[1]


@pytest.mark.parametrize("name", ["deepseek_v3", "jamba", "granitemoe", "gemma4_text"])
def test_other_families(name: str) -> None:
    """Groups of experts, correction biases, layers without experts, norms before the router."""
    other = family(name)
    prompts = torch.randint(3, 128, (2, 12)).tolist()
    before = mean_losses(other, prompts)
    fitted = fit_bias(other, prompts, RouterBiasConfig(steps=3, learning_rate=0.1))
    for row, prompt in enumerate(prompts):
        with add_biases(make_hooks(other, fitted, row)):
            assert float(mean_losses(other, [prompt])) < float(before[row])


def test_a_model_in_bf16(tiny_tokenizer: Any, prompts: list[list[int]]) -> None:
    model = trained("tiny-gpt-oss").to(torch.bfloat16)
    before = mean_losses(model, prompts)
    fitted = fit_bias(model, prompts, CONFIG)
    assert all(part.dtype == torch.float32 for part in fitted)
    with add_biases(make_hooks(model, fitted, 0)):
        assert float(mean_losses(model, prompts[:1])) < float(before[0])


def test_the_model_is_left_as_it_was(tiny_olmoe: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    with left_as_it_was(tiny_olmoe):
        run(tiny_olmoe, tiny_tokenizer, QUIZ, RouterBias(CONFIG), tmp_path)
        with pytest.raises(IndexError):
            fit_bias(tiny_olmoe, [[5, 6, 1 << 20]], CONFIG)  # no such token


def test_a_prompt_of_one_token_has_nothing_to_fit(tiny_olmoe: Any) -> None:
    assert all(not part.any() for part in fit_bias(tiny_olmoe, [[5]], CONFIG))
    fitted = fit_bias(tiny_olmoe, [[5], [6, 7, 8]], CONFIG)
    assert all(not part[0].any() and part[1].any() for part in fitted)


def test_values_outside_their_range() -> None:
    with pytest.raises(ConfigError, match="steps must be at least 0, got -1"):
        RouterBiasConfig(steps=-1)
    with pytest.raises(ConfigError, match="learning_rate must be positive, got 0"):
        RouterBiasConfig(learning_rate=0)
