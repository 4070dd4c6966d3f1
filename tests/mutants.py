"""Wrong implementations of the methods, many seen in public code, and whether the tests notice.

    python tests/mutants.py            # all of them
    python tests/mutants.py gem        # those of one file

Each mutant is the package with one place changed. It is killed if the tests of its method fail, or
else the other tests of the learners.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "onepass"
REST = ["tests/learners", "tests/models", "tests/memory/test_fleet.py", "tests/streams"]


@dataclass(frozen=True)
class Mutant:
    """One change: `old` occurs once in `file`."""

    file: str
    wrong: str  # what is wrong with it
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{Path(self.file).stem}: {self.wrong}"

    def source(self) -> str:
        content = (PACKAGE / self.file).read_text(encoding="utf-8")
        if content.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: its place occurs {content.count(self.old)} times in {self.file}"
            )
        return content.replace(self.old, self.new)


def of(file: str, tests: str, *changes: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(file, wrong, old, new, tuple(tests.split())) for wrong, old, new in changes]


MUTANTS = [
    *of(
        "learners/agem.py",
        "tests/learners/test_agem.py",
        (
            "projects where there is no conflict",
            "violated = (product < 0)",
            "violated = (product > 0)",
        ),
        ("adds the projection", "reference, value=-1, out=out)", "reference, value=1, out=out)"),
        (
            "forgets to divide",
            "torch.where(violated, product / square, 0)",
            "torch.where(violated, product, 0)",
        ),
        (
            "decides parameter by parameter",
            "product = dot(g, reference)",
            "product = g * reference",
        ),
        ("divides by nothing", "(product < 0) & (square > TINY)", "(product < 0)"),
        (
            "counts steps that were not taken",
            "(violated & self.fleet.active)[:, 0]",
            "violated[:, 0]",
        ),
        ("projects against the sum of both", "project(g, g_ref, out=g)", "project(g, g + g_ref)"),
    ),
    *of(
        "learners/rehearsal.py",
        "tests/learners/test_agem.py tests/learners/test_er.py",
        (
            "reference always moves batch-norm",
            "self.fleet.grad(reference, update_buffers=self.option.reference_moves_buffers)",
            "self.fleet.grad(reference)",
        ),
        ("never ends a task in the memory", "        self.episodic.end_task()\n", "        pass\n"),
    ),
    *of(
        "memory/sampling.py",
        "tests/memory/test_fleet.py",
        ("biased reservoir", "uniform * (number + 1)", "uniform * number"),
    ),
    *of(
        "memory/fleet.py",
        "tests/memory/test_fleet.py tests/learners/test_sgem.py",
        (
            "shows the current task",
            "        if self.include_current:\n            return self",
            "        if not self.include_current:\n            return self",
        ),
        (
            "gives the memory of another task",
            "for earlier in range(task))",
            "for earlier in range(task and task - 1))",
        ),
        (
            "draws with replacement",
            "        if self.with_replacement:\n",
            "        if not self.with_replacement:\n",
        ),
    ),
    *of(
        "engine/slots.py",
        "tests/engine/test_slots.py tests/learners/test_agem.py",
        (
            "softmax over all slots",
            "rivals, place = self.trained.select(logits, slots), self.trained.place(slots)",
            "rivals, place = logits, slots",
        ),
    ),
    *of(
        "engine/batch.py",
        "tests/learners/test_er.py",
        (
            "a row that sits out learns from the memory",
            "*(range(width, width + second) if first else ())",
            "*range(width, width + second)",
        ),
        ("padding among the examples", "tuple(sizes), extra)", "None, extra)"),
    ),
    *of(
        "learners/gem.py",
        "tests/learners/test_gem.py tests/learners/test_sgem.py",
        ("sign of the gradient", "np.concatenate([-root[:, -1],", "np.concatenate([root[:, -1],"),
        (
            "only the last task's constraint",
            "in range(self.episodic.task):",
            "in range(self.episodic.task)[-1:]:",
        ),
        (
            "only the first task's constraint",
            "in range(self.episodic.task):",
            "in range(self.episodic.task)[:1]:",
        ),
        ("solves where nothing is violated", "wrong = (along < 0)", "wrong = (along > 0)"),
        (
            "waits until all are violated",
            "violated = wrong.any(1) & along",
            "violated = wrong.all(1) & along",
        ),
        (
            "multipliers in wrong units",
            "(nonnegative(matrix, target) + least) * length / scale",
            "nonnegative(matrix, target) + least",
        ),
        ("margin in wrong units", "least = margin * scale / length", "least = margin + 0 * scale"),
        ("ridge not under the root", "np.diag(np.sqrt(ridge) / scale)", "np.diag(ridge / scale)"),
        ("margin ignored", "(nonnegative(matrix, target) + least)", "nonnegative(matrix, target)"),
        (
            "counts constraints, not steps",
            "self.violations += violated\n        for",
            "self.violations += (along < 0).sum(1)\n        for",
        ),
        (
            "stores before it looks, and looks at it",
            "in range(self.episodic.task):",
            "in range(self.episodic.task + 1):",
        ),
    ),
    *of(
        "learners/sgem.py",
        "tests/learners/test_sgem.py",
        ("always the first task", "(uniform * self.episodic.task)", "(uniform * 1)"),
        (
            "one task for a whole task",
            "(self.episodic.task << 32) + self.fleet.steps_in_task",
            "self.episodic.task << 32",
        ),
        (
            "counts steps that were not taken",
            "(violated & self.fleet.active)[:, 0]",
            "violated[:, 0]",
        ),
    ),
    *of(
        "learners/er.py",
        "tests/learners/test_er.py",
        ("learns from the memory alone", "joined(batch, replayed)", "replayed"),
        ("never looks back", "batch if replayed is None else joined(batch, replayed)", "batch"),
    ),
    *of(
        "learners/mega1.py",
        "tests/learners/test_mega.py",
        (
            "looks at the wrong loss",
            "learning = loss > sensitivity",
            "learning = loss_ref > sensitivity",
        ),
        (
            "weighs the wrong way round",
            "loss_ref / torch.where(learning, loss, 1)",
            "loss / loss_ref",
        ),
        (
            "stands still when the task is learnt",
            "torch.where(learning, loss, 1), 1)\n",
            "torch.where(learning, loss, 1), 0)\n",
        ),
    ),
    *of(
        "learners/mega2.py",
        "tests/learners/test_mega.py",
        ("sign of the cosine", "loss + loss_ref * cosine", "loss - loss_ref * cosine"),
        ("turns too far", ".clamp(0, math.pi / 2)", ".clamp(0, math.pi)"),
        ("loses the length", "length * turned", "turned"),
        (
            "swaps the losses",
            "rotate(g, loss, g_ref, loss_ref)\n",
            "rotate(g, loss_ref, g_ref, loss)\n",
        ),
    ),
    *of(
        "learners/anchored.py",
        "tests/learners/test_ewc.py tests/learners/test_pi.py tests/learners/test_anchored.py",
        (
            "path of the total gradient",
            "        return self.pulled(self._g)",
            "        self._g = self.pulled(self._g)\n        return self._g",
        ),
        (
            "a factor of one half",
            'torch.mul(2 * self.columns["strength"],',
            'torch.mul(self.columns["strength"],',
        ),
        (
            "pushes away",
            "torch.sub(self.fleet.theta, self.anchor, out=self._away)",
            "torch.sub(self.anchor, self.fleet.theta, out=self._away)",
        ),
        (
            "anchor stays at the start",
            "        self.anchor.copy_(self.fleet.theta)\n        self.anchored = True",
            "        self.anchored = True",
        ),
        (
            "scales over all runs",
            "low = importance.masked_fill(gaps, torch.inf).amin(-1, keepdim=True)",
            "low = importance.masked_fill(gaps, torch.inf).amin()",
        ),
        ("counts padding", "int(b < n) for n in batch.lengths()", "1 for n in batch.lengths()"),
    ),
    *of(
        "learners/fisher.py",
        "tests/learners/test_ewc.py tests/learners/test_rwalk.py",
        ("weights of old and new swapped", "NEW = 0.9", "NEW = 0.1"),
        ("no square", "self.squares.addcmul_(g, g)", "self.squares.add_(g)"),
        ("never emptied", "        self.squares.masked_fill_(rows, 0)\n", ""),
        (
            "no importance after a short task",
            "        if self.option.flush:\n",
            "        if not self.option.flush:\n",
        ),
    ),
    *of(
        "learners/ewc.py",
        "tests/learners/test_ewc.py tests/learners/test_anchored.py",
        ("keeps only the last task", "self.total = before + fisher", "self.total = fisher"),
        ("squares of batch means", "for one in singly(batch):", "for one in (batch,):"),
        (
            "importances in training mode",
            "self._number), training=False)",
            "self._number), training=True)",
        ),
        ("wrong labels", 'if self.option.labels == "data":', 'if self.option.labels != "data":'),
        (
            "anchors weighted the wrong way round",
            "towards, before / self.total)",
            "towards, 1 - before / self.total)",
        ),
        (
            "Fisher of the regularised gradient",
            "            self.watch(self._g)\n",
            "            self.watch(self.pulled(self._g))\n",
        ),
    ),
    *of(
        "learners/pi.py",
        "tests/learners/test_pi.py",
        ("sign of the path", "delta, value=-1)", "delta, value=1)"),
        (
            "negative importances",
            "(moved.square() + self.option.damping)).relu()",
            "(moved.square() + self.option.damping))",
        ),
        (
            "keeps only the last task",
            "self.importance += (self.path",
            "self.importance = (self.path",
        ),
        ("path goes on over tasks", "        self.path.zero_()\n", ""),
        (
            "distance not squared",
            "moved.square() + self.option.damping",
            "moved.abs() + self.option.damping",
        ),
    ),
    *of(
        "learners/mas.py",
        "tests/learners/test_mas.py",
        ("signs cancel", "total += g.abs()", "total += g"),
        ("keeps only the last task", "self.importance + fresh", "fresh"),
        ("importances in training mode", "training=False", "training=True"),
        ("outputs of all tasks", "self.fleet.competition.outputs(logits, slots)", "logits"),
        ("norm not squared", ".square().sum()", ".abs().sum()"),
        (
            "always a batch at a time",
            "(batch,) if self.option.per_batch else singly(batch)",
            "(batch,)",
        ),
    ),
    *of(
        "learners/rwalk.py",
        "tests/learners/test_rwalk.py",
        (
            "half the distance, the wrong way round",
            "1.0 if self.option.whole_distance else 0.5",
            "0.5 if self.option.whole_distance else 1.0",
        ),
        ("distance without the geometry", "half * self.fisher * moved", "half * moved"),
        ("first task's score is halved", "if not self.anchored:", "if False:"),
        (
            "no score",
            "scaled(self.fisher, gaps) + scaled(self.score, gaps)",
            "scaled(self.fisher, gaps)",
        ),
        ("path goes on", "        self.path.masked_fill_(rows, 0)\n", ""),
        ("scores always grow", "mul_(1.5 if self.option.growing_scores else 0.5)", "mul_(1.5)"),
    ),
    *of(
        "models/progressive.py",
        "tests/models/test_progressive.py tests/learners/test_prognn.py",
        ("earlier columns go on learning", ".requires_grad_(False).eval()", ".eval()"),
        ("batch-norm of frozen columns moves", "            column.eval()\n", "            pass\n"),
        ("no lateral connections", "if str(s) in self.laterals:", "if s > 99:"),
    ),
    *of(
        "learners/prognn.py",
        "tests/learners/test_prognn.py",
        (
            "the newest column answers for all",
            "network.shown = batch.task",
            "network.shown = self.grown - 1",
        ),
        ("no new column", "self._grow(task + 1)", "self._grow(1)"),
    ),
    *of(
        "learners/icarl.py",
        "tests/learners/test_icarl.py tests/learners/test_herding.py",
        ("herding forgets what it chose", "(features + total[:, None]) / k", "features"),
        ("the wrong exemplars are dropped", "self.x[:, :, :places]", "self.x[:, :, -places:]"),
        (
            "budget for each task",
            "self.option.exemplars // (old + len(classes))",
            "self.option.exemplars // len(classes)",
        ),
        ("the network teaches itself", '"theta": self.teacher', '"theta": self.fleet.theta'),
        (
            "distils over all slots",
            'self._new + self.columns["distillation"][..., None] * self._old',
            '1 + 0 * self.columns["distillation"][..., None]',
        ),
        (
            "features not normalised",
            "normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)",
            "features",
        ),
        (
            "teacher never learns",
            "        self.teacher = self.fleet.theta.clone()\n        self._teacher_buffers",
            "        self._teacher_buffers",
        ),
        (
            "labels instead of the teacher",
            "torch.where(self._old > 0, logits[..., : wanted.shape[-1]].sigmoid(), wanted)",
            "wanted + 0 * logits[..., : wanted.shape[-1]]",
        ),
        (
            "outputs instead of features",
            "self.fleet.forward(batch).features",
            "self.fleet.forward(batch).logits",
        ),
    ),
]


def killed(mutant: Mutant) -> bool:
    """Do the tests notice?"""
    with tempfile.TemporaryDirectory(prefix="onepass-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / "onepass" / mutant.file).write_text(mutant.source(), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        for tests in (mutant.tests, REST):
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-m",
                "not long",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                *tests,
            ]
            made = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            if made.returncode not in (0, 1):  # it must fail a test, not just break
                raise RuntimeError(
                    f"{mutant.name}: the tests did not run\n"
                    f"{made.stdout[-2000:]}{made.stderr[-2000:]}"
                )
            if made.returncode == 1:
                return True
    return False


def check(mutants: list[Mutant], workers: int) -> list[Mutant]:
    """Try all of them and print a line each; returns the survivors."""
    with ThreadPoolExecutor(workers) as pool:
        survivors = []
        for mutant, dead in zip(mutants, pool.map(killed, mutants), strict=True):
            print(f"{'killed  ' if dead else 'SURVIVED'} {mutant.name}", flush=True)
            if not dead:
                survivors.append(mutant)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed")
    return survivors


if __name__ == "__main__":
    wanted = set(sys.argv[1:])
    chosen = [mutant for mutant in MUTANTS if not wanted or Path(mutant.file).stem in wanted]
    sys.exit(len(check(chosen, os.cpu_count() or 1)) > 0)
