"""The files that deployment reads are well-formed and name what exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.config import ENV_PREFIX, load_config
from protocol.config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]


def tandem_variables(text: str) -> set[str]:
    """The fields of the configuration that a file sets through the environment."""
    return {name.lower() for name in re.findall(rf"\b{ENV_PREFIX}([A-Z_]+)\s*[=:]", text)}


def test_cluster_file_is_what_ray_expects() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load((ROOT / "deploy/cluster.yaml").read_text())
    util.validate_config(util.prepare_config(config))
    assert any("tandem serve --ray-address auto" in line for line in config["head_start_ray_commands"])
    assert set(config["file_mounts"].values()) == {"."}


def test_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    service = compose["services"]["tandem"]
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert set(compose["volumes"]) == {mount.split(":")[0] for mount in service["volumes"]}
    fields = {name.removeprefix(ENV_PREFIX).lower() for name in service["environment"]}
    assert fields <= set(ServeConfig.__struct_fields__)
    defaults = {
        name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)) for name, value in service["environment"].items()
    }
    assert load_config(environ=defaults).host == "0.0.0.0"


def test_dockerfile_copies_and_runs_what_exists() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    instructions = [line.split()[0] for line in text.splitlines() if line and line[0].isupper()]
    assert instructions[0] == "FROM" and instructions[-1] == "ENTRYPOINT"
    assert 'ENTRYPOINT ["tandem", "serve"]' in text
    assert "deploy/install.sh" in text


def test_variables_in_cluster_file_are_options() -> None:
    variables = tandem_variables((ROOT / "deploy/cluster.yaml").read_text())
    assert variables and variables <= set(ServeConfig.__struct_fields__)


def test_scripts_are_executable_and_parse() -> None:
    for script in ("deploy/install.sh", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script
        subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("install", "deploy/install.sh"),
        ("serve", ".venv/bin/tandem serve"),
        ("test", "-m pytest"),
        ("lint", ".venv/bin/lint-imports"),
    ],
)
def test_make_targets(target: str, expected: str) -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert expected in shown.stdout


def test_every_package_is_type_checked() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"])
    packages = {
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in {"tests", "build"}
    }
    assert listed == packages
