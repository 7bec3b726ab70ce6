"""`python -m proxy` is `strata`."""

from proxy.cli import main

main()
