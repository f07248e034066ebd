"""Workflows, the Dockerfile and the KubeRay cluster have the structure that their readers expect.

Neither a hosted runner nor a container engine nor a cluster is at hand; fields are checked by name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is missing: pip install -e '.[serve]'")

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
DEPLOY = ROOT / "docs" / "deploy"
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

WORKFLOW_KEYS = {"name", "on", "permissions", "concurrency", "env", "jobs"}
JOB_KEYS = {
    *("if", "runs-on", "timeout-minutes", "strategy", "needs", "environment", "permissions"),
    "steps",
}
STEP_KEYS = {"name", "uses", "with", "run"}
CONTAINER_KEYS = {
    *("name", "image", "env", "ports", "resources", "securityContext", "volumeMounts"),
}


def workflow(name: str) -> dict[str, Any]:
    found: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    if True in found:  # YAML 1.1 reads the key `on` as a truth value.
        found["on"] = found.pop(True)
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_a_workflow_has_known_fields_and_limits(name: str) -> None:
    found = workflow(name)
    assert set(found) <= WORKFLOW_KEYS
    assert found["permissions"] == {"contents": "read"}
    for job in found["jobs"].values():
        assert set(job) <= JOB_KEYS
        assert 0 < job["timeout-minutes"] <= 360
        assert set(job.get("needs", [])) <= set(found["jobs"])
        for step in job["steps"]:
            assert set(step) <= STEP_KEYS
            assert ("uses" in step) != ("run" in step)
            # Pinned to a version, by an owner.
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1"))


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_commands_of_a_workflow_exist(name: str) -> None:
    for job in workflow(name)["jobs"].values():
        for command in commands(job):
            assert set(re.findall(r"\bmake ([\w-]+)", command)) <= TARGETS
            for script in re.findall(r"scripts/[\w.]+", command):
                assert (ROOT / script).exists()


def test_each_change_is_tested_and_linted_and_each_night_everything_runs() -> None:
    found = workflow("ci.yml")
    assert {"push", "pull_request", "schedule"} <= set(found["on"])
    jobs = found["jobs"]
    assert "make test" in commands(jobs["test"])
    assert "make lint" in commands(jobs["lint"])
    assert "make test-all" in commands(jobs["all"])
    assert "schedule" in jobs["all"]["if"]
    for name in ("test", "lint"):
        assert jobs[name]["if"] == "github.event_name != 'schedule'"


def test_a_release_builds_both_architectures_and_holds_no_token() -> None:
    found = workflow("release.yml")
    assert found["on"]["push"]["tags"] == ["v*"]
    jobs = found["jobs"]
    matrix = jobs["wheel"]["strategy"]["matrix"]["include"]
    assert {entry["arch"] for entry in matrix} == {"x86_64", "aarch64"}
    [build] = [s for s in jobs["wheel"]["steps"] if s.get("uses", "").startswith("PyO3/maturin")]
    assert build["with"]["manylinux"] == "2_28"
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert set(publish["needs"]) == {"wheel", "sdist", "test-all"}
    assert "refs/tags/v" in publish["if"]
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text()


def test_the_image_is_built_from_files_that_exist_and_runs_as_rays_user() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER"}
    assert {word for word, _ in lines} <= known
    stages = [rest for word, rest in lines if word == "FROM"]
    assert stages == ["rust:1-bookworm AS build", "${RAY_IMAGE}"]
    assert ["USER", "ray"] in lines
    assert [rest for word, rest in lines if word == "USER"][-1] == "ray"
    targets = {
        t for word, rest in lines if word == "RUN" for t in re.findall(r"make ([\w-]+)", rest)
    }
    assert targets == {"wheel"}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", "native/target", "fabric_ray/*.so"} <= set(ignored)
    for needed in ("Makefile", "pyproject.toml", "README.md", "scripts", "kernels"):
        assert needed not in ignored


def test_the_cluster_gives_every_pod_image_token_ports_and_shared_memory() -> None:
    cluster, policy = yaml.safe_load_all((DEPLOY / "raycluster.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert set(spec) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    image = re.search(r"rayproject/ray:([\d.]+)-", (DEPLOY / "Dockerfile").read_text())
    assert image is not None
    assert spec["rayVersion"] == image[1]
    [workers] = spec["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (spec["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        assert set(pod) == {"containers", "volumes"}
        [container] = pod["containers"]
        assert set(container) <= CONTAINER_KEYS
        assert container["image"].startswith("fabric-ray:")
        env = {entry["name"]: entry for entry in container["env"]}
        assert env["FABRIC_RAY_TOKEN"]["valueFrom"]["secretKeyRef"] == {
            "name": "fabric-ray",
            "key": "token",
        }
        assert env["FABRIC_RAY_PORTS"]["value"] == "20000-20099"
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]
    labels = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def test_variables_of_the_cluster_are_options_of_engines() -> None:
    from fabric_ray import EngineConfig

    text = (DEPLOY / "raycluster.yaml").read_text()
    named = {n.lower() for n in re.findall(r"FABRIC_RAY_(\w+)", text)}
    assert named == {"token", "ports", "require"}
    assert named <= set(EngineConfig.model_fields)
