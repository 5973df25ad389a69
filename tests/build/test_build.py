"""Building: what is kept, what is left as it was, and what a kill costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import datasets
import pandas
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import moe

from helpers.families import FAMILIES
from helpers.zoo import family, full_batch, make_texts
from knn_moe import (
    BuildConfig,
    Example,
    RoutingConfig,
    RoutingMemory,
    attach,
    build_memory,
    find_routers,
)
from knn_moe.bench.models import number_tokenizer
from knn_moe.build.optimise import optimise_routing
from knn_moe.build.workspace import partial_folder
from knn_moe.config import PRESETS
from knn_moe.errors import (
    BuildError,
    DiskFullError,
    ModelTooLargeError,
    ReferenceSetError,
    UnsupportedModelError,
)
from knn_moe.routers.fingerprint import layer_digests
from knn_moe.routers.grouped_experts import NAME, grouped_experts, use_grouped_experts
from knn_moe.support.progress import Progress

TEXTS = make_texts(14)
OWN_EXPERTS = {"llama4_text", "dbrx", "jetmoe", "longcat_flash"}  # not to be set


def test_the_papers_preset(zoo_olmoe: PreTrainedModel, zoo_tokenizer: object) -> None:
    config = BuildConfig(preset="paper")
    assert (config.steps, config.learning_rate, config.gradient) == (1, 2e-2, "sparse")
    memory = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, config)
    assert memory.routing == RoutingConfig(k=1, similarity="rbf")
    assert build_memory(zoo_olmoe, zoo_tokenizer, TEXTS).build == memory.build
    assert set(PRESETS) == {"paper"}


def test_a_memory_keeps_a_digest_of_each_layer(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, tmp_path: Path
) -> None:
    digests = layer_digests(find_routers(zoo_olmoe))
    assert zoo_memory.manifest.router_digests == digests
    zoo_memory.save_pretrained(tmp_path / "memory")
    opened = RoutingMemory.from_pretrained(tmp_path / "memory")
    assert opened.manifest.router_digests == digests


def test_tables_are_built_as_lists_are(zoo_olmoe: PreTrainedModel, zoo_tokenizer: object) -> None:
    expected = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS).provenance
    columns = {"text": TEXTS, "id": list(range(len(TEXTS)))}
    for table in (pandas.DataFrame(columns), datasets.Dataset.from_dict(columns)):
        assert build_memory(zoo_olmoe, zoo_tokenizer, table).provenance.stream.equal(
            expected.stream
        )
    unnamed = pandas.DataFrame({"body": TEXTS})
    for wrong, message in ((unnamed, "has 'body'"), (Example("", "3"), "got Example")):
        with pytest.raises(ReferenceSetError, match=message):
            build_memory(zoo_olmoe, zoo_tokenizer, wrong)  # type: ignore[arg-type]


def test_batches_change_nothing_but_rounding(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object
) -> None:
    one_by_one = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, BuildConfig(batch_tokens=1))
    together = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, BuildConfig(batch_tokens=10_000))
    for index, layer in one_by_one.layers.items():
        torch.testing.assert_close(layer.keys, together.layers[index].keys)
        torch.testing.assert_close(layer.values, together.layers[index].values)
        assert layer.gamma == pytest.approx(together.layers[index].gamma, rel=1e-5)


def test_more_steps_go_further(zoo_olmoe: PreTrainedModel, zoo_tokenizer: object) -> None:
    still, once, often = (
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, BuildConfig(steps=steps)).layers[0].values
        for steps in (0, 1, 4)
    )
    assert 0 < (once - still).norm() < (often - still).norm()


def test_the_last_token_has_nothing_to_learn(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object
) -> None:
    own = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, BuildConfig(steps=0))
    learned = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, BuildConfig(learning_rate=1.0))
    last = torch.cat([own.provenance.example.diff(), torch.ones(1)]).bool()
    moved = (learned.layers[1].values - own.layers[1].values).abs().sum(dim=-1)
    assert (moved[last] == 0).all()
    assert (moved[~last] > 0).all()


def test_completion_tokens_only(zoo_olmoe: PreTrainedModel, zoo_tokenizer: object) -> None:
    examples = [Example("3 4 5 ", "6 7"), Example("8 9 ", "10 11 12")]
    memory = build_memory(zoo_olmoe, zoo_tokenizer, examples, BuildConfig(tokens="completion"))
    # The tokens that predict the completion: the last of the prompt, and all but the last after.
    assert memory.provenance.token.tolist() == [5, 6, 9, 10, 11]
    assert memory.provenance.position.tolist() == [2, 3, 1, 2, 3]
    everything = build_memory(zoo_olmoe, zoo_tokenizer, examples)
    assert everything.provenance.token.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    torch.testing.assert_close(memory.layers[0].keys, everything.layers[0].keys[[2, 3, 6, 7, 8]])


def test_a_batch_of_prompts_alone_fills_no_rows(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object
) -> None:
    examples = [Example("3 4 5 6 7 8 9 10 ", "11 12"), Example("3 4 ", "5")]
    config = BuildConfig(tokens="completion", max_length=4, batch_tokens=4)
    memory = build_memory(zoo_olmoe, zoo_tokenizer, examples, config)
    # Windows 3-6, 7-10, 11-12: a completion's first token needs its prompt in the same window.
    assert memory.provenance.token.tolist() == [11, 4]


def test_long_texts_are_cut_into_windows(zoo_olmoe: PreTrainedModel, zoo_tokenizer: object) -> None:
    text = make_texts(1, seed=2, shortest=25, longest=25)[0]
    memory = build_memory(zoo_olmoe, zoo_tokenizer, [text, "3 4"], BuildConfig(max_length=10))
    assert memory.provenance.example.tolist() == [0] * 25 + [1] * 2
    assert memory.provenance.position.tolist() == [*range(25), 0, 1]
    parts = [" ".join(text.split()[start : start + 10]) for start in (0, 10, 20)]
    apart = build_memory(zoo_olmoe, zoo_tokenizer, [*parts, "3 4"])
    torch.testing.assert_close(memory.layers[0].keys, apart.layers[0].keys)


def test_the_model_is_left_as_it_was(zoo_olmoe: PreTrainedModel, zoo_tokenizer: object) -> None:
    zoo_olmoe.train()
    zoo_olmoe.model.norm.requires_grad_(False)
    zoo_olmoe.set_experts_implementation("eager")
    trainable = {name: p.requires_grad for name, p in zoo_olmoe.named_parameters()}
    state = {name: value.clone() for name, value in zoo_olmoe.state_dict().items()}
    build_memory(zoo_olmoe, zoo_tokenizer, TEXTS)
    assert zoo_olmoe.training
    assert zoo_olmoe.config._experts_implementation == "eager"
    assert {name: p.requires_grad for name, p in zoo_olmoe.named_parameters()} == trainable
    assert all(p.grad is None for p in zoo_olmoe.parameters())
    assert all(torch.equal(zoo_olmoe.state_dict()[name], value) for name, value in state.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in zoo_olmoe.modules())


def test_it_builds_whatever_mode_it_is_called_in(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object
) -> None:
    expected = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS).layers[0].values
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            built = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS)
        assert torch.equal(built.layers[0].values, expected)


def test_building_on_an_attached_model_is_refused(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, zoo_memory: RoutingMemory
) -> None:
    with attach(zoo_olmoe, zoo_memory), pytest.raises(BuildError, match="Detach it"):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS)


def test_logits_that_are_not_finite_are_told(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object
) -> None:
    with pytest.raises(BuildError, match=r"not finite\. Lower the learning rate"):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, BuildConfig(learning_rate=3e38, steps=2))


def test_a_tokenizer_of_another_model_is_told(zoo_olmoe: PreTrainedModel) -> None:
    with pytest.raises(ReferenceSetError, match="token 500, and the model knows 128"):
        build_memory(zoo_olmoe, number_tokenizer(1000), ["3 500"])


@pytest.mark.slow
def test_a_compiled_model_is_built_on_all_the_same(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, compiled_state: None
) -> None:
    expected = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS)
    compiled = torch.compile(zoo_olmoe, backend="eager")
    with torch.no_grad():
        compiled(torch.tensor([[3, 4, 5]]), use_cache=False)
    built = build_memory(compiled, zoo_tokenizer, TEXTS)
    assert built.base_model == expected.base_model
    torch.testing.assert_close(built.layers[1].values, expected.layers[1].values)


def test_progress_reaches_every_token(zoo_olmoe: PreTrainedModel, zoo_tokenizer: object) -> None:
    seen: list[Progress] = []
    build_memory(
        zoo_olmoe, zoo_tokenizer, TEXTS, BuildConfig(batch_tokens=50), on_progress=seen.append
    )
    total = sum(len(text.split()) for text in TEXTS)
    *optimised, started, sealed = seen
    assert [started, sealed] == [Progress("sealing", 0, total), Progress("sealing", total, total)]
    assert {step.stage for step in optimised} == {"optimising"}
    tokens = [step.done for step in optimised]
    assert tokens == sorted(tokens)
    assert tokens[-1] == total


def test_a_build_that_fails_leaves_nothing(
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(zoo_olmoe.model.layers[0], "forward", exhausted)
    with pytest.raises(ModelTooLargeError, match="Lower batch_tokens"):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, folder=tmp_path / "memory")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small(
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("knn_moe.support.folders.shutil.disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match=r"needs 0\.\d+ MB, and there are 0\.000 MB free"):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, folder=tmp_path / "memory")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_routers(zoo_tokenizer: object) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no router"):
        build_memory(LlamaForCausalLM(config), zoo_tokenizer, TEXTS)


BUILD_SCRIPT = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import torch
    from helpers.zoo import family, make_texts
    torch.set_num_threads(1)  # as conftest has it: what two add differs in its last digits
    from knn_moe import BuildConfig, build_memory
    from knn_moe.bench.models import number_tokenizer

    def die(progress):
        if progress.done >= 200:
            os.kill(os.getpid(), signal.SIGKILL)

    build_memory(
        family("olmoe"), number_tokenizer(128), make_texts(30), BuildConfig(batch_tokens=40),
        folder={folder!r}, on_progress=die,
    )
    """
)


