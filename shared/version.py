"""The installed version of this distribution."""

from importlib.metadata import PackageNotFoundError, version


def tandem_version() -> str:
    """As the package metadata says; `0+unknown` when run from a bare tree."""
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "0+unknown"
