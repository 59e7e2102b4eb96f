"""The example of fine-tuning, with few steps: a base, three peers with adapters, exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import Processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune" / "finetune.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_peers_train_adapters_of_a_model_that_a_run_has_made(
    processes: Processes, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the extra 'hf' is not installed")
    out = tmp_path / "out"
    steps = ("--base-steps", "100", "--steps", "80")
    example = processes.python(str(EXAMPLE), "--out", str(out), *steps)
    code = example.wait(timeout=800)
    output = processes.output_of(example)
    assert code == 0, output
    found = re.search(r"held-out loss of the answers: ([0-9.]+) -> ([0-9.]+)", output)
    assert found is not None, output
    assert float(found[2]) < float(found[1]) - 0.5
    assert len(re.findall(r"^\| peer-[0-2] \|", output, re.MULTILINE)) == 3
    # The adapters alone are sent: a few kB in a cycle.
    sent = [float(each) for each in re.findall(r"\| ([0-9]+) kB \| [0-9]+ kB \|", output)]
    assert len(sent) == 3 and all(0 < each < 2000 for each in sent)
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert (out / "tuned" / "model.safetensors").is_file()
