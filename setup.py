"""Maps the top-level source folders into one import package; the metadata is in pyproject.toml."""

from setuptools import find_packages, setup

PACKAGE = "pilotfish"
FOLDERS = ("spec", "engine", "kernels", "draft_heads", "server", "metrics", "deploy")


def packages_below(folder: str) -> list[str]:
    return [f"{PACKAGE}.{name}" for name in (folder, *(f"{folder}.{sub}" for sub in find_packages(folder)))]


setup(
    packages=[PACKAGE, *(name for folder in FOLDERS for name in packages_below(folder))],
    package_dir={PACKAGE: PACKAGE, **{f"{PACKAGE}.{folder}": folder for folder in FOLDERS}},
)
