"""Modules of rare kinds learn, or are refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import prune

from onepass import InputError, OnePass
from tests.live.odd_values import Marked
from tests.live.refused_calls import CLASSES, batch, check_sentence, refused
from tests.toys import FEATURES, small_net

# ---- modules


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def distributed() -> nn.Module:
    return DistributedDataParallel(small_net(CLASSES))


def distributed_part() -> nn.Module:
    return nn.Sequential(distributed(), nn.Linear(CLASSES, CLASSES))


def sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = small_net(CLASSES)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return module


def of_distributed_tensors() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    return distribute_module(small_net(CLASSES), init_device_mesh("cpu", (1,)))


def replicated() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(small_net(CLASSES))


DDP = "is a DistributedDataParallel"
SPREAD: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "replicated": (replicated, ("the module is a", "drift apart")),
    "ddp": (distributed, (f"the module {DDP}", "drift apart", "wrap the module inside it")),
    "a part of it": (distributed_part, (f"layer '0' {DDP}",)),
    "fsdp": (sharded, ("FSDPModule", "drift apart")),
    "dtensor": (of_distributed_tensors, ("parameter '0.weight' is a DTensor", "one process")),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("make", "words"), SPREAD.values(), ids=SPREAD)
def test_a_module_that_is_spread_over_processes_is_refused(
    make: Callable[[], nn.Module], words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        OnePass(make(), learning_rate=0.1)
    check_sentence(caught.value, words)


class Lookup(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(x.abs().long().clamp(max=6))
        out: Tensor = self.head(found if found.dim() == 2 else found.mean(1))
        return out


def with_parameter(value: Tensor) -> nn.Module:
    module = small_net(CLASSES)
    module[0].weight = nn.Parameter(value)  # type: ignore[index, assignment]
    return module


def with_buffer(value: Tensor) -> nn.Module:
    module = small_net(CLASSES)
    module.register_buffer("b", value)
    return module


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return small_net(CLASSES)


def several(*shapes: int) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(n, FEATURES) for n in shapes])


def scripted() -> nn.Module:
    return torch.jit.script(small_net(CLASSES))  # type: ignore[no-any-return]


def quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


# How they are made, and the words of their refusals, divided by semicolons.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "scripted": (scripted, "the module is a TorchScript module; nn.Module it was made from"),
    "traced": (
        lambda: torch.jit.trace(small_net(CLASSES), torch.randn(2, FEATURES)),
        "TorchScript",
    ),
    "scripted in part": (lambda: nn.Sequential(scripted()), "layer '0' is a TorchScript"),
    "data parallel": (
        lambda: DataParallel(small_net(CLASSES)),
        "DataParallel; wrap the module inside it",
    ),
    "sparse embedding": (
        lambda: Lookup(nn.Embedding(7, 5, sparse=True)),
        "layer 'table'; sparse=False",
    ),
    "weights that change when asked": (
        lambda: Lookup(nn.Embedding(7, 5, max_norm=0.5)),
        "layer 'table' changes its weights; without max_norm",
    ),
    "a bag that changes when asked": (
        lambda: Lookup(nn.EmbeddingBag(7, 5, max_norm=0.5)),
        "layer 'table' changes its weights",
    ),
    "sparse bag": (
        lambda: Lookup(nn.EmbeddingBag(7, 5, sparse=True)),
        "layer 'table'; sparse=False",
    ),
    "lazy buffer": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(affine=False)),
        "buffer '1.running_mean'; no shape yet",
    ),
    "in inference mode": (made_in_inference_mode, "inference mode; outside"),
    "sparse parameter": (
        lambda: with_parameter(torch.randn(5, FEATURES).to_sparse()),
        "'0.weight' is sparse or nested",
    ),
    "nested parameter": (lambda: with_parameter(several(2, 3)), "'0.weight' is sparse or nested"),
    "eight bits": (
        lambda: small_net(CLASSES).to(torch.float8_e4m3fn),
        "float8_e4m3fn; 16 to 64 bits",
    ),
    "sparse buffer": (lambda: with_buffer(torch.eye(3).to_sparse()), "buffer 'b'; attribute"),
    "nested buffer": (lambda: with_buffer(several(2, 3)), "buffer 'b'"),
    "quantized buffer": (lambda: with_buffer(quantised(torch.randn(3))), "buffer 'b'"),
    "meta buffer": (
        lambda: with_buffer(torch.empty(3, device="meta")),
        "buffer 'b' is on the meta device",
    ),
    "expanded buffer": (
        lambda: with_buffer(torch.ones(1).expand(3)),
        "buffer 'b' is expanded; clone()",
    ),
    "quantized": (
        lambda: torch.ao.quantization.quantize_dynamic(small_net(CLASSES), {nn.Linear}),
        "no trainable parameters",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_a_module_of_a_kind_that_cannot_learn_is_refused_when_it_is_wrapped(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(InputError) as caught:
        OnePass(make(), learning_rate=0.1)
    check_sentence(caught.value, tuple(words.split("; ")))


def test_sparse_gradients_that_no_layer_announces_are_refused_in_our_words() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Parameter(torch.randn(7, 5)), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            words = x.abs().long().clamp(max=6)
            found = functional.embedding(words, self.table, sparse=True)
            out: Tensor = self.head(found.mean(1))
            return out

    learner = OnePass(Own(), learning_rate=0.1)
    with refused(learner, "a gradient is sparse", "sparse=False"):
        learner.observe(*batch())


def test_a_frozen_sparse_embedding_learns() -> None:
    module = Lookup(nn.Embedding(7, 5, sparse=True).requires_grad_(False))
    OnePass(module, learning_rate=0.1).observe(*batch())


def observing_ranges() -> nn.Module:
    """Its buffers change their shape in the first pass."""
    module = small_net(CLASSES)
    module.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    return torch.ao.quantization.prepare_qat(module.train())


def pruned() -> nn.Module:
    module = small_net(CLASSES)
    prune.l1_unstructured(module[0], "weight", 0.5)  # type: ignore[index, no-untyped-call]
    return module


LEARNS: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: torch.compile(small_net(CLASSES), backend="eager"),  # type: ignore[return-value]
    "traced by fx": lambda: torch.fx.symbolic_trace(small_net(CLASSES)),
    "with fake quantization": observing_ranges,
    "pruned": pruned,
    "parameter of a class of its own": lambda: with_parameter(
        torch.randn(5, FEATURES).as_subclass(Marked)
    ),
    "expanded parameter": lambda: with_parameter(torch.randn(1, FEATURES).expand(5, FEATURES)),
    "transposed parameter": lambda: with_parameter(torch.randn(FEATURES, 5).t()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LEARNS)
def test_a_module_of_a_rare_kind_learns_as_in_a_plain_loop(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = LEARNS[case]()
    torch.manual_seed(0)
    plain = LEARNS[case]()
    if case == "expanded parameter":  # a plain loop could not write into it
        plain[0].weight = nn.Parameter(plain[0].weight.detach().clone())  # type: ignore[index, union-attr, operator]
    learner = OnePass(module, "van", learning_rate=0.1)
    for seed in range(4):
        x, y = batch(seed=seed)
        learner.observe(x, y)
        parameters = list(plain.parameters())
        gradients = torch.autograd.grad(functional.cross_entropy(plain(x), y), parameters)
        for p, g in zip(parameters, gradients, strict=True):
            p.data.sub_(0.1 * g)
    learner.predict(batch()[0])
    learner.save(tmp_path / "saved")
    for both in zip(module.parameters(), plain.parameters(), strict=True):
        mine, other = (p.detach().as_subclass(Tensor) for p in both)
        torch.testing.assert_close(mine, other)


def test_a_compiled_module_that_was_used_before_is_loaded_into_a_compiled_one(
    tmp_path: Path,
) -> None:
    module, x = torch.compile(small_net(CLASSES), backend="eager"), batch()[0]
    module(x)
    learner = OnePass(module, learning_rate=0.1)  # type: ignore[arg-type]
    learner.observe(*batch())
    learner.save(tmp_path / "saved")
    again = OnePass.load(tmp_path / "saved", torch.compile(small_net(CLASSES), backend="eager"))  # type: ignore[arg-type]
    assert torch.equal(again.scores(x), learner.scores(x))
    assert torch.equal(module(x), learner.scores(x))
    with pytest.raises(InputError) as caught:
        OnePass.load(tmp_path / "saved", small_net(CLASSES))
    check_sentence(caught.value, ("'0.bias' is only in the module",))


# ---- batches


def test_optimizers_for_something_else_are_refused() -> None:
    module = small_net(CLASSES)
    with pytest.raises(InputError) as caught:
        OnePass(module, optimizer=torch.optim.SparseAdam(list(module.parameters())))
    check_sentence(caught.value, ("SparseAdam takes sparse gradients only", "choose another"))
