"""A transformers Trainer in a run, with a real agent that has no network."""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peer.data.feed import order_for_peer
from peer.errors import ExtraMissing, Unusable
from peer.model.recipes import build_optimizer
from peer.run_file.reading import parse
from peer.run_file.sections import MuonInner, RunFile
from peer.trainer.session import Run
from tests.peer.agent.lone_agents import AGENT, QUICK

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
"""It imports its parts at their first use. Its Trainer, which ``peer.hf`` needs, takes seconds,
which every worker would spend that collects tests: so tests import ``peer.hf`` for themselves."""

pytestmark = [
    pytest.mark.usefixtures("agent_threads"),
    # Theirs, about their own age.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

TOML = """
name = "hf"
[model]
recipe = "custom"
[data]
recipe = "custom"
[inner]
optimizer = "custom"
learning_rate = 0.002
[schedule]
warmup_tokens = 1000
decay_tokens = 1000000
[outer]
fragments = 2
steps_per_cycle = 5
overlap_steps = 1
"""

LENGTH = 16
TOKENS = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 32
PACED: dict[str, Any] = {"own": {"pace_s": 0.01}, "max_steps": 5000}


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards, each from its own number."""

    def __init__(self, count: int = 64) -> None:
        self.seen: list[int] = []
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.seen.append(index)
        tokens = torch.arange(index, index + LENGTH) % 32
        return {"input_ids": tokens, "labels": tokens}


def llama(dtype: torch.dtype = torch.float32, *, vocabulary: int = 32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def until(happened: Callable[[], bool]) -> Any:
    """Continues a training until a condition holds. It is paced, and has a last step."""

    class Until(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop |= happened()

    return Until()


class Training:
    """A Trainer with a callback, on a tiny model."""

    def __init__(
        self,
        directory: Path,
        model: Any,
        own: dict[str, Any],
        *,
        toml: str = TOML,
        **arguments: Any,
    ) -> None:
        from peer.hf import ShoalCallback

        self.events: list[Any] = []
        self.shoal = ShoalCallback(
            parse(toml),
            directory=directory / "peer",
            agent_command=AGENT,
            line=QUICK,
            on_event=self.events.append,
            **own,
        )
        settings: dict[str, Any] = {
            "max_steps": 20,
            "per_device_train_batch_size": 4,
            "logging_steps": 5,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "learning_rate": 1.0,  # of which nothing must be seen
            "warmup_steps": 3,
        }
        self.data = Words()
        self.trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(directory / "out"), **(settings | arguments)
            ),
            train_dataset=self.data,
            eval_dataset=Words(8),
            callbacks=[self.shoal],
        )

    @property
    def run(self) -> Run:
        assert isinstance(self.shoal.run, Run)
        return self.shoal.run

    def train(self, **how: Any) -> None:
        with self.shoal:
            self.trainer.train(**how)

    def train_until(self, happened: Callable[[], bool]) -> None:
        self.trainer.add_callback(until(happened))
        self.train()
        assert happened(), "not within all those steps"

    def adopted(self) -> int:
        """The newest adopted version."""
        return max((e["version"] for e in self.events if e["event"] == "adopted"), default=0)

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]


Start = Callable[..., Training]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads would wait for each other on a machine that runs other tests as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def make(model: Any = None, own: dict[str, Any] | None = None, **arguments: Any) -> Training:
        return Training(tmp_path, model if model is not None else llama(), own or {}, **arguments)

    return make


def test_a_trainer_exchanges_and_its_checkpoint_is_read_by_from_pretrained(
    start: Start, tmp_path: Path
) -> None:
    training = start(**PACED, save_strategy="steps", save_steps=1, save_total_limit=1)
    training.train_until(lambda: training.adopted() >= 1)
    steps = training.trainer.state.global_step
    assert training.run.status.tokens == steps * 4 * LENGTH
    assert {"phase", "adopted", "over"} <= {event["event"] for event in training.events}
    saved = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out" / f"checkpoint-{steps}"
    )
    assert saved.num_parameters() == training.trainer.model.num_parameters()


def test_the_saved_model_is_the_trained_one(start: Start, tmp_path: Path) -> None:
    training = start(max_steps=2)
    training.train()
    training.trainer.save_model(str(tmp_path / "saved"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, parameter in training.trainer.model.named_parameters():
        assert torch.equal(saved.get_parameter(name), parameter), name


def test_the_learning_rate_is_the_runs_in_the_optimizer_and_in_the_logs(start: Start) -> None:
    used: list[float] = []
    training = start(**PACED, logging_steps=1)

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        used.append(optimizer.param_groups[0]["lr"])

    training.trainer.create_optimizer()
    training.trainer.optimizer.register_step_pre_hook(note)
    training.train_until(lambda: used[-1] > used[0])  # the warm-up, by the run's global tokens
    assert 0 < max(used) <= 0.002
    assert training.logged("learning_rate") == used
    assert training.logged("global_tokens")


def test_a_trainer_steps_with_muon_at_the_runs_rate(start: Start) -> None:
    training = start(**PACED, logging_steps=1)
    trainer = training.trainer
    run = RunFile(inner=MuonInner())
    trainer.optimizer = build_optimizer(run, trainer.model)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    training.train_until(lambda: training.adopted() >= 1)
    assert any(
        not torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before, strict=True)
    )
    assert max(training.logged("learning_rate")) <= 0.002
    assert any("momentum_buffer" in state for state in trainer.optimizer.state.values())


def test_the_trainers_own_schedule_stays_where_it_is_asked_for(start: Start) -> None:
    training = start(own={"schedule": False}, max_steps=4, logging_steps=1, warmup_steps=2)
    training.train()
    assert training.logged("learning_rate") == pytest.approx([0.0, 0.5, 1.0, 0.5])


def test_a_step_of_several_batches_counts_all_their_tokens(start: Start) -> None:
    training = start(max_steps=3, gradient_accumulation_steps=4)
    training.train()
    stats = training.run.status
    assert (stats.steps, stats.tokens) == (3, 3 * 4 * 4 * LENGTH)


@pytest.mark.slow
def test_a_compiled_models_tokens_are_counted_from_where_it_goes_on(start: Start) -> None:
    eager: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
    start(max_steps=2, save_strategy="steps", save_steps=2, **eager).train()
    again = start(max_steps=3, **eager)
    again.train(resume_from_checkpoint=f"{again.trainer.args.output_dir}/checkpoint-2")
    assert again.run.status.tokens == 4 * LENGTH


class Padded(Words):
    """Sequences of 3 to 16 tokens, padded to 16."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)["input_ids"]
        mask = (torch.arange(LENGTH) < 3 + index % 14).long()
        return {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "labels": torch.where(mask > 0, tokens, -100),
        }


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "compiled"],
)
def test_padding_counts_no_tokens(start: Start, how: dict[str, Any]) -> None:
    training = start(max_steps=3, gradient_accumulation_steps=2, **how)
    padded = Padded()
    training.trainer.train_dataset = padded
    training.train()
    # The loader of the Trainer may have read a batch more than was trained on.
    trained = padded.seen[: 3 * 2 * 4]
    assert training.run.status.tokens == sum(3 + index % 14 for index in trained)


