"""README, code and dashboards say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy import errors
from proxy.core.items import TAGS
from proxy.environment import default_text
from proxy.observe.metrics import DOCUMENTED, Metrics
from proxy.settings import Settings, TenantSettings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def settings_table() -> str:
    """Return the configuration table as README has it."""
    rows = [
        f"| `STRATA_{name.upper()}` | {default_text(field)} | {field.description} |"
        for name, field in Settings.model_fields.items()
        if name != "tenants"
    ]
    return "\n".join(["| variable | default | what it is |", "| --- | --- | --- |", *rows])


def tenant_table() -> str:
    """Return the table of a tenant's settings as README has it."""
    rows = [
        f"| `STRATA_TENANTS__<NAME>__{name.upper()}` | {field.description} |"
        for name, field in TenantSettings.model_fields.items()
    ]
    return "\n".join(["| variable | what it is |", "| --- | --- |", *rows])


def metrics_table() -> str:
    """Return the table of metrics as README has it."""
    rows = [f"| `{name}` | {_labels(name)} | {text} |" for name, text in DOCUMENTED.items()]
    return "\n".join(["| metric | labels | what it is |", "| --- | --- | --- |", *rows])


def _labels(name: str) -> str:
    collector = Metrics(()).registry._names_to_collectors[name]
    return ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames", ()))


@pytest.mark.parametrize("table", [settings_table, tenant_table, metrics_table])
def test_readme_holds_the_table(table) -> None:  # type: ignore[no-untyped-def]
    """README's tables are what the code says."""
    assert table() in README


def test_every_metric_is_documented() -> None:
    """What a process exposes is in the table, and nothing else."""
    exposed = {family.name for family in Metrics(()).registry.collect()}

    assert exposed == {name.removesuffix("_total") for name in DOCUMENTED}


def test_every_error_code_is_documented() -> None:
    """docs/operations.md names each code with its status."""
    text = (ROOT / "docs" / "operations.md").read_text()

    assert [fault.code for fault in errors.FAULTS if f"| `{fault.code}` | {fault.status} |" not in text] == []


def test_every_tag_is_documented() -> None:
    """docs/layers.md names each tag of the built-in table."""
    text = (ROOT / "docs" / "layers.md").read_text()

    assert [tag for tag in TAGS if f"`{tag}`" not in text] == []


def test_every_receipt_header_is_documented() -> None:
    """docs/operations.md names each response header the proxy adds."""
    source = (ROOT / "proxy" / "observe" / "receipt.py").read_text()
    text = (ROOT / "docs" / "operations.md").read_text()

    assert [name for name in re.findall(r'b"(x-strata-[a-z-]+)"', source) if f"`{name}`" not in text] == []


def test_nothing_names_a_machine_of_ours() -> None:
    """No tracked text carries a path of the machine it was written on."""
    suspicious = re.compile(r"(^|[^A-Za-z0-9_.])/(work|root|farm)/")
    files = [*ROOT.glob("proxy/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.py"), ROOT / "README.md"]

    assert [path.name for path in files if suspicious.search(path.read_text())] == []


def test_links_lead_somewhere() -> None:
    """Relative links in README and docs name files that exist."""
    broken = [
        f"{page.name}: {target}"
        for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]

    assert broken == []
