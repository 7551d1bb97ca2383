"""The recipes for CI and clusters: valid, and of commands that exist."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from labutils.tools.cli import _parser
from tests.helpers import REPO

FOLDER = REPO / ".ci" / "recipes"
SCHEMAS = {"github.yml": "vendor.github-workflows", "gitlab.yml": "vendor.gitlab-ci"}
FILES = sorted([*FOLDER.iterdir(), REPO / ".ci" / "Dockerfile"])


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_recipe_is_valid_by_its_schema(name):
    assert isinstance(yaml.safe_load((FOLDER / name).read_text(encoding="utf-8")), dict)
    if not (program := shutil.which("check-jsonschema")):
        pytest.skip("pip install check-jsonschema")
    transform = ["--data-transform", "gitlab-ci"] if "gitlab" in name else []
    command = [program, "--builtin-schema", SCHEMAS[name], *transform, str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_script_for_slurm_is_bash_and_asks_for_one_gpu():
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    script = FOLDER / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert "#SBATCH --gres=gpu:1\n" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_names_what_there_is(path):
    text = path.read_text(encoding="utf-8")
    extras = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r'-e "\.\[(\w+)\]"', text):
        assert f"\n{extra} = [" in extras
    for name in re.findall(r"(?:^|- run: |- |-m )labutils (\w+)", text, re.M):
        assert "command" in _parser().parse_args([name])
    version = re.search(r"^torch==([\d.]+)", (REPO / "constraints.txt").read_text(), re.M)
    assert version
    assert set(re.findall(r"torch==([\d.]+)", text)) <= {version[1]}


# The first versions that run on Node 24. GitHub's runners lose Node 20:
# https://github.blog/changelog/2025-09-19-deprecation-of-node-20-on-github-actions-runners/
NODE_24 = {"checkout": 5, "setup-python": 6, "upload-artifact": 6}


@pytest.mark.parametrize("path", [FOLDER / "github.yml", REPO / ".github/workflows/test.yml"])
def test_actions_run_on_the_runners_of_today(path):
    used = re.findall(r"uses: actions/([\w-]+)@v(\d+)", path.read_text(encoding="utf-8"))
    assert used and all(int(version) >= NODE_24[name] for name, version in used)


def test_the_image_has_the_course_where_no_hub_mounts_a_home():
    text = (REPO / ".ci" / "Dockerfile").read_text(encoding="utf-8")
    [folder] = re.findall(r"^WORKDIR (\S+)\nCOPY", text, re.M)
    assert not folder.startswith("/home")
