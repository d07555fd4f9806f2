"""vLLM's API server for a machine with few cores: NIXL's progress thread sleeps, and nothing is pinned.

vLLM leaves the thread's delay at 0, so the thread polls without a pause and takes a core from the model.
vLLM's connector pins the model's thread to the machine's last core, in both servers to the same one. Run this
file with the peer's own Python and the arguments of vLLM's server. vLLM spawns its workers from this file, so
the changes reach the process that owns the NIXL agent.
"""

import os
import runpy

PROGRESS_DELAY_MICROSECONDS = 1000

# vLLM sets this itself only if NIXL was not imported before it.
os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")

from nixl import _api as nixl_api  # noqa: E402

_make_agent = nixl_api.nixlBind.nixlAgent


def _tamed_agent(name: str, config: object) -> object:
    config.pthrDelay = PROGRESS_DELAY_MICROSECONDS  # type: ignore[attr-defined]
    return _make_agent(name, config)


nixl_api.nixlBind.nixlAgent = _tamed_agent
os.sched_setaffinity = lambda pid, cores: None

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
