# Functions to make a virtual environment and to install autoflash into it. Sourced by the scripts beside it.

# The interpreter to use: $PYTHON, or the first one on the path that is new enough and can make environments.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python3.10 python3.13; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "autoflash needs Python 3.10 or newer with the venv module; set PYTHON to such an interpreter." >&2
    return 2
}

# Make the environment $1 unless it is there and works.
make_venv() {
    local python
    if ! "$1/bin/python" -c 'import pip' >/dev/null 2>&1; then
        python=$(find_python)
        echo "Making $1 with $("$python" --version)"
        "$python" -m venv --clear "$1"
    fi
}

# Whether torch should come with GPU libraries: not on Linux where no driver of an NVIDIA or AMD GPU is loaded.
has_gpu() {
    [ "$(uname -s)" != Linux ] || [ -e /dev/nvidiactl ] || [ -e /dev/kfd ] || nvidia-smi -L >/dev/null 2>&1
}

# install_into VENV REQUIREMENT [PIP OPTION...]: editable install, with the CPU build of torch where there is no GPU.
install_into() {
    local venv=$1 requirement=$2 cpu
    shift 2
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$requirement" "$@")
    if has_gpu; then
        "${pip[@]}"
        return
    fi
    cpu=(--constraint "$SCRIPTS/constraints-cpu.txt")
    echo "No GPU here: installing the CPU build of torch (this downloads some hundred megabytes the first time)"
    "${pip[@]}" "${cpu[@]}" 2>/dev/null && return
    "${pip[@]}" "${cpu[@]}" --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null && return
    echo "Note: the CPU build of torch cannot be had from here; installing the default build."
    "${pip[@]}"
}
