"""Files that deployment reads are well-formed, and the names in them exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.config import ENV_PREFIX
from deploy.node import check_cluster_file
from protocol.config import field_docs
from protocol.roles import ROLES

ROOT = Path(__file__).resolve().parents[2]
CLOUD_FILES = ("cluster-cloud.yaml", "cluster-cloud-gpu.yaml")
CLUSTER_FILES = ("cluster.yaml", *CLOUD_FILES)


def tandem_variables(text: str) -> set[str]:
    """Return the configuration fields that a file sets through the environment."""
    return {name.lower() for name in re.findall(rf"\b{ENV_PREFIX}([A-Z_]+)\s*[=:]", text)}


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_ray_accepts_the_cluster_files(name: str) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load((ROOT / "deploy" / name).read_text())
    util.validate_config(util.prepare_config(config))
    assert [line for line in config["head_start_ray_commands"] if line.endswith("node.sh serve")]
    assert config["file_mounts"] == {"~/tandem": "deploy/.."} and "/.venv" in config["rsync_exclude"]


@pytest.mark.parametrize("name", CLOUD_FILES)
def test_cloud_nodes_have_a_type_for_each_role(name: str) -> None:
    types = yaml.safe_load((ROOT / "deploy" / name).read_text())["available_node_types"]
    assert types.keys() == {"head", *ROLES}
    assert types["head"]["resources"] == {"CPU": 0}
    for kind in types.values():
        host = kind["node_config"]
        (disk,) = host["BlockDeviceMappings"]
        assert disk["Ebs"]["VolumeSize"] >= 60 and host["ImageId"].startswith("resolve:ssm:/aws/service/")
    for role in ROLES:
        assert types[role]["resources"].keys() == {role}
        assert 0 <= types[role]["min_workers"] < types[role]["max_workers"]


def test_hosts_of_the_cluster_file_have_the_same_names_everywhere() -> None:
    text = (ROOT / "deploy/cluster.yaml").read_text()
    config = yaml.safe_load(text)
    hosts = set(re.findall(r'CLUSTER_HOSTS="(.*?)"', text))
    assert len(hosts) == 1
    named = [host.partition("=")[0] for host in hosts.pop().split()]
    assert named == [config["provider"]["head_ip"], *config["provider"]["worker_ips"]]


def run_node_script(tmp_path: Path, hosts: str) -> str:
    """Run node.sh for these hosts without Ray and return its output."""
    folder = tmp_path / "checkout" / "deploy"
    shutil.copytree(ROOT / "deploy", folder, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "HOME": str(tmp_path), "CLUSTER_HOSTS": hosts}
    command = [str(folder / "node.sh"), "worker", "192.0.2.1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize(
    ("hosts", "complaint"),
    [
        (
            "192.0.2.1=prefil:1",
            "CLUSTER_HOSTS: 192.0.2.1=prefil:1: after the address you can give =ROLE:NUMBER",
        ),
        ("192.0.2.1=prefill:-1", "CLUSTER_HOSTS: 192.0.2.1=prefill:-1: after"),
        ("192.0.2.1=prefill", "CLUSTER_HOSTS: 192.0.2.1=prefill: after"),
        ("192.0.2.1", "CLUSTER_HOSTS: names none of this host's addresses"),
    ],
)
def test_wrong_hosts_are_refused_before_anything_starts(tmp_path: Path, hosts: str, complaint: str) -> None:
    assert complaint in run_node_script(tmp_path, hosts)


@pytest.mark.parametrize(
    ("said", "starts"), [("Timed out waiting for file metrics_export_port", 3), ("Address in use", 1)]
)
def test_a_node_whose_agents_were_slow_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, starts: int
) -> None:
    """This Ray always fails. Only slow agents are a reason for a retry, and retries are limited."""
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text(said)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("a token")
    ray = tmp_path / "checkout" / ".venv" / "bin" / "ray"
    ray.parent.mkdir(parents=True)
    ray.write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/commands\n[ "$1" = stop ]\n')
    ray.chmod(0o755)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert run_node_script(tmp_path, hosts="") == "node.sh: Ray cannot start\n"
    commands = (tmp_path / "commands").read_text().split()
    assert commands == ["start", *["stop", "start"] * (starts - 1)]


def test_a_cluster_file_with_an_unknown_role_starts_no_head(tmp_path: Path) -> None:
    """The cloud's file, as `ray up` puts it on the head. With known roles it is accepted."""
    text = (ROOT / "deploy/cluster-cloud.yaml").read_text()
    check_cluster_file(text)
    wrong = text.replace("resources: {draft: 1}", "resources: {cook: 1}")
    assert wrong != text
    (tmp_path / "ray_bootstrap_config.yaml").write_text(wrong)
    folder = tmp_path / "checkout" / "deploy"
    shutil.copytree(ROOT / "deploy", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "checkout" / ".venv").symlink_to(sys.prefix)
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([folder / "node.sh", "head"], env=environment, capture_output=True, text=True)
    complaint = "node.sh: available_node_types: draft: resources: 'cook' is none of CPU, GPU, TPU, memory, "
    assert done.returncode == 1 and done.stderr.startswith(complaint), done
    assert not (tmp_path / ".ray").exists(), "nothing was made"


def test_variables_in_cluster_file_are_options() -> None:
    for name in CLUSTER_FILES:
        variables = tandem_variables((ROOT / "deploy" / name).read_text())
        assert variables and variables <= {*field_docs(), "pip_args"}


def test_scripts_are_executable_and_parse() -> None:
    for script in ("deploy/install.sh", "deploy/node.sh", "deploy/container.sh", "deploy/ray", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script
        subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


def test_every_package_is_type_checked() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"])
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "build"}
    assert listed == packages | {"tests"}


def test_make_serve_takes_options_and_variables(tmp_path: Path) -> None:
    tandem = tmp_path / "tandem"
    tandem.write_text('#!/bin/sh\nprintf "%s\\n" "$*" "$TANDEM_SPECULATIVE_CONFIG"\n')
    tandem.chmod(0o755)
    command = ["make", "--silent", "--old-file=.venv/.installed", "serve", f"BIN={tmp_path}", "ARGS=--port 1"]
    environ = os.environ | {"TANDEM_SPECULATIVE_CONFIG": '{"method": "ngram"}'}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'serve --port 1\n{"method": "ngram"}\n'


def test_native_sources_and_pages_are_part_of_the_packages() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    packaged = {
        path
        for package, patterns in packages["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
    }
    tops = {name.rstrip("*") for name in packages["packages"]["find"]["include"]}
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = {path for path in map(ROOT.joinpath, names) if path.is_file()}
    sources = {path for path in files if path.suffix in (".cpp", ".h")}
    sources = {path for path in sources if path.relative_to(ROOT).parts[0] in tops}
    assert len(sources) > 10
    pages = {path for path in files if path.parent == ROOT / "router" / "api" / "pages"}
    assert len(pages) > 10
    assert sources | pages <= packaged