@pytest.mark.slow
def test_after_a_kill_it_goes_on_and_gives_the_same_memory(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path
) -> None:
    texts, config = make_texts(30), BuildConfig(batch_tokens=40)
    folder = tmp_path / "killed"
    script = BUILD_SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not folder.exists()
    done = len((partial_folder(folder) / "journal.txt").read_text().splitlines())
    seen: list[Progress] = []
    resumed = build_memory(
        zoo_olmoe, zoo_tokenizer, texts, config, folder=folder, on_progress=seen.append
    )
    whole = build_memory(zoo_olmoe, zoo_tokenizer, texts, config, folder=tmp_path / "whole")
    assert done >= 1
    # Killed as it reported its 200th token: of those, at most one batch was not on disk yet.
    *_, last = (step for step in seen if step.stage == "resuming")
    assert 200 - 40 <= last.done < last.total
    for name in ("layer-000.safetensors", "layer-001.safetensors", "tokens.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [layer.gamma for layer in resumed.layers.values()] == [
        layer.gamma for layer in whole.layers.values()
    ]
    assert not partial_folder(folder).exists()


def test_a_failure_keeps_all_that_was_computed(
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from knn_moe.build import build

    calls = []

    def fail_at_fifth(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 5:
            raise ZeroDivisionError
        return optimise_routing(*arguments)

    monkeypatch.setattr(build, "optimise_routing", fail_at_fifth)
    with pytest.raises(ZeroDivisionError):
        build_memory(
            zoo_olmoe, zoo_tokenizer, TEXTS, BuildConfig(batch_tokens=40), folder=tmp_path / "m"
        )
    lines = (partial_folder(tmp_path / "m") / "journal.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3"]


def stop(progress: Progress) -> None:
    if progress.done > 100:
        raise KeyboardInterrupt


def test_half_a_line_in_the_journal_does_not_count(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path
) -> None:
    folder, config = tmp_path / "memory", BuildConfig(batch_tokens=40)
    with pytest.raises(KeyboardInterrupt):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, config, folder=folder, on_progress=stop)
    with (partial_folder(folder) / "journal.txt").open("a") as journal:
        journal.write("1")  # of "12", say
    with pytest.raises(KeyboardInterrupt):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, config, folder=folder, on_progress=stop)
    resumed = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, config, folder=folder)
    whole = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, config)
    assert torch.equal(resumed.layers[0].keys, whole.layers[0].keys)