def test_evaluation_counts_no_tokens(start: Start) -> None:
    training = start(max_steps=2, eval_strategy="steps", eval_steps=1)
    training.train()
    assert training.run.status.tokens == 2 * 4 * LENGTH


def test_the_held_out_loss_is_measured_when_it_is_this_peers_turn(start: Start) -> None:
    """By a function of the program: tests/peer/test_lightning.py."""
    held_out = [{"input_ids": TOKENS, "labels": TOKENS}]
    training = start(own={"pace_s": 0.01, "held_out": held_out}, max_steps=5000)

    def losses() -> list[float]:
        return [event["loss"] for event in training.events if event["event"] == "measured"]

    training.train_until(lambda: bool(losses()))
    assert 0 < losses()[0] < 2 * math.log(32)
    assert training.trainer.model.training
    stats = training.run.status
    assert stats.tokens == stats.steps * 4 * LENGTH  # those that were measured on count nothing


def test_training_stops_with_the_run_and_the_last_checkpoint_has_its_final_parameters(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "2")
    training = start(**PACED, save_strategy="steps", save_steps=1_000_000)
    training.train()
    assert any(e["event"] == "over" and e["finished"] for e in training.events)
    assert 10 <= training.trainer.state.global_step < 5000
    final = load_file(training.shoal.run.directory / "model.safetensors")
    (checkpoint,) = Path(training.trainer.args.output_dir).glob("checkpoint-*")
    saved = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert final.keys() == dict(saved.named_parameters()).keys()
    for name, value in final.items():
        assert torch.equal(saved.get_parameter(name), value), name
        assert torch.equal(training.trainer.model.get_parameter(name), value), name


