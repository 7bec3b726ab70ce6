"""The compose file gives Strata only settings that exist."""

from pathlib import Path

import yaml

from proxy.settings import Settings


def test_every_setting_exists(root: Path) -> None:
    """Every STRATA_ variable given to the container is a setting of Strata's."""
    compose = yaml.safe_load((root / "deploy" / "compose.yaml").read_text())
    given = {name.removeprefix("STRATA_").lower() for name in compose["services"]["strata"]["environment"]}

    assert given - Settings.model_fields.keys() == set()
