"""`tandem serve`: starts this host's template, which takes longest, and then everything else."""

from __future__ import annotations

import os
import signal

from deploy.config import ENV_PREFIX
from deploy.preflight import check_start
from deploy.processes import Patience, adopt_orphans, complain, import_paths, kill_descendants
from deploy.ray_cluster import RayCluster
from deploy.resources import choose_threads, thread_environment
from deploy.template.client import TemplateClient
from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.logs import log_to_stderr
from worker.cores import host_cores


def serve(config: ServeConfig) -> int:
    """Run the server until a signal or a failure. Returns the process' exit code."""
    log_to_stderr(config.log_level, config.log_format)
    os.environ.pop(ENV_PREFIX + "API_KEY", None)  # no child process needs it
    os.environ.update(import_paths())
    patience = Patience(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, patience.on_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores the end of the terminal
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    adopt_orphans()
    cluster = RayCluster(config)
    threads, _ = choose_threads(config, host_cores())
    template = TemplateClient(
        cluster.namespace, thread_environment(threads), own_stderr=False, launcher_pid=os.getpid()
    )
    try:
        defaults = check_start(config)
        if cluster.is_local and config.forks_workers:
            template.begin()
        from deploy.launcher import run  # the router is imported while the template imports the engine

        return run(config, defaults, cluster, template, patience)
    except TandemError as error:
        kill_descendants()
        complain(config, str(error))
        return error.exit_status
    except KeyboardInterrupt:
        return 130
