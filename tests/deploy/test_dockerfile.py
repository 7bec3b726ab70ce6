"""What the image is, read from the Dockerfile; no Docker is needed to know it."""

import json
import re
from pathlib import Path

import pytest

Instruction = tuple[str, str]


@pytest.fixture
def stages(root: Path) -> list[list[Instruction]]:
    """The instructions of each stage, with lines continued and comments left out."""
    text = re.sub(r"^#.*\n", "", (root / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[Instruction]] = []
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append([])
        if name:
            found[-1].append((name, rest.strip()))
    return found


@pytest.fixture
def image(stages: list[list[Instruction]]) -> dict[str, str]:
    """The last stage; the last instruction of a name is the one that holds."""
    return dict(stages[-1])


def test_the_user_is_a_number_and_not_root(image: dict[str, str]) -> None:
    """An orchestrator can see that the process is not root."""
    user, group = image["USER"].split(":")

    assert int(user) > 0
    assert int(group) > 0


def test_nothing_is_built_in_the_last_stage(stages: list[list[Instruction]], image: dict[str, str]) -> None:
    """The last stage runs nothing and takes the finished environment from the one before."""
    assert len(stages) == 2
    assert "RUN" not in image
    assert image["COPY"] == "--from=build /opt/strata /opt/strata"


def test_both_stages_are_one_python(stages: list[list[Instruction]]) -> None:
    """The environment is run by the very Python it was made with."""
    bases = {stage[0][1].removesuffix(" AS build") for stage in stages}

    assert {"python:3.13-slim"} == bases


def test_the_command_is_exec_form(image: dict[str, str]) -> None:
    """No shell stands between the signals and the process, and other commands of `strata` can be given."""
    assert json.loads(image["ENTRYPOINT"]) == ["strata"]
    assert json.loads(image["CMD"]) == ["serve"]


def test_liveness_is_checked_without_a_shell(image: dict[str, str]) -> None:
    """The health check asks /livez with Python alone: the image has no curl."""
    command = json.loads(image["HEALTHCHECK"].partition(" CMD ")[2])

    assert command[0] == "python"
    assert "/livez" in command[-1]
    compile(command[-1], "HEALTHCHECK", "exec")


def test_the_port_is_reached_from_outside(image: dict[str, str]) -> None:
    """Inside a container the loopback address would be of no use."""
    assert image["EXPOSE"] == "8080"
    assert "STRATA_HOST=0.0.0.0" in image["ENV"].split()


def test_versions_are_the_locked_ones(stages: list[list[Instruction]]) -> None:
    """What is installed is what was tested, and nothing is compiled."""
    (install,) = [text for name, text in stages[0] if name == "RUN" and " install " in text]

    assert "--constraint requirements.lock" in install
    assert "--only-binary :all:" in install


def test_everything_copied_is_there_and_let_through(root: Path, stages: list[list[Instruction]]) -> None:
    """Each file that the build copies is in the repository, and .dockerignore sends it and nothing else."""
    copied = {source for name, text in stages[0] if name == "COPY" for source in text.split()[:-1]}
    let_through = set(re.findall(r"^!(.+)$", (root / ".dockerignore").read_text(), re.MULTILINE))

    assert copied == let_through
    assert [source for source in sorted(copied) if not (root / source).exists()] == []