def test_going_on_with_something_else_is_refused(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path
) -> None:
    folder, config = tmp_path / "memory", BuildConfig(batch_tokens=40)
    with pytest.raises(KeyboardInterrupt):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, config, folder=folder, on_progress=stop)
    with pytest.raises(BuildError, match="another model, reference set or config"):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS[1:], config, folder=folder)
    with pytest.raises(BuildError, match="another model, reference set or config"):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, BuildConfig(steps=2), folder=folder)
    assert len(build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, config, folder=folder)) > 100


PEAK_SCRIPT = textwrap.dedent(
    """
    import threading
    from pathlib import Path
    from transformers import OlmoeConfig, OlmoeForCausalLM
    from knn_moe import BuildConfig, build_memory
    from knn_moe.bench.models import number_tokenizer, random_texts

    config = OlmoeConfig(
        vocab_size=128, hidden_size=512, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    model, tokenizer = OlmoeForCausalLM(config).eval(), number_tokenizer(128)

    def peak(sequences):
        most, ended = [0], threading.Event()

        def watch():  # anonymous memory: mapped files are the kernel's to keep or drop
            while not ended.wait(0.002):
                status = Path("/proc/self/status").read_text().splitlines()
                line = next(line for line in status if line.startswith("RssAnon:"))
                most[0] = max(most[0], int(line.split()[1]) * 1024)

        watcher = threading.Thread(target=watch)
        watcher.start()
        examples = (text for text in random_texts(sequences, 32, 128))
        build_memory(model, tokenizer, examples, BuildConfig(batch_tokens=1024))
        ended.set()
        watcher.join()
        return most[0]

    print(peak(40), peak(100), peak(600))
    """
)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_reference_set() -> None:
    # Freed blocks go back to the system at once, so that what is seen is what is held.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    command = [sys.executable, "-c", PEAK_SCRIPT]
    output = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    _, few, many = map(int, output.split())
    bytes_of_keys = 2 * 512 * 4 * 32 * (600 - 100)
    assert many - few < bytes_of_keys / 5