def test_bfloat16_is_exchanged_like_any_other(start: Start) -> None:
    training = start(llama(torch.bfloat16), **PACED)
    training.train_until(lambda: training.adopted() >= 1)
    parameters = training.trainer.model.parameters()
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in parameters)


def test_of_an_adapted_model_only_the_adapter_is_exchanged(start: Start, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")
    base = llama()
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    before = {name: p.clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    training = start(adapted, **PACED)
    training.train_until(lambda: training.adopted() >= 1)
    exchanged = training.run._parts.agent._begin.tensors
    assert all("lora" in tensor.name for tensor in exchanged)
    values = sum(math.prod(tensor.shape) for tensor in exchanged)
    assert values == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert values < 0.1 * base.num_parameters()
    for name, parameter in adapted.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, before[name]), name
    # Without it old versions of peft ask the hub for a model that has no name, and warn.
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, adapted.get_parameter(name)), name


def test_a_returning_trainer_continues_with_its_optimizer_and_place_in_the_data(
    start: Start,
) -> None:
    first = start(max_steps=8, save_strategy="steps", save_steps=8)
    first.train()
    again = start(max_steps=16)
    again.train(resume_from_checkpoint=f"{again.trainer.args.output_dir}/checkpoint-8")
    assert {int(s["step"]) for s in again.trainer.optimizer.state.values()} == {16}
    assert again.shoal.run.peer_id == first.shoal.run.peer_id
    seen = first.data.seen[: 8 * 4] + again.data.seen[-8 * 4 :]
    assert sorted(seen) == list(range(64))  # one epoch, each once


def test_peers_walk_the_same_data_in_orders_of_their_own(start: Start) -> None:
    def order(peer_id: str) -> list[int]:
        loader = start().trainer.get_train_dataloader()
        assert order_for_peer(loader, run_id="r", peer_id=peer_id, seed=42)
        return [int(first) for batch in loader for first in batch["input_ids"][:, 0]]

    assert sorted(order("anna")) == sorted(order("boris"))
    assert order("anna") == order("anna")
    assert order("anna") != order("boris")


def test_a_data_order_that_is_equal_at_every_peer_is_reported(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    training = start(max_steps=1, train_sampling_strategy="sequential")
    training.train()
    assert "order_not_ours" in caplog.text


def test_an_error_in_training_ends_the_exchange(start: Start) -> None:
    training = start()

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    training.trainer.training_step = breaks
    with pytest.raises(ZeroDivisionError):
        training.train()
    assert training.run._parts.agent.join(0.0)


def test_unsupported_settings_are_refused_before_joining(start: Start) -> None:

    training = start()
    training.trainer.args._n_gpu = 2
    with pytest.raises(Unusable, match="torchrun"):
        training.train()


def test_without_transformers_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **named: Any) -> Any:
        if name.split(".")[0] == "transformers":
            raise ImportError(name="transformers")
        return real(name, *args, **named)

    monkeypatch.delitem(sys.modules, "peer.hf", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExtraMissing, match=r"pip install 'shoal\[hf\]'"):
        import peer.hf  # noqa: F401
