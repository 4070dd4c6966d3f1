"""Studies on a GPU that is too small, or not one's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)

STUDY = (
    "run permuted-digits --device cuda --set train_examples=200 --set test_examples=100 --methods"
)


def start(folder: Path, arguments: str, before: str = "pass") -> subprocess.Popen[str]:
    code = f"import sys, torch; {before}; from onepass.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, *STUDY.split(), *arguments.split()]
    command += ["--out", str(folder), "--json", f"{folder}.json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


def accuracies(folder: Path) -> Any:
    methods = json.loads(Path(f"{folder}.json").read_text())["methods"]
    return {method: found["A_T"]["values"] for method, found in methods.items()}


def test_out_of_memory_leads_to_smaller_fleets(tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    some = f"torch.cuda.set_per_process_memory_fraction({2e9 / total})"
    printed = finish(start(tmp_path / "tight", "van --seeds 2 --set hidden=[2048,2048]", some))
    assert "out of memory with 24 runs side by side, going on with 12" in printed
    assert "not captured" not in printed
    assert "plain autograd" not in printed
    finish(start(tmp_path / "roomy", "van --seeds 2 --set hidden=[2048,2048]"))
    tight, roomy = (accuracies(tmp_path / name)["van"] for name in ("tight", "roomy"))
    assert tight == pytest.approx(roomy, abs=0.02)


def test_two_processes_on_one_gpu_do_not_change_each_others_results(tmp_path: Path) -> None:
    finish(start(tmp_path / "alone", "a-gem,ewc --seeds 3"))
    both = [start(tmp_path / name, "a-gem,ewc --seeds 3") for name in ("one", "other")]
    for process in both:
        finish(process)
    one, alone, other = (accuracies(tmp_path / name) for name in ("one", "alone", "other"))
    assert one == alone == other
