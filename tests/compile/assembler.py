"""What NVIDIA's assembler says of a kernel, by the one that the installed Triton takes for the architecture."""

from __future__ import annotations

import subprocess
import tempfile


def assembler_says(ptx: str, arch: int = 90) -> str:
    """Assemble for ``sm_<arch>a``: registers and spills in words, and C75xx where products were serialised."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}a", file.name, "-o", "/dev/null"]
        outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    return outcome.stderr + outcome.stdout
