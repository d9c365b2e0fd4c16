"""Every way of importing leaves the function behind, and starts nothing. Each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import autoflash", "autoflash.attention"),
        ("import autoflash.attention", "autoflash.attention"),
        ("from autoflash import attention", "attention"),
        ("from autoflash.attention import attention", "attention"),
    ],
)
def test_the_function_is_there(statement: str, name: str) -> None:
    assert run(f"{statement}\nprint(type({name}).__name__, {name}.__name__)") == "function attention"


def test_importing_opens_no_device_and_reads_no_file_of_ours() -> None:
    code = """
import sys
import torch
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import autoflash
strays = [path for path in opened if not path.endswith((".py", ".pyc")) and "__pycache__" not in path]
print([path for path in strays if "tuning" in path or "template" in path or ".sqlite" in path])
print(torch.cuda.is_initialized())
"""
    assert run(code).splitlines() == ["[]", "False"]


def test_the_reference_loads_when_it_is_named() -> None:
    assert run("import autoflash; print(autoflash.reference.attention.__name__)") == "attention"


def test_case_a22_without_triton_attention_works_on_what_is_left() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, autoflash\n"
        "q = torch.randn(1, 2, 33, 16)\n"
        "out = autoflash.attention(q, q, q, causal=True, vendor='never')\n"
        "exact = autoflash.reference.attention(q, q, q, causal=True)\n"
        "assert torch.allclose(out.double(), exact, atol=1e-5)\n"
    )

    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert outcome.returncode == 0, outcome.stderr