@pytest.mark.parametrize(
    "name",
    [entry.name for entry in FAMILIES if entry.name not in OWN_EXPERTS],
)
def test_building_experts_equal_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: object) -> torch.Tensor:
        calls.append(args)
        return grouped_experts(*args)

    histogram = torch.histc  # on a CPU it counts floats only; the experts hand it integers
    monkeypatch.setattr(torch, "histc", lambda x, **kwargs: histogram(x.float(), **kwargs))
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, NAME, counted)
    model = family(name)
    ids = torch.randint(3, 128, (2, 9))
    results = []
    for implementation in ("grouped_mm", NAME):
        model.set_experts_implementation(implementation)
        logits = model(ids, use_cache=False).logits
        table = model.get_input_embeddings().weight
        (slope,) = torch.autograd.grad(logits.square().sum(), table)
        dense = optimise_routing(
            model, find_routers(model), full_batch(ids), BuildConfig(gradient="dense")
        )
        results.append((logits, slope, *(layer.logits for layer in dense.values())))
    assert len(calls) > 0
    for own, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, own)


def test_experts_are_put_back_after_an_error(zoo_olmoe: PreTrainedModel) -> None:
    zoo_olmoe.set_experts_implementation("eager")
    with pytest.raises(ZeroDivisionError), use_grouped_experts(zoo_olmoe):
        _ = 1 / (zoo_olmoe.config._experts_implementation != "grouped_mm")
    assert zoo_olmoe.config._experts_implementation == "eager"


def test_experts_in_a_form_of_their_own_are_kept(
    monkeypatch: pytest.MonkeyPatch, zoo_olmoe: PreTrainedModel
) -> None:
    """As GPTQModel's are, whose quantised weights transformers' own code could not read."""
    calls = []

    def loop(experts: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        calls.append(type(experts).__name__)
        return moe.batched_mm_experts_forward(experts, *inputs)

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "linear_loop", loop)
    zoo_olmoe.set_experts_implementation("linear_loop")
    with use_grouped_experts(zoo_olmoe):
        zoo_olmoe(torch.randint(3, 128, (1, 4)))
    assert len(calls) == len(find_routers(zoo_olmoe))


def test_no_leftovers(tmp_path: Path, zoo_olmoe: PreTrainedModel, zoo_tokenizer: object) -> None:
    build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, folder=tmp_path / "a" / "memory")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["memory"]
