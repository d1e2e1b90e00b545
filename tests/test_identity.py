"""A model that was swapped under its name is told from the one before, without reading all of it."""

import os

import pytest

from opd.errors import PreflightError
from opd.identity import SAMPLE_BYTES, SAMPLES, identity_of, require_same_models


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(os.urandom(2 * SAMPLES * SAMPLE_BYTES))
    (tmp_path / "README.md").write_text("mine")
    return tmp_path


def test_a_changed_configuration_other_weights_and_a_file_more_are_named_and_notes_are_not(folder):
    before = identity_of(str(folder), None)
    (folder / "README.md").write_text("changed")
    assert identity_of(str(folder), None) == before
    (folder / "config.json").write_text('{"rope_theta": 1}')
    (folder / "model.safetensors").write_bytes(os.urandom(2 * SAMPLES * SAMPLE_BYTES))
    (folder / "more.safetensors").write_bytes(b"")
    with pytest.raises(PreflightError, match="teacher") as caught:
        require_same_models({"teacher": before}, {"teacher": identity_of(str(folder), None)}, {"teacher": "some/name"})
    assert caught.value.where == "some/name"
    assert caught.value.why.endswith("config.json, model.safetensors, more.safetensors")


def test_weights_that_differ_at_one_end_only_are_told_apart(folder):
    weights = folder / "model.safetensors"
    before, content = identity_of(str(folder), None), weights.read_bytes()
    for changed in (b"\x00\x01\x02\x03" + content[4:], content[:-4] + b"\x00\x01\x02\x03"):
        weights.write_bytes(changed)
        assert identity_of(str(folder), None) != before


def test_a_hub_name_is_known_by_its_revision():
    assert identity_of("org/name", "abc") == {"revision": "abc"}
