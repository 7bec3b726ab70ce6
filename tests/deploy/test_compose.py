"""The compose files and what they mount fit together; no Docker is needed to know it."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.environment import load as load_settings

VARIABLE = re.compile(r"\$\{(\w+)")

# What a user makes from the example beside it.
MADE_BY_THE_USER = {"tenants.env": "tenants.example.env"}


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def default(value: str) -> str:
    """What Compose makes of `value` with an empty .env: `${NAME:-default}` becomes `default`."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def mounts(compose: dict[str, Any]) -> list[str]:
    """The host paths of all bind mounts and file secrets."""
    found = [volume.split(":")[0] for service in compose["services"].values() for volume in service.get("volumes", [])]
    found += [secret["file"] for secret in compose.get("secrets", {}).values() if "file" in secret]
    return [path for path in map(default, found) if path.startswith(".")]


@pytest.fixture
def deploy(root: Path) -> Path:
    return root / "deploy"


@pytest.fixture
def compose(deploy: Path) -> dict[str, Any]:
    return load(deploy / "compose.yaml")


@pytest.mark.parametrize("name", ["compose.yaml", "compose.token.yaml"])
def test_mounted_paths_exist(deploy: Path, name: str) -> None:
    """Whatever is mounted from the host is in the repository, or made from an example that is."""
    paths = mounts(load(deploy / name))

    assert paths
    for path in paths:
        source = deploy / path

        assert source.with_name(MADE_BY_THE_USER.get(source.name, source.name)).exists(), path


def test_all_services_are_there(compose: dict[str, Any]) -> None:
    """Strata, its memory, the metrics and the dashboard start together."""
    assert {"strata", "redis", "prometheus", "grafana"} == compose["services"].keys()


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    """Every image from elsewhere has a tag with a version in it."""
    for name, service in compose["services"].items():
        assert "build" in service or re.search(r":v?\d", service["image"]), name


def test_services_are_bounded(compose: dict[str, Any]) -> None:
    """Every service has bounds of memory and CPU, bounded logs, and no capability it does not need."""
    for name, service in compose["services"].items():
        assert service["mem_limit"], name
        assert service["cpus"], name
        assert "max-size" in service["logging"]["options"], name
        assert service["cap_drop"] == ["ALL"], name


def test_redis_is_a_cache_nobody_else_reaches(compose: dict[str, Any]) -> None:
    """Redis has a bound of its own, drops only keys with a time to live, is checked, and is not published."""
    redis = compose["services"]["redis"]
    options = dict(zip(redis["command"][1::2], redis["command"][2::2], strict=True))

    assert options["--maxmemory-policy"] == "volatile-lru"
    assert default(options["--maxmemory"]) == "512mb"
    assert "healthcheck" in redis
    assert "ports" not in redis
    assert [compose["networks"][name]["internal"] for name in redis["networks"]] == [True]


def test_ports_are_published_on_loopback(compose: dict[str, Any]) -> None:
    """With an empty .env nothing listens beyond this host."""
    ports = [default(port) for service in compose["services"].values() for port in service.get("ports", [])]

    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_strata_has_tenants(compose: dict[str, Any]) -> None:
    """The upstream's key on an open address goes with tenants, without which Strata would refuse to start."""
    strata = compose["services"]["strata"]

    assert "STRATA_UPSTREAM_KEY" in strata["environment"]
    assert [default(path) for path in strata["env_file"]] == ["./tenants.env"]


def test_the_example_tenants_are_settings(deploy: Path) -> None:
    """The example of tenants is taken by Strata as it stands."""
    lines = (deploy / "tenants.example.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))

    assert set(load_settings(given).tenants) == {"acme", "lab"}


def test_variables_are_documented(deploy: Path, compose: dict[str, Any]) -> None:
    """Every variable that the compose files take from .env is in the README's table and in the example."""
    taken = set(VARIABLE.findall((deploy / "compose.yaml").read_text()))
    taken |= {name for name, value in compose["services"]["strata"]["environment"].items() if value is None}
    documented = set(re.findall(r"^\| `(\w+)` \|", (deploy / "README.md").read_text(), re.MULTILINE))
    example = set(re.findall(r"^#?(\w+)=", (deploy / ".env.example").read_text(), re.MULTILINE))

    assert taken == documented
    assert taken == example


def test_token_goes_to_prometheus_as_a_file(deploy: Path) -> None:
    """With an admin token the scrape differs in nothing but the file the token is read from."""
    plain, token = load(deploy / "prometheus.yml"), load(deploy / "prometheus.token.yml")
    overlay = load(deploy / "compose.token.yaml")
    authorization = token["scrape_configs"][0].pop("authorization")

    assert plain == token
    assert authorization["credentials_file"] == "/run/secrets/strata_admin_token"
    assert overlay["secrets"] == {"strata_admin_token": {"environment": "STRATA_ADMIN_TOKEN"}}


def test_token_scrape_takes_the_place_of_the_plain_one(deploy: Path, compose: dict[str, Any]) -> None:
    """Both compose files mount their scrape configuration at one target, so that the second replaces the first."""
    plain = compose["services"]["prometheus"]
    (replacing,) = load(deploy / "compose.token.yaml")["services"]["prometheus"]["volumes"]
    target = replacing.split(":")[1]

    assert target in {volume.split(":")[1] for volume in plain["volumes"]}
    assert f"--config.file={target}" in plain["command"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus.token.yml"])
def test_promtool_accepts_the_scrape(deploy: Path, name: str) -> None:
    """Prometheus itself takes the configuration; only the syntax, since the token's file is in the container."""
    checked = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", deploy / name], capture_output=True, text=True, check=False
    )

    assert checked.returncode == 0, checked.stderr


def test_grafana_finds_its_data_and_dashboards(deploy: Path, root: Path, compose: dict[str, Any]) -> None:
    """The provisioned data source is the dashboard's default, and its provider reads the mounted folder."""
    (source,) = load(deploy / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = load(deploy / "grafana/provisioning/dashboards/strata.yaml")["providers"]
    dashboard = json.loads((root / "grafana/savings.json").read_bytes())
    mounted = {v.split(":")[0]: v.split(":")[1] for v in compose["services"]["grafana"]["volumes"]}

    assert source["uid"] == dashboard["templating"]["list"][0]["current"]["value"]
    assert source["url"] == "http://prometheus:9090"
    assert provider["options"]["path"] == mounted["../grafana"]
    assert load(deploy / "prometheus.yml")["global"]["scrape_interval"] == source["jsonData"]["timeInterval"]
