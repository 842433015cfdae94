"""What must agree before a version is released."""

import email
import re
import subprocess
import sys
import zipfile
from pathlib import Path, PurePath

import pytest
from typer.testing import CliRunner

import secateur
from secateur.cli import app

ROOT = Path(__file__).parent.parent


def test_the_version_is_printed_and_in_the_changelog():
    assert CliRunner().invoke(app, ["--version"]).output.strip() == secateur.__version__
    sections = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert secateur.__version__ in sections


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, as `make dist` builds it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as opened:
        yield opened


def test_the_wheel_has_the_package_with_its_data_and_nothing_else(wheel):
    """Templates, styles, names of classes and `py.typed` are data."""
    source = ROOT / "src"
    wanted = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    wanted = {path for path in wanted if ".egg-info" not in path}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == wanted
    assert {PurePath(path).suffix for path in found} >= {".html", ".css", ".txt", ".typed"}


def test_the_description_for_the_package_index_has_no_links_into_the_repository(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    about = email.message_from_bytes(wheel.read(name))
    text = about.get_payload()
    assert about["Version"] == secateur.__version__
    assert text.startswith("# secateur")
    assert "## Limits" in text
    assert re.findall(r"!?\[[^\]]*\]\((?!https?:|#)", text) == []
    assert "](" not in re.sub(r"\]\((https?:|#)", "", text)
    assert "LRP (red)" not in text  # the caption of a picture that is not there
